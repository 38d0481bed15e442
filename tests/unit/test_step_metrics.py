"""What a metric adds for a share is tried out on a made-up batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from keras_dist.errors import NotSupportedError
from keras_dist.step import metrics
from keras_dist.step.dependence import Arguments

Y, P = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])


class Counting(keras.metrics.Metric):
    def __init__(self, update: Callable[..., Any], dtype: Any = None) -> None:
        super().__init__(name="counting")
        self.update = update
        self.total = self.add_variable([], "zeros", name="total")
        self.count = self.add_variable([], "zeros", dtype=dtype, name="count")

    def update_state(self, *args: Any) -> None:
        self.update(self, *args)

    def result(self) -> Any:
        return self.total


def of_batches(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign_add(ops.mean(ops.abs(y - prediction)))
    metric.count.assign_add(1)


def largest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.maximum(metric.total, ops.max(prediction)))


def smallest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.minimum(metric.total, ops.min(prediction)))


def latest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.mean(prediction))


def smoothed(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(0.9 * metric.total + 0.1 * ops.mean(prediction))


def kinds(metric: Any, *specs: Any) -> Any:
    found: list[Any] = []

    @tf.function(input_signature=specs, autograph=False)
    def step(*args: Any) -> None:
        found.append(metrics._kinds_of(metric, metric.update_state, Arguments((args, {}))))

    step.get_concrete_function()
    return found[-1]


@pytest.mark.parametrize(
    ("update", "dtype"),
    [(largest, None), (latest, None), (smallest, None), (smoothed, None), (of_batches, "int32")],
)
def test_what_is_no_sum_is_named(update: Callable[..., Any], dtype: str | None) -> None:
    found = kinds(Counting(update, dtype), Y, P)
    assert isinstance(found, NotSupportedError)
    assert "metric 'counting' (Counting), variable 'counting/" in str(found)


def test_what_cannot_be_traced_is_no_sum() -> None:
    found = kinds(Counting(lambda metric, y, prediction: metric.total.assign_add(float(ops.max(y)))), Y, P)
    assert "What this metric counts can't be told: `update_state` can't be traced." in str(found)


def test_a_number_that_is_no_mean_is_named() -> None:
    """Its share cannot be gathered."""
    square = lambda metric, loss: metric.total.assign_add(loss**2)  # noqa: E731
    assert "variable 'counting/total'" in str(kinds(Counting(square), tf.TensorSpec([])))
