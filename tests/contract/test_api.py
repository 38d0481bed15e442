"""The small public functions, refusals, and errors that stop a run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.cluster import current_backend
from keras_dist.comm import processes
from tests.contract.harness import Numbers, asking, contract
from tests.contract.parts import compiled, dataset, fitted, mlp, noted_warnings, numbers, undistributed


def ranks_are_numbered(results: list[Numbers], golden: Numbers, size: int) -> None:
    ranks = len(results)  # 1 if the replicas are in one process
    for rank, result in enumerate(results):
        assert result["own_answers"] == {
            "rank": rank, "local_rank": rank, "is_chief": rank == 0, "size": ranks, "num_replicas": size
        }  # fmt: skip


@contract("who-am-i", sizes=(3, 4), verify=ranks_are_numbered, also=("serial-1", "multi_worker-2"))
def test_who_am_i(distribute: Any) -> Numbers:
    functions = (kd.rank, kd.local_rank, kd.is_chief, kd.size, kd.num_replicas)
    return {"own_answers": {function.__name__: function() for function in functions}}


@contract("broadcast", sizes=(3,), also=("serial-1", "multi_worker-2"))
def test_broadcast(distribute: Any) -> Numbers:
    """A value, and as `fit` does it arrays of any type and shape, of which some are sent together."""
    dtypes = ("float64", "uint8", "bool", "float16", tf.bfloat16.as_numpy_dtype, "int64")
    shapes = ((2, 3), (3,), (), (5, 1), (7,), (0, 2))
    arrays = [np.full(shape, 1 + kd.rank(), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with mock.patch.object(processes, "_BUFFER_BYTES", 50):
        received = current_backend().broadcast_arrays(arrays)
    return {
        "array": kd.broadcast(np.arange(3) + kd.rank()), "text": kd.broadcast(f"of rank {kd.rank()}"),
        "none": kd.broadcast(None), "arrays": received,
    }  # fmt: skip


@contract("barrier", also=("serial-1",))
def test_barrier(distribute: Any) -> Numbers:
    """When the chief passes the second barrier, all ranks have written before the first."""
    Path(f"{kd.rank()}").touch()
    kd.barrier()
    count = len(list(Path().iterdir()))
    kd.barrier()
    assert count == kd.size()
    return {}


@contract("init-again", also=("serial-1",))
def test_init_again(distribute: Any) -> Numbers:
    kd.init()
    other = "serial" if kd.size() > 1 else "horovod"
    with pytest.raises(kd.ConfigurationError, match="was called before with another backend"):
        kd.init(other)
    return {}


def chief_is_warned(results: list[Numbers], golden: Numbers, size: int) -> None:
    several = f"each of the {len(results)} ranks does the whole work alone"
    happens = several if len(results) > 1 else "the replicas share no work"
    said = (
        f"the model 'forgotten' is not distributed, so {happens}. "
        "Add `model = kd.distribute(model)` before `model.compile`. If this is intended, ignore this line."
    )
    warnings = [result["own_warnings"] for result in results]
    assert warnings == [[said] if size > 1 else [], *([[]] * (len(results) - 1))]


@contract("warns-undistributed", verify=chief_is_warned)
def test_warns_undistributed(distribute: Any) -> Numbers:
    """Once, and not for models that are distributed."""
    from keras_dist.training.refusals import watch

    plain = keras.Model.make_train_function
    with noted_warnings() as warnings:
        try:
            keras.Model.make_train_function = getattr(plain, "__wrapped__", plain)
            watch(current_backend())  # anew: another test may have had the warning of this process
            weights = fitted(compiled(distribute), *numbers())["weights"]
            with undistributed():
                forgotten = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)], name="forgotten")
                for _ in range(2):
                    fitted(compiled(lambda model: model, model=forgotten), *numbers())
        finally:
            keras.Model.make_train_function = plain
    warnings = [warning for warning in warnings if "is not distributed" in warning]  # on a TPU, also about float64
    return {"weights": weights, "own_warnings": warnings}


def shares_are_named(results: list[Numbers], golden: Numbers, size: int) -> None:
    note = f"keras_dist: a step sees the share of its replica only, about n / {size} of the n rows of a batch."
    assert {result["own_note"] for result in results} == {note}


@contract(
    "error-names-share",
    verify=shares_are_named,
    of=("horovod", "multi_worker", "mirrored", "central_storage", "parameter_server"),
)
def test_error_names_share(distribute: Any) -> Numbers:
    """An error of the script's own inside a step: a layer that needs the whole batch."""
    layers = [keras.Input([4]), keras.layers.Lambda(lambda x: tf.reshape(x, [8, 4]), (4,)), keras.layers.Dense(1)]
    model = compiled(distribute, model=keras.Sequential(layers))
    if kd.num_replicas() == 1:
        return {"own_note": ""}
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="reshape|Incompatible") as caught:
        fitted(model, *numbers(16))
    return {"own_note": caught.value.__notes__[-1]}


@contract("refuses-other-targets")
def test_refuses_other_targets(distribute: Any) -> Numbers:
    with pytest.raises(kd.ConfigurationError, match="Only a Keras model or optimizer can be distributed"):
        kd.distribute(keras.layers.Dense(1))
    return {}


def refused(expected: type[Exception], text: str, action: Any, count: Callable[[], int] = kd.size) -> Numbers:
    """Asserts that several ranks, or what is counted, refuse what one process allows."""
    if count() > 1:
        with pytest.raises(expected, match=text):
            action()
    return {}


@contract("refuses-strategy-scope")
def test_refuses_strategy_scope(distribute: Any) -> Numbers:
    """The scope of a script that used tf.distribute: around all, or a part; an optimizer of Horovod."""

    def fit_in_scope(around: str) -> None:
        def scope(part: str) -> Any:
            is_around = part == around
            return tf.distribute.MirroredStrategy(["CPU:0"]).scope() if is_around else contextlib.nullcontext()

        with scope("all"):
            with scope("model"):
                model = mlp()
            with scope("optimizer"):
                optimizer = keras.optimizers.Adam()
            with scope("metrics"):
                metrics = [keras.metrics.MeanSquaredError()]
            compiled(distribute, optimizer, model=model, metrics=metrics)
            with scope("fit"):
                model.fit(*numbers(), verbose=0)

    expected = "The script has a strategy of tf.distribute.*\n.*Received: .*Mirrored.*\nRemedy: Remove the strategy"
    for around in ("all", "model", "fit", "optimizer", "metrics"):
        refused(kd.ConfigurationError, expected, lambda around=around: fit_in_scope(around), kd.num_replicas)
    if kd.num_replicas() > 1:  # in one process Keras 3 itself fails
        import horovod.keras

        optimizer = horovod.keras.DistributedOptimizer(keras.optimizers.Adam())
        expected = "optimizer 'Adam', which hvd.DistributedOptimizer"
        refused(kd.ConfigurationError, expected, lambda: fitted(compiled(distribute, optimizer), *numbers()))
    keras.utils.set_random_seed(0)
    return fitted(compiled(distribute), *numbers())


@contract("stops-different-data", sizes=(3,), covered_by=("differs-captured",))
def test_stops_different_data(distribute: Any) -> Numbers:
    model = compiled(distribute)
    data = dataset().unbatch().shuffle(50, seed=kd.rank()).batch(8)
    refused(kd.MismatchError, "The ranks read different data", lambda: fitted(model, data))
    return fitted(compiled(distribute), *numbers())  # the cluster still works


@contract("stops-different-learning-rates", sizes=(3,))
def test_stops_different_learning_rates(distribute: Any) -> Numbers:
    """Set between batches, and not on the chief."""

    class OnLastRank(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and kd.rank() == kd.size() - 1:
                self.model.optimizer.learning_rate = 0.7

    model = compiled(distribute)
    rates = "rank 0: 0.1, rank 1: 0." + ("7" if kd.size() == 2 else "1, rank 2: 0.7")
    return refused(kd.MismatchError, rates, lambda: fitted(model, *numbers(), callbacks=[OnLastRank()]))


@contract("stops-different-weights")
def test_stops_different_weights(distribute: Any) -> Numbers:
    model = compiled(distribute)
    fitted(model, *numbers())
    kernel = model.layers[0].kernel
    kernel.assign(kernel + kd.rank())
    words = "rank 1 differ.* in .*kernel"
    return refused(kd.MismatchError, words, lambda: model.evaluate(*numbers(), verbose=0))


@contract("stops-different-models")
def test_stops_different_models(distribute: Any) -> Numbers:
    frozen = mlp()
    frozen.layers[0].trainable = kd.is_chief()  # other gradients: ranks would wait for each other's
    exact = mlp()
    asking(distribute, exact=kd.is_chief())(exact)
    for model, text in (
        (mlp(1 + kd.rank()), "different models"), (exact, "different options"),
        (frozen, "trainable=True.* rank 1 .*trainable=False"),
        (mlp(1, "tanh" if kd.is_chief() else "relu"), r"Dense\(activation='tanh'.* where rank 1 has"),
    ):  # fmt: skip
        action = functools.partial(fitted, compiled(distribute, model=model), numbers()[0], numbers()[0][:, :1])
        refused(kd.MismatchError, text, action)
    return {}


@contract("stops-different-calls", also=("multi_worker-2",))
def test_stops_different_calls(distribute: Any) -> Numbers:
    model = compiled(distribute)

    def save_on_chief() -> None:
        if kd.is_chief():
            model.save("model.keras")
        else:
            kd.barrier()

    return refused(kd.MismatchError, r"rank 0 called model.save.*; rank 1 called kd.barrier", save_on_chief)


@contract("refuses-metric-that-does-not-add-up")
def test_refuses_metric_that_does_not_add_up(distribute: Any) -> Numbers:
    class Latest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="latest")
            self.value = self.add_variable([], "zeros", aggregation="none", name="latest_value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.max(y_pred))

        def result(self) -> Any:
            return self.value

    model = compiled(asking(distribute, verify=False), metrics=[Latest()])
    return refused(kd.NotSupportedError, "latest_value", lambda: fitted(model, *numbers()))


@contract("refuses-late-settings")
def test_refuses_late_settings(distribute: Any) -> Numbers:
    """As in TensorFlow's guides, which catch the error and print it."""
    seven = [tf.config.LogicalDeviceConfiguration()] * 7
    cpu = tf.config.list_physical_devices("CPU")[0]
    late = {
        "set_intra_op_parallelism_threads": lambda: tf.config.threading.set_intra_op_parallelism_threads(7),
        "set_visible_devices": lambda: tf.config.set_visible_devices([], "CPU"),
        "set_logical_device_configuration": lambda: tf.config.set_logical_device_configuration(cpu, seven),
    }
    for name, action in late.items():
        refused(RuntimeError, rf"(?s){name} comes after kd\.init.*test_api\.py:\d+: .*above kd\.init", action)
    return {}
