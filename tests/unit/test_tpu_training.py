"""Training through TPUStrategy: its real code on one emulated core, and MirroredStrategy over 8 devices for sums.

One core has to give what plain Keras gives, bit for bit; 8 replicas, with the last batch filled up, to rounding.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist import tpu_data
from keras_dist.diagnostics import tpu_compiler
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import logger
from keras_dist.tpu_model import distribute_on_strategy

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 12)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
Dense = keras.layers.Dense


@contextlib.contextmanager
def one_core() -> Iterator[Any]:
    strategy = tpu_compiler.emulated_strategy(1)
    with tpu_compiler.runs_on_cpu():
        yield strategy


def build(*more: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((12,)), Dense(16, "relu"), *more, keras.layers.Dropout(0.1), Dense(2)])


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=0.5), loss, metrics=["accuracy"])
    return model


def trained(model: keras.Model, path: Path, batch: int) -> dict[str, Any]:
    history = model.fit(X, Y, batch_size=batch, epochs=2, validation_data=(X[:50], Y[:50]), verbose=0).history
    model.save(path)
    return {
        "history": history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(X, Y, batch_size=batch, verbose=0),
        "predicted": model.predict(X, batch_size=batch, verbose=0),
        "loaded": keras.models.load_model(path).predict(X, batch_size=batch, verbose=0),
    }


@pytest.mark.parametrize("batch", [25, 32])
def test_one_core_is_plain_keras_bit_for_bit(tmp_path: Path, batch: int) -> None:
    """100 examples, shuffled, in full batches of 25; and of 32, where 4 are left for the last one."""


    def make() -> keras.Model:
        return build(*[keras.layers.BatchNormalization()] * (batch == 25))

    keras.utils.set_random_seed(1)
    plain = trained(compiled(make()), tmp_path / "plain.keras", batch)
    with one_core() as strategy, strategy.scope():
        keras.utils.set_random_seed(1)
        model = distribute_on_strategy(make(), strategy)
        assert type(model.weights[0].value).__name__ == "TPUDistributedVariable"
        on_core = trained(compiled(model), tmp_path / "core.keras", batch)
    for ours, theirs in zip(on_core["weights"], plain["weights"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(on_core["predicted"], plain["predicted"])
    np.testing.assert_array_equal(on_core["loaded"], plain["predicted"])
    assert on_core["predicted"].shape == (100, 2)
    for name, values in plain["history"].items():
        np.testing.assert_allclose(on_core["history"][name], values, rtol=1e-6, atol=0, err_msg=name)
    np.testing.assert_allclose(on_core["evaluated"], plain["evaluated"], rtol=1e-6, atol=0)


def test_jit_is_switched_off_aloud() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger().addHandler(handler)
    try:
        with one_core() as strategy, strategy.scope():
            model = distribute_on_strategy(build(), strategy)
            model.compile("sgd", "mse")
            assert (model.jit_compile, said) == (False, [])
            model.compile("sgd", "mse", jit_compile=True)
    finally:
        logger().removeHandler(handler)
    assert model.jit_compile is False
    assert said == ["jit_compile=True is off on a TPU: TPUStrategy compiles the whole step by itself."]


def test_a_model_from_before_is_refused() -> None:
    model = build()
    with one_core() as strategy, pytest.raises(ConfigurationError, match="made before the TPU was connected"):
        distribute_on_strategy(model, strategy)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: build(keras.layers.BatchNormalization(name="bn")), "layer 'bn' takes statistics"),
        (lambda: OwnStep(*(lambda m: (m.inputs, m.outputs))(build())), "OwnStep has a train_step of its own"),
    ],
    ids=["BatchNorm", "train_step"],
)
def test_what_would_count_rows_that_fill_up_is_refused(make: Any, received: str) -> None:
    with one_core() as strategy, strategy.scope():
        model = compiled(distribute_on_strategy(make(), strategy))
        with pytest.raises(NotSupportedError, match="The last batch may be smaller") as raised:
            model.fit(X, Y, batch_size=32, verbose=0)
    assert received in str(raised.value)


# The data.


def batches(dataset: tf.data.Dataset, replicas: int) -> list[tuple[list[int], list[float], int]]:
    size, _ = tpu_data.batch_size_of(dataset)
    assert size is not None
    shares = tpu_data.shares(tpu_data.padded(dataset, size, replicas), replicas, 0, 1)
    return [(x.numpy().tolist(), rows.numpy().tolist(), int(totals[0])) for x, rows, totals in shares]


def test_the_last_batch_is_filled_up() -> None:
    dataset = tf.data.Dataset.range(5).batch(3)
    assert batches(dataset, 2) == [([0, 1], [1, 1], 3), ([2, 2], [1, 0], 3), ([3, 4], [1, 1], 2), ([4, 4], [0, 0], 2)]


def test_hosts_of_a_pod_take_their_own_shares() -> None:
    even = tpu_data.padded(tf.data.Dataset.range(8).batch(8), 8, 4)
    hosts = [[x.numpy().tolist() for x, _, _ in tpu_data.shares(even, 4, host, 2)] for host in (0, 1)]
    assert hosts == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (tf.data.Dataset.range(9).batch(4), (4, False)),
        (tf.data.Dataset.range(9).batch(4).map(lambda x: x + 1).prefetch(1), (4, False)),
        (tf.data.Dataset.range(9).batch(4, drop_remainder=True).repeat(), (4, True)),
        (tf.data.Dataset.range(9).batch(4).shuffle(2), (None, False)),
    ],
)
def test_the_batch_size_is_known_without_looking_at_data(dataset: tf.data.Dataset, expected: Any) -> None:
    assert tpu_data.batch_size_of(dataset) == expected


@pytest.mark.parametrize(
    ("data", "received"),
    [
        (tf.ragged.constant([[1], [2, 3]]), "RaggedTensorSpec"),
        (tf.constant(["a", "b"]), "dtype=tf.string"),
    ],
    ids=["ragged", "strings"],
)
def test_what_has_no_fixed_shape_is_refused(data: Any, received: str) -> None:
    with pytest.raises(NotSupportedError, match=received):
        tpu_data.check_shapes(tf.data.Dataset.from_tensor_slices(data).batch(2))


# Sums over replicas.

# MirroredStrategy runs the steps, one by one: its own iterator loses int32 between devices (TensorFlow 2.21).
EIGHT = """
import json, sys
import keras, numpy as np, tensorflow as tf
from keras_dist import tpu_data
from keras_dist.tpu_model import distribute_on_strategy
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
keras.config.set_floatx("float64")
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 6))
y = rng.integers(0, 3, 70)
words = rng.integers(0, 5, (70, 7))
weights = rng.uniform(size=70)

def model_of(kind):
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3, kernel_regularizer="l2")]
    if kind == "masked":
        layers = [keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.Dense(3)]
    return keras.Sequential(layers)

def loss_of(kind):
    reduction = kind if kind in ("sum", "mean_with_sample_weight") else "sum_over_batch_size"
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)

def data_of(kind):
    data = (words, np.repeat(y[:, None], 7, 1)) if kind == "masked" else (x, y)
    data = (*data, weights) if kind in ("weighted", "mean_with_sample_weight") else data
    if kind == "sum":  # all batches full: nothing is filled up
        return tf.data.Dataset.from_tensor_slices(data).take(64).batch(32, drop_remainder=True)
    return tf.data.Dataset.from_tensor_slices(data).batch(29)

def compiled(kind, strategy=None):
    keras.utils.set_random_seed(3)
    model = model_of(kind)
    model.build((None, 7) if kind == "masked" else (None, 6))
    if strategy is not None:
        model = distribute_on_strategy(model, strategy)
    rate = 0.01 if kind == "sum" else 0.5
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.4), loss_of(kind), metrics=["accuracy"])
    return model

def results(model, logs, predicted):
    return {"logs": logs, "predicted": predicted.tolist(), "weights": [w.tolist() for w in model.get_weights()]}

def alone(kind):
    model = compiled(kind)
    history = model.fit(data_of(kind), epochs=2, verbose=0).history
    return results(model, {name: values[-1] for name, values in history.items()},
                   model.predict(data_of(kind), verbose=0))

def on_eight(kind, strategy):
    model, data = compiled(kind, strategy), data_of(kind)
    replicas = model.distribute_strategy
    replicas.experimental_distribute_dataset(data)
    model.optimizer.build(model.trainable_variables)
    shares = list(tpu_data.shares(tpu_data.padded(data, 32 if kind == 'sum' else 29, 8), 8, 0, 1))
    batches = [strategy.experimental_distribute_values_from_function(
        lambda context: shares[first + context.replica_id_in_sync_group]) for first in range(0, len(shares), 8)]
    train = tf.function(lambda batch: replicas.run(model.train_step, (batch,)))
    predict = tf.function(lambda batch: replicas.run(model.predict_step, (batch,)))
    for _ in range(2):
        model.reset_metrics()
        for batch in batches:
            train(batch)
        logs = {name: float(value) for name, value in model.get_metrics_result().items()}
    return results(model, logs, np.concatenate([predict(batch) for batch in batches]))

kinds = ("plain", "weighted", "sum", "mean_with_sample_weight", "masked")
one = {kind: alone(kind) for kind in kinds}
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(8)])
with strategy.scope():
    eight = {kind: on_eight(kind, strategy) for kind in kinds}
print(json.dumps([one, eight]))
"""


@pytest.mark.more
def test_eight_replicas_add_up_to_one_process() -> None:
    """70 examples in batches of 29, so of 32 rows on 8 replicas; of the last batch, 12, most are filled up."""
    done = subprocess.run(
        [sys.executable, "-c", EIGHT], capture_output=True, text=True, timeout=220,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, eight = json.loads(done.stdout.splitlines()[-1])
    assert one.keys() == eight.keys()
    for kind, expected in one.items():
        for leaf, (path, value) in zip(flat(eight[kind]), flat(expected), strict=True):
            np.testing.assert_allclose(leaf[1], value, rtol=1e-9, atol=1e-12, err_msg=f"{kind}: {path}")


def flat(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        parts = tree if path == "weights" else [tree]
        return [(f"{path} {index}", np.asarray(part)) for index, part in enumerate(parts)]
    return [leaf for name in sorted(tree) for leaf in flat(tree[name], f"{path}{' ' if path else ''}{name}")]


@pytest.mark.parametrize(("verb", "arguments"), [("shard", (X,)), ("run", (len,)), ("reduce", ("mean", 1.0))])
def test_a_loop_of_ones_own_is_refused(verb: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    import keras_dist as kd
    from keras_dist import cluster

    backend = kd.TPU("local")
    monkeypatch.setattr(backend, "strategy", tf.distribute.get_strategy())
    monkeypatch.setattr(cluster, "_backend", backend)
    message = "own is not there yet on this backend.\nReceived: kd.shard, kd.run or kd.reduce on 'tpu'\nRemedy: Train"
    with pytest.raises(NotSupportedError, match=message):
        getattr(kd, verb)(*arguments)
