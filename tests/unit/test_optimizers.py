"""Optimizers of a model, and their learning rates."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_dist.callbacks import LearningRateWarmup
from keras_dist.errors import ConfigurationError
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
    """A new schedule would be refused. It belongs in the table."""
    schedules = keras.optimizers.schedules
    classes = {name for name in dir(schedules) if isinstance(getattr(schedules, name), type)}
    assert classes - {"LearningRateSchedule"} == set(_RATES)


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
