"""`batch="per_replica"` and `scale_learning_rate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from tests.contract.harness import Numbers, asking, contract, same
from tests.contract.parts import BATCH, COUNT, compiled, dataset, examples, fitted, mlp, numbers, predictions
from tests.contract.test_api import refused
from tests.contract.test_sources import RowMeans, ragged

SMALL = 3  # 9 batches: 3, ..., 3, 1


BY_ARRAYS = ("per-replica-numpy",)


def per_replica(distribute: Any, **options: Any) -> keras.Model:
    return compiled(asking(distribute, batch="per_replica"), **options)


def with_steps(model: keras.Model, result: Numbers) -> Numbers:
    return {**result, "steps": model.optimizer.iterations}


def by_arrays(distribute: Any, batch_size: int, **options: Any) -> Numbers:
    model = per_replica(distribute, metrics=["mae"], **options)
    return with_steps(model, fitted(model, *numbers(), batch_size=batch_size))


contract("per-replica-numpy", sizes=(3, 4), reference=lambda size: by_arrays(same, SMALL * size))(
    lambda distribute: by_arrays(distribute, SMALL)
)
contract(
    "per-replica-steps-per-execution", covered_by=BY_ARRAYS,
    reference=lambda size: by_arrays(same, SMALL * size, steps_per_execution=2),
)(lambda distribute: by_arrays(distribute, SMALL, steps_per_execution=2))  # fmt: skip


def by_tf(distribute: Any, batch_size: int) -> Numbers:
    data = examples().shuffle(COUNT).filter(lambda x, y: True).batch(batch_size)
    # Keras counts one more step when data of unknown length end: TensorFlow runs operations that do not need the data.
    return fitted(per_replica(distribute), data, epochs=3)


contract("per-replica-tf", sizes=(3, 4), reference=lambda size: by_tf(same, SMALL * size), covered_by=BY_ARRAYS)(
    lambda distribute: by_tf(distribute, SMALL)
)


def by_ragged(distribute: Any, batch_size: int) -> Numbers:
    model = per_replica(distribute, model=RowMeans())
    return with_steps(model, fitted(model, ragged().batch(batch_size)))


contract("per-replica-ragged", reference=lambda size: by_ragged(same, SMALL * size), covered_by=BY_ARRAYS)(
    lambda distribute: by_ragged(distribute, SMALL)
)


def grouped(batches: list[Any], size: int, per_epoch: int | None = None) -> list[Any]:
    """Returns the batches that one process must get: `size` batches of an epoch, concatenated."""
    per_epoch = per_epoch or len(batches)
    epochs = [batches[start : start + per_epoch] for start in range(0, len(batches), per_epoch)]
    groups = [epoch[start : start + size] for epoch in epochs for start in range(0, len(epoch), size)]
    return [tuple(np.concatenate(parts) for parts in zip(*group, strict=True)) for group in groups]


def from_list(batches: list[Any]) -> tf.data.Dataset:
    x, y = batches[0]
    spec = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (x, y))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def in_small_batches() -> list[Any]:
    x, y = numbers()
    return [(x[start : start + SMALL], y[start : start + SMALL]) for start in range(0, COUNT, SMALL)]


def steps_per_epoch_in_one_process(size: int) -> Numbers:
    """An epoch has 5 of the 9 batches: epochs begin in the middle of the data, which are repeated."""
    model, epochs = compiled(same), in_small_batches() * 2
    batches = grouped(epochs[:15], size, per_epoch=5)
    steps = math.ceil(5 / size)
    return with_steps(model, fitted(model, from_list(batches), epochs=3, steps_per_epoch=steps))


@contract(
    "per-replica-steps-per-epoch", sizes=(3,), reference=steps_per_epoch_in_one_process, covered_by=BY_ARRAYS
)
def test_per_replica_steps_per_epoch(distribute: Any) -> Numbers:
    model = per_replica(distribute)
    return with_steps(model, fitted(model, dataset(batch=SMALL).repeat(), epochs=3, steps_per_epoch=5))


def chiefs(size: int) -> Numbers:
    model, batches = compiled(same), from_list(grouped(in_small_batches(), size))
    result = fitted(model, batches, epochs=1)
    return {"generator": result, "tf": fitted(model, batches)}


@contract("per-replica-chief", sizes=(3,), reference=chiefs, covered_by=BY_ARRAYS)
def test_per_replica_chief(distribute: Any) -> Numbers:
    """The chief reads generators by default."""
    model = per_replica(distribute)
    result = fitted(model, (batch for batch in in_small_batches()), epochs=1)
    second = compiled(asking(distribute, batch="per_replica", data="chief"))
    second.set_weights(model.get_weights())
    return {"generator": result, "tf": fitted(second, dataset(batch=SMALL))}


def by_one_batch(distribute: Any) -> Numbers:
    model = per_replica(distribute)
    return with_steps(model, fitted(model, *numbers(5), batch_size=BATCH))


contract("per-replica-small", sizes=(3,), reference=lambda size: by_one_batch(same), covered_by=BY_ARRAYS)(
    lambda distribute: by_one_batch(distribute)
)


def validated(distribute: Any, batch_size: int) -> Numbers:
    """Three validation batches are three steps on any number of ranks."""
    model, data = per_replica(distribute, metrics=["mae"]), dataset(19, 4).repeat()
    result = fitted(model, *numbers(), batch_size=batch_size, validation_data=data, validation_steps=3)
    evaluation = model.evaluate(data, steps=3, verbose=0)
    return {**result, "evaluated": evaluation, "predicted": predictions(model, numbers(19)[0])}


contract(
    "per-replica-validation", sizes=(3,), reference=lambda size: validated(same, SMALL * size), covered_by=BY_ARRAYS
)(lambda distribute: validated(distribute, SMALL))


@contract("per-replica-different-data", covered_by=("stops-different-data",))
def test_per_replica_different_data(distribute: Any) -> Numbers:
    """Also if the rank's own batch is the same."""
    x, y = numbers()
    if kd.rank():
        x[0] += 1  # in the chief's batch
    model, words = per_replica(distribute), "rank 1 of 2 read a different batch"
    return refused(kd.MismatchError, words, lambda: fitted(model, x, y, batch_size=SMALL, shuffle=False))


# --- scale_learning_rate ---

RATE = 0.02  # times 8, training does not diverge yet


def rates_are_scaled(results: list[Numbers], plain: Numbers, size: int) -> None:
    linear, sqrt = RATE * size, RATE * math.sqrt(size)
    expected = {"linear": [linear] * 4, "sqrt": [sqrt] * 4}
    for result in results:
        for rule, rates in result["own_rates"].items():
            np.testing.assert_allclose(rates, expected[rule], rtol=1e-6)


def scaled(distribute: Any, rule: str, factor: float) -> tuple[Numbers, list[float]]:
    """The rate of a model that is compiled before and after, distributed twice, compiled again, and fitted twice."""
    distribute = asking(distribute, scale_learning_rate=rule)
    model = mlp()

    def rate_of(optimizer: Any) -> float:
        model.compile(optimizer, "mse")
        return float(model.optimizer.learning_rate)

    rate_of(keras.optimizers.SGD(RATE * factor))
    distribute(distribute(model))
    rates = [float(model.optimizer.learning_rate), rate_of(keras.optimizers.SGD(RATE * factor))]
    rates.append(rate_of(model.optimizer))
    result = [fitted(model, *numbers()), fitted(model, *numbers())]
    rates.append(float(model.optimizer.learning_rate))
    return {"results": result}, rates


def scaled_by_hand(size: int) -> Numbers:
    factors = {"linear": size, "sqrt": math.sqrt(size)}
    return {rule: scaled(same, rule, factor)[0] for rule, factor in factors.items()} | {"own_rates": {}}


@contract("scale-learning-rate", sizes=(3, 4), tolerance=1e-6, reference=scaled_by_hand, verify=rates_are_scaled)
def test_scale_learning_rate(distribute: Any) -> Numbers:
    results = {rule: scaled(distribute, rule, 1.0) for rule in ("linear", "sqrt")}
    numbers_, rates = ({rule: result[part] for rule, result in results.items()} for part in (0, 1))
    return {**numbers_, "own_rates": rates}


@contract("scale-learning-rate-loaded", covered_by=("scale-learning-rate",))
def test_scale_learning_rate_loaded(distribute: Any) -> Numbers:
    linear = asking(distribute, scale_learning_rate="linear")
    model = compiled(linear, keras.optimizers.Adam(0.01))
    fitted(model, *numbers())
    model.save("model.keras")
    loaded = keras.models.load_model("model.keras")
    rates = [float(loaded.optimizer.learning_rate)]
    actions = [
        lambda: linear(loaded),
        lambda: fitted(loaded, *numbers()),
        lambda: loaded.compile(keras.optimizers.Adam(0.01), "mse"),
    ]
    for action in actions:
        action()
        rates.append(float(loaded.optimizer.learning_rate))
    scale = 1 if distribute is same else kd.num_replicas()
    np.testing.assert_allclose(rates, [0.01 * scale] * 4, rtol=1e-6)
    return {}


SCHEDULES: list[Callable[[], Any]] = [
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 10, 0.2, warmup_target=0.4, warmup_steps=3),
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 10),
    lambda: keras.optimizers.schedules.CosineDecayRestarts(0.1, 4),
    lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5, staircase=True),
    lambda: keras.optimizers.schedules.InverseTimeDecay(0.1, 5, 0.5),
    lambda: keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [0.4, 0.2, 0.1]),
    lambda: keras.optimizers.schedules.PolynomialDecay(0.1, 8, 0.02, 2.0),
]


class Own(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 / (keras.ops.cast(step, "float64") + 1)


@contract("scale-learning-rate-schedules", float32=True)
def test_scale_learning_rate_schedules(distribute: Any) -> Numbers:
    linear = asking(distribute, scale_learning_rate="linear")
    for make in SCHEDULES:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(make()))
        compiled(linear, optimizer)
        inner, factor = optimizer.inner_optimizer, 1 if distribute is same else kd.num_replicas()
        for step in range(12):
            inner.iterations.assign(step)
            np.testing.assert_allclose(inner.learning_rate, factor * make()(step), rtol=1e-6, atol=1e-9)
        assert inner.get_config()["learning_rate"]["class_name"] == type(make()).__name__
    words = "This learning rate cannot be scaled"
    return refused(kd.NotSupportedError, words, lambda: compiled(linear, keras.optimizers.SGD(Own())))


@contract("refuses-other-options")
def test_refuses_other_options(distribute: Any) -> Numbers:
    with pytest.raises(kd.ConfigurationError, match="Use one of 'global', 'per_replica'"):
        kd.distribute(mlp(), batch="local")
    with pytest.raises(kd.ConfigurationError, match="Use one of 'linear', 'sqrt', or None"):
        kd.distribute(mlp(), scale_learning_rate="square")
    with pytest.raises(kd.ConfigurationError, match="The option `batch` is for models only"):
        kd.distribute(keras.optimizers.SGD(), batch="per_replica")
    model = kd.distribute(mlp(), batch="per_replica")
    assert kd.distribute(model) is model
    words = "batch='global' after batch='per_replica'"
    return refused(kd.ConfigurationError, words, lambda: kd.distribute(model, batch="global"))
