"""The arguments of `compile` as text: the same for equal arguments, different for others."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

from keras_dist.state.weights import describe


def own_loss(y: Any, prediction: Any) -> Any:
    return prediction - y


def described(loss: Any = "mse", **options: Any) -> list[str]:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", loss, **options)
    return describe(model)


ALWAYS = ["steps_per_execution=1", "run_eagerly=False"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["loss='mse'"]),
        ({"loss": own_loss}, ["loss=own_loss"]),
        ({"loss": functools.partial(own_loss)}, ["loss=partial"]),
        ({"loss": keras.losses.Huber(2.0)}, ["loss=Huber(delta=2.0, reduction='sum_over_batch_size')"]),
        ({"loss": ["mse"], "loss_weights": [0.5]}, ["loss=['mse']", "loss_weights=[0.5]"]),
        ({"metrics": ["mae", keras.metrics.MeanIoU(3)]}, ["loss='mse'", "metrics=['mae', MeanIoU("]),
        ({"weighted_metrics": [np.ones]}, ["loss='mse'", "weighted_metrics=[ones]"]),
    ],
)  # fmt: skip
def test_each_argument_has_a_line(options: dict[str, Any], lines: list[str]) -> None:
    found = described(**options)
    assert found[len(lines) :] == ALWAYS
    for line, beginning in zip(found, lines, strict=False):
        assert line.startswith(beginning)


def test_made_twice_is_alike() -> None:
    first, second = (described(keras.losses.Huber(), metrics=[keras.metrics.AUC()]) for _ in range(2))
    assert first == second


def test_a_model_that_is_not_compiled_has_no_lines() -> None:
    assert describe(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])) == []
