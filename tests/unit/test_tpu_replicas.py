"""What several TPU cores compute, beside the cases of the contract: the numbers of one process, in float64.

Here are batches that most shares fill up, and full ones for the losses and steps for which shares cannot be filled up.
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
from keras_dist.compat.keras_random import SEED_OFFSET
from tests.contract import parts
from tests.tpus import distribute_on_strategy

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]
Layers = keras.layers
BATCH = 29  # so 8 replicas have shares of 4, each filled up; the last batch has 12 of the 70 examples
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 6)), RNG.integers(0, 3, 70)
WORDS, WEIGHTS = RNG.integers(0, 5, (70, 7)), RNG.uniform(size=70)
EVEN = ("sum", "scalar", "none", "add_loss", "own_step")  # nothing is filled up


class AddsLoss(Layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class OwnStep(keras.Model):
    """A mean in a custom step, which Keras does not see."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"own": loss}


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
    if kind == "masked":
        layers = [Layers.Embedding(5, 4, mask_zero=True), Layers.Dense(3)]
    if kind.startswith("batchnorm"):
        layers[1:1] = [Layers.BatchNormalization(synchronized="synchronized" in kind, momentum=0.7)]
    if kind == "dropout":
        layers[1:1] = [Layers.Dropout(0.5, seed=3)]
    if kind == "add_loss":
        layers[1:1] = [AddsLoss()]
    if kind == "own_step":
        inputs = keras.Input((6,))
        return OwnStep(inputs, keras.Sequential(layers)(inputs))
    return keras.Sequential(layers)


def scalar_loss(y: Any, logits: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))


def loss_of(kind: str) -> Any:
    if kind == "scalar":
        return scalar_loss
    reduction = kind if kind in ("sum", "none", "mean_with_sample_weight") else "sum_over_batch_size"
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def data_of(kind: str) -> tf.data.Dataset:
    data = (WORDS, np.repeat(Y[:, None], 7, 1)) if kind == "masked" else (X, Y)
    data = (*data, WEIGHTS) if kind in ("weighted", "mean_with_sample_weight") else data
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.take(48).batch(24, drop_remainder=True) if kind in EVEN else dataset.batch(BATCH)


def compiled(kind: str, strategy: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = model_of(kind)
    model.build((None, 7) if kind == "masked" else (None, 6))
    if strategy is not None:
        model = distribute_on_strategy(model, strategy)
    rate = 0.01 if kind in ("sum", "none") else 0.5
    metrics = None if kind == "own_step" else ["accuracy"]
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.4), loss_of(kind), metrics=metrics)
    return model


def results(model: keras.Model, logs: Any, predicted: Any) -> dict[str, Any]:
    return {"logs": logs, "predicted": predicted, "weights": model.get_weights()}


def trained(kind: str, strategy: Any = None) -> dict[str, Any]:
    model = compiled(kind, strategy)
    history = model.fit(data_of(kind), epochs=2, verbose=0).history
    return results(model, history, model.predict(data_of(kind), verbose=0))


def trained_on_shares(kind: str, count: int) -> dict[str, Any]:
    """The mean of the shares' gradients, for layers that couple the examples of a share."""
    model, loss = compiled(kind), loss_of(kind)

    def with_regularizer(y: Any, logits: Any) -> Any:
        return loss(y, logits) + sum(model.losses)

    offset = SEED_OFFSET if kind == "dropout" else 0
    parts.trained_on_shares(model, with_regularizer, (X, Y), count, seed_offset=offset, in_one_process=True)
    return results(model, {}, model.predict(data_of(kind), verbose=0))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for part, value in theirs.items():
        for name in value if isinstance(value, dict) else range(len(value)):
            np.testing.assert_allclose(
                ours[part][name], value[name], rtol=1e-9, atol=1e-12, err_msg=f"{part}: {name}"
            )


@pytest.mark.parametrize(
    ("kind", "count"),
    [("batchnorm_synchronized", 8), ("masked", 3), ("weighted", 3),
     ("mean_with_sample_weight", 3), *((kind, 3) for kind in EVEN)],
)  # fmt: skip
def test_cores_compute_what_one_process_does(kind: str, count: int) -> None:
    expected = trained(kind)
    with cores(count) as strategy:
        assert_equal(trained(kind, strategy), expected)


@pytest.mark.parametrize(("kind", "count"), [("batchnorm", 8), ("dropout", 3)])
def test_layers_that_couple_the_examples_of_a_share(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BATCH", BATCH)
    expected = trained_on_shares(kind, count)
    with cores(count) as strategy:
        assert_equal(trained(kind, strategy), expected)


def by_batches(strategy: Any = None) -> dict[str, Any]:
    model = compiled("batchnorm_synchronized", strategy)
    for _ in range(3):
        logs = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    tested = model.test_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    return results(model, {**logs, **{f"test_{n}": v for n, v in tested.items()}}, model.predict_on_batch(X[:BATCH]))


def test_batch_by_batch() -> None:
    """`train_on_batch` and its like, with a batch that the replicas don't divide."""
    expected = by_batches()
    with cores(3) as strategy:
        assert_equal(by_batches(strategy), expected)


def per_replica(strategy: Any = None) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Layers.Dense(5, "tanh"), Layers.Dense(1)])
    if strategy is not None:
        model = distribute_on_strategy(model, strategy, batch="per_replica", scale_learning_rate="linear")
    count, size, rate = (1, 12, 0.3) if strategy is None else (3, 4, 0.1)
    model.compile(keras.optimizers.SGD(rate), "mse")
    data = tf.data.Dataset.from_tensor_slices((X, WEIGHTS))
    logs = [model.fit(X, WEIGHTS, batch_size=size, epochs=2, shuffle=False, verbose=0).history["loss"][-1]]
    logs += model.fit(data.repeat().batch(size), epochs=2, steps_per_epoch=2 * count, verbose=0).history["loss"]
    return results(model, {"steps": int(model.optimizer.iterations.numpy()), **dict(enumerate(logs))}, [])


def test_batches_of_each_replica() -> None:
    """`batch="per_replica"` on 3 cores, with batches of 4 for each, as one process on batches of 12."""
    expected = per_replica()
    with cores(3) as strategy:
        assert_equal(per_replica(strategy), expected)
