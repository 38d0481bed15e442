"""Asynchronous training, whoever is faster: no update is lost, none is too stale, a commit has all of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.fault_runs import in_mode

pytestmark = pytest.mark.full
SECONDS = 120
ROWS, BATCH, STEPS = 203, 4, 51
OTHERS = 3  # batches that are under way beside a step: two for each of two workers are
SLOW = 1e3  # targets above it mark the batch whose step is a slow one


def in_async(train: Any, max_staleness: int | None = None) -> Any:
    with in_mode("async", max_staleness):
        return train()


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    return x, x.sum(axis=1, keepdims=True)


def built(*layers: Any, distribute: bool = True, **options: Any) -> Any:
    """Returns a model of one number, of the same weights each time."""
    import keras

    import keras_dist as kd

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, **options)])
    return kd.distribute(model) if distribute else model


def gradients_applied(together: int) -> dict[str, Any]:
    """The loss is linear in the weights, so each batch's gradient is the same whatever they are; so is the metric."""
    import keras
    import tensorflow as tf

    def size(y_true: Any, y_pred: Any) -> Any:
        return tf.abs(y_true)[:, 0]

    model = built(use_bias=False)
    before = model.get_weights()[0]
    model.compile(keras.optimizers.SGD(0.01), lambda y, p: p[:, 0], metrics=[size], steps_per_execution=together)
    history = model.fit(*data(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
    applied = before - model.get_weights()[0]
    return {"applied": applied, "iterations": int(model.optimizer.iterations), "size": history["size"]}


@pytest.mark.parametrize("together", [1, 3])
def test_no_gradient_and_no_example_is_lost(pool: WorkerPool, together: int) -> None:
    (result,) = pool.run(in_async, functools.partial(gradients_applied, together), timeout=SECONDS)
    x, y = data()
    of_epoch = sum(x[start : start + BATCH].mean(axis=0) for start in range(0, ROWS, BATCH))
    np.testing.assert_allclose(result["applied"][:, 0], 3 * 0.01 * of_epoch, rtol=1e-10)
    np.testing.assert_allclose(result["size"], [np.abs(y).mean()] * 3, rtol=1e-12)
    assert result["iterations"] == 3 * STEPS


def trained(distribute: bool) -> dict[str, Any]:
    import keras

    model = built(distribute=distribute)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
    losses = model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    return {"losses": losses, "weights": model.get_weights()}


def test_without_staleness_it_is_one_process(pool: WorkerPool) -> None:
    (result,) = pool.run(in_async, functools.partial(trained, True), 0, timeout=SECONDS)
    (expected,) = pool.run(trained, False, timeout=SECONDS)
    np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-9)
    for own, weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)


def committed(folder: str) -> dict[str, Any]:
    """Trains at rate 0 in two calls of `fit`, of which the first one is interrupted."""
    import keras

    import keras_dist as kd

    class Crashing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("after the epoch, before it is committed")

    x, y = data()

    def fit(*callbacks: Any) -> Any:
        model = built()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        commit = kd.callbacks.Commit(folder, every=20)
        return model, model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[commit, *callbacks])

    with pytest.raises(RuntimeError, match="before it is committed"):
        fit(Crashing())
    model, history = fit()
    error = x @ model.get_weights()[0] + model.get_weights()[1] - y
    steps = [entry.step for entry in kd.callbacks.Commit(folder).commits.list()]
    iterations = int(model.optimizer.iterations)
    return {"loss": history.history["loss"], "all": float(np.mean(error**2)), "steps": steps, "iterations": iterations}


def test_a_commit_waits_for_the_steps_that_have_begun(pool: WorkerPool, tmp_path: Any) -> None:
    (result,) = pool.run(in_async, functools.partial(committed, str(tmp_path / "commits")), timeout=SECONDS)
    np.testing.assert_allclose(result["loss"], [result["all"]] * 2, rtol=1e-12)
    assert (result["iterations"], result["steps"]) == (2 * STEPS, [80, 100, 102])


def began(verb: str) -> str:
    """Returns how a custom loop, or a verification, is refused."""
    import keras
    import tensorflow as tf

    import keras_dist as kd

    begin = {
        "kd.distribute": lambda: kd.distribute(keras.optimizers.SGD()),
        "kd.shard": lambda: kd.shard(tf.data.Dataset.range(4).batch(2)),
        "kd.run": lambda: kd.run(len, (tf.zeros([2]),)),
        "verify=True": lambda: kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), verify=True),
    }[verb]
    with pytest.raises(kd.NotSupportedError) as info:
        begin()
    return str(info.value)


@pytest.mark.parametrize("verb", ["kd.distribute", "kd.shard", "kd.run", "verify=True"])
def test_what_needs_steps_one_after_the_other_is_refused(verb: str, pool: WorkerPool) -> None:
    (text,) = pool.run(in_async, functools.partial(began, verb), timeout=SECONDS)
    assert f"Received: {verb}" in text
    if verb == "verify=True":
        assert "A verification compares steps with those of one process, but asynchronous workers" in text
        assert "Remedy: Leave `verify` out" in text
    else:
        assert "A custom training loop waits for the result of each step" in text
        assert "mode='async')\nRemedy: Use mode='sync'" in text


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


@pytest.mark.parametrize("bound", [0, 2, None])
def test_staleness_is_bounded(pool: WorkerPool, bound: int | None) -> None:
    """It is seen where it is not bounded, so the test could fail."""
    seconds = 60.0 if bound is None else 5.0
    (others,) = pool.run(in_async, functools.partial(staleness, seconds), bound, timeout=SECONDS)
    assert others == OTHERS if bound is None else others <= bound
