"""Several TPU cores, beside the cases of the contract: losses and steps whose shares can't be filled up, in full
batches, and calls with one batch. The numbers are those of one process, in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import tpu_emulation
from tests.tpus import distribute_on_strategy

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]
Layers = keras.layers
BATCH = 29  # so 3 replicas have shares of 10, 10 and 9
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 6)), RNG.integers(0, 3, 70)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@contextlib.contextmanager
def cores(count: int) -> Iterator[tf.distribute.Strategy]:
    strategy = tpu_emulation.emulated_strategy(count)
    with tpu_emulation.runs_on_cpu(), strategy.scope():
        yield strategy


def model_of(kind: str) -> keras.Model:
    layers: list[Any] = [Layers.Dense(5, "tanh"), Layers.Dense(3, kernel_regularizer=None if kind == "none" else "l2")]
    if kind == "batchnorm":
        layers[1:1] = [Layers.BatchNormalization(synchronized=True, momentum=0.7)]
    return keras.Sequential(layers)


def loss_of(kind: str) -> Any:
    if kind == "scalar":
        sparse_categorical_crossentropy = keras.losses.sparse_categorical_crossentropy
        return lambda y, logits: tf.reduce_mean(sparse_categorical_crossentropy(y, logits, from_logits=True))
    reduction = kind if kind in ("sum", "none") else "sum_over_batch_size"
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def compiled(kind: str, strategy: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = model_of(kind)
    model.build((None, 6))
    if strategy is not None:
        model = distribute_on_strategy(model, strategy)
    optimizer = keras.optimizers.SGD(0.01 if kind in ("sum", "none") else 0.5, momentum=0.9, global_clipnorm=0.4)
    model.compile(optimizer, loss_of(kind), metrics=["accuracy"])
    return model


def results(model: keras.Model, logs: Any, predicted: Any) -> dict[str, Any]:
    return {"logs": logs, "predicted": predicted, "weights": model.get_weights()}


def trained(kind: str, strategy: Any = None) -> dict[str, Any]:
    model = compiled(kind, strategy)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).take(48).batch(24, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0).history
    return results(model, history, model.predict(data, verbose=0))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for part, value in theirs.items():
        for name in value if isinstance(value, dict) else range(len(value)):
            np.testing.assert_allclose(ours[part][name], value[name], rtol=1e-9, atol=1e-12, err_msg=f"{part}: {name}")


@pytest.mark.parametrize("kind", ["sum", "scalar", "none"])
def test_cores_compute_what_one_process_does(kind: str) -> None:
    expected = trained(kind)
    with cores(3) as strategy:
        assert_equal(trained(kind, strategy), expected)


def by_batches(strategy: Any = None) -> dict[str, Any]:
    model = compiled("batchnorm", strategy)
    for _ in range(3):
        logs = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    tested = model.test_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    return results(model, {**logs, **{f"test_{n}": v for n, v in tested.items()}}, model.predict_on_batch(X[:BATCH]))


def test_batch_by_batch() -> None:
    """`train_on_batch` and its like, with a batch that the replicas don't divide."""
    expected = by_batches()
    with cores(3) as strategy:
        assert_equal(by_batches(strategy), expected)
