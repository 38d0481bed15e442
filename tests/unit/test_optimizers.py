"""Optimizers of a model, and their learning rates."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.callbacks import LearningRateWarmup
from keras_dist.step import optimizer as step_optimizer
from keras_dist.step.optimizer import _RATES, optimizers_of


def test_containers_that_contain_themselves() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    first, second = keras.optimizers.SGD(), keras.optimizers.Adam()
    model.ring = {"first": first}
    model.ring["self"] = model.ring
    model.queue = [second]
    model.queue.append(model.queue)
    assert set(map(id, optimizers_of(model))) == {id(first), id(second)}


def test_every_schedule_of_keras_is_known() -> None:
    """Each argument of a schedule is a rate, or one of those that are none."""
    others = {
        "decay_steps", "decay_rate", "staircase", "alpha", "warmup_steps", "first_decay_steps", "t_mul", "m_mul",
        "boundaries", "power", "cycle", "name",
    }  # fmt: skip
    schedules = keras.optimizers.schedules
    classes = [each for each in vars(schedules).values() if isinstance(each, type)]
    found = [set(inspect.signature(each).parameters) for each in classes if each is not schedules.LearningRateSchedule]
    assert set.union(*found) == others | set(_RATES)
    assert all(names & set(_RATES) for names in found)


def test_a_warmup_of_several_optimizers_and_another_target() -> None:
    """Each rate starts at its own fraction of the target. A second model starts again."""
    warmup = LearningRateWarmup(epochs=2, target=0.4)
    warmup.size = 4
    for _ in range(2):
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.other_optimizer = keras.optimizers.Adam(0.5)
        rates = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model, rates=rates: rates.append(
                [float(model.optimizer.learning_rate), float(model.other_optimizer.learning_rate)]
            )
        )
        model.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[warmup, look])
        expected = [0.1, 0.175, 0.25, 0.325, 0.4, 0.4]
        np.testing.assert_allclose(rates, [[rate, rate] for rate in expected], rtol=1e-6)


class Own(keras.optimizers.SGD):
    pass


def own(argument: Any = None) -> Any:
    return tf.constant(0.1) if argument is None else argument


@pytest.mark.parametrize(
    ("make", "constraint", "large", "message"),
    [
        (keras.optimizers.Adam, None, 6, "XLA compiles its update"),
        (keras.optimizers.Adam, None, 7, ""),
        (Own, None, 0, "its update is not fused, because Own is not Keras's"),
        (lambda: keras.optimizers.LossScaleOptimizer(Own()), None, 0, "because Own is not Keras's"),
        (lambda: keras.optimizers.SGD(own), None, 0, "because it calls the script's own <function own"),
        (keras.optimizers.SGD, own, 0, "because it calls the script's own <function own"),
        (keras.optimizers.SGD, keras.constraints.NonNeg(), 0, "XLA compiles its update"),
    ],
)
def test_an_update_is_fused_if_it_is_large_and_kerass(
    make: Callable[[], Any],
    constraint: Any,
    large: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It does what it does without; `test_fused_update` of the contract compares it with one process."""
    monkeypatch.setattr(step_optimizer, "FUSED_FROM", (large, 0))
    monkeypatch.setattr(logging.getLogger("keras_dist"), "propagate", True)
    caplog.set_level(logging.DEBUG, "keras_dist")
    layer = keras.layers.Dense(2, kernel_constraint=constraint)
    layer.build([None, 2])
    before = layer.kernel.numpy()
    optimizer = make()
    update = step_optimizer.fused(optimizer, optimizer.apply)
    tf.function(lambda: update([tf.ones([2, 2]), tf.ones([2])], layer.trainable_variables))()
    assert (layer.kernel.numpy() != before).any()
    assert message in caplog.text
    assert bool(message) == ("fused" in caplog.text or "XLA" in caplog.text)


def test_a_sparse_gradient_is_applied_without_xla() -> None:
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
    optimizer, variables = keras.optimizers.SGD(), [keras.Variable(np.zeros([2, 2]))]
    assert step_optimizer._why_not_fused(optimizer, [rows], variables) == "a gradient has rows of a table only"
