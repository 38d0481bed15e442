"""Scaling of learning rates, and the arguments of the warm-up. The contract tests the numbers in training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from keras_dist.callbacks import LearningRateWarmup
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.step.optimizer import _RATES, scale, variable_of


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_a_rate_is_scaled_once(rule: str, expected: float) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(2):
        scale(optimizer, rule, 4)
        np.testing.assert_allclose(float(optimizer.learning_rate), expected, rtol=1e-6)


def test_another_rule_is_refused() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    scale(optimizer, "linear", 4)
    with pytest.raises(ConfigurationError, match="scale_learning_rate='sqrt' after 'linear'"):
        scale(optimizer, "sqrt", 4)


def test_an_optimizer_that_has_made_steps_keeps_its_rate() -> None:
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.iterations.assign(7)
    scale(optimizer, "linear", 4)
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.1, rtol=1e-6)


def test_a_function_is_refused_each_time() -> None:
    optimizer = keras.optimizers.SGD(lambda: 0.1)
    for _ in range(2):
        with pytest.raises(NotSupportedError, match="neither a number nor one of Keras's schedules"):
            scale(optimizer, "linear", 2)


def test_every_schedule_of_keras_is_known() -> None:
    """A new schedule would be refused. It belongs in the table."""
    schedules = keras.optimizers.schedules
    classes = {name for name in dir(schedules) if isinstance(getattr(schedules, name), type)}
    assert classes - {"LearningRateSchedule"} == set(_RATES)


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_variable_of_a_rate(is_nested: bool) -> None:
    optimizer: Any = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if is_nested else optimizer
    variable = variable_of(optimizer)
    optimizer.learning_rate = 0.3
    np.testing.assert_allclose(float(variable), 0.3, rtol=1e-6)


def test_a_schedule_has_no_variable() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    assert variable_of(keras.optimizers.SGD(schedule)) is None


@pytest.mark.parametrize("epochs", [0, -1])
def test_a_warmup_must_have_a_length(epochs: int) -> None:
    with pytest.raises(ConfigurationError, match=f"epochs={epochs}"):
        LearningRateWarmup(epochs=epochs)


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
