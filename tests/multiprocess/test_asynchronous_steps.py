"""What holds in asynchronous training whoever is faster: no update is lost, and none is staler than allowed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.coordinators import in_mode

SECONDS = 120
ROWS, BATCH = 203, 4
OTHERS = 3
"""Batches that are under way beside a step: two for each of two workers are."""
SLOW = 1e3
"""Targets above it mark the batch whose step is a slow one."""


def in_async(train: Any, max_staleness: int | None) -> Any:
    with in_mode("async", max_staleness):
        return train()


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    return x, x.sum(axis=1, keepdims=True)


def gradients_applied() -> dict[str, Any]:
    """The loss is linear in the weights, so each batch's gradient is the same whatever they are."""
    import keras

    import keras_dist as kd

    keras.config.set_floatx("float64")
    x, y = data()
    model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)]))
    before = model.get_weights()[0]
    model.compile(keras.optimizers.SGD(0.01), lambda y_true, y_pred: y_pred[:, 0])
    model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return {"applied": before - model.get_weights()[0], "iterations": int(model.optimizer.iterations)}


@pytest.mark.full
def test_no_gradient_is_lost(pool: WorkerPool) -> None:
    (result,) = pool.run(in_async, gradients_applied, None, timeout=SECONDS)
    x, _ = data()
    of_epoch = sum(x[start : start + BATCH].mean(axis=0) for start in range(0, ROWS, BATCH))
    np.testing.assert_allclose(result["applied"][:, 0], 3 * 0.01 * of_epoch, rtol=1e-10)
    assert result["iterations"] == 3 * 51


def loop_began(verb: str) -> str:
    """Returns how a custom loop is refused."""
    import keras
    import tensorflow as tf

    import keras_dist as kd

    begin = {
        "distribute": lambda: kd.distribute(keras.optimizers.SGD()),
        "shard": lambda: kd.shard(tf.data.Dataset.range(4).batch(2)),
        "run": lambda: kd.run(len, (tf.zeros([2]),)),
    }[verb]
    try:
        begin()
    except kd.NotSupportedError as error:
        return str(error)
    return "not refused"


@pytest.mark.full
@pytest.mark.parametrize("verb", ["distribute", "shard", "run"])
def test_a_custom_loop_is_refused(verb: str, pool: WorkerPool) -> None:
    (text,) = pool.run(in_async, functools.partial(loop_began, verb), None, timeout=SECONDS)
    assert "A custom training loop waits for the result of each step" in text
    assert f"Received: kd.{verb}" in text
    assert "mode='async')\nRemedy: Use mode='sync'" in text


def verified() -> str:
    """Returns how a verification is refused."""
    import keras

    import keras_dist as kd

    try:
        kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), verify=True)
    except kd.NotSupportedError as error:
        return str(error)
    return "not refused"


@pytest.mark.full
def test_a_verification_is_refused(pool: WorkerPool) -> None:
    (text,) = pool.run(in_async, verified, None, timeout=SECONDS)
    assert "A verification compares steps with those of one process, but asynchronous workers" in text
    assert "Received: verify=True" in text
    assert "Remedy: Leave `verify` out" in text


def staleness(seconds: float) -> int:
    """Returns how many steps of others came between a step's reading of weights and its applying of gradients.

    The first step is a slow one: it waits until `OTHERS` have come between, for so many seconds at most. The others
    wait until it has read.
    """
    import keras
    import tensorflow as tf

    import keras_dist as kd

    def wait_until(is_so: Any) -> Any:
        end = tf.timestamp() + seconds
        return tf.while_loop(lambda so: ~so & (tf.timestamp() < end), lambda so: (is_so(),), (is_so(),))[0]

    class Watched(keras.Sequential):
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.others = keras.metrics.Sum(name="others")
            with tf.device("/job:ps/task:0"):  # a weight that isn't trained is assigned after the step
                self.has_read = tf.Variable(False, trainable=False)

        def train_step(self, batch: Any) -> Any:
            is_slow = tf.reduce_any(batch[1] > SLOW)
            before = tf.identity(self.optimizer.iterations.value)
            with tf.control_dependencies([before]):
                tf.cond(is_slow, lambda: self.has_read.assign(True), lambda: False)
            passed = wait_until(
                lambda: tf.where(is_slow, self.optimizer.iterations.value - before >= OTHERS, self.has_read)
            )
            with tf.control_dependencies([passed]):
                self.others.update_state(tf.where(is_slow, self.optimizer.iterations.value - before, 0))
                return {**super().train_step(batch), "others": self.others.result()}

    keras.config.set_floatx("float64")
    x, y = data()
    y[0] = 2 * SLOW
    model = kd.distribute(Watched([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return int(model.others.result())


@pytest.mark.full
@pytest.mark.parametrize("bound", [0, 2])
def test_staleness_is_bounded(pool: WorkerPool, bound: int) -> None:
    (others,) = pool.run(in_async, functools.partial(staleness, seconds=5.0), bound, timeout=SECONDS)
    assert others <= bound


@pytest.mark.full
def test_staleness_is_seen_where_it_is_not_bounded(pool: WorkerPool) -> None:
    """So that the test above could fail."""
    (others,) = pool.run(in_async, functools.partial(staleness, seconds=60.0), None, timeout=SECONDS)
    assert others == OTHERS
