"""What a metric adds for a share is tried out on a made-up batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_dist.errors import NotSupportedError
from keras_dist.step import metrics
from keras_dist.step.dependence import Arguments

Y, P = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])
NUMBER = tf.TensorSpec([])


class Counting(keras.metrics.Metric):
    def __init__(self, update: Callable[..., Any], dtype: Any = None, aggregation: str = "sum") -> None:
        super().__init__(name="counting")
        self.update = update
        self.total = self.add_variable([], "zeros", aggregation=aggregation, name="total")
        self.count = self.add_variable([], "zeros", dtype=dtype, name="count")

    def update_state(self, *args: Any) -> None:
        self.update(self, *args)

    def result(self) -> Any:
        return self.total


def of_examples(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign_add(ops.sum(ops.abs(y - prediction)))
    metric.count.assign_add(ops.cast(ops.shape(y)[0], metric.count.dtype))


def of_batches(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign_add(ops.mean(ops.abs(y - prediction)))
    metric.count.assign_add(1)


def of_number(metric: Any, loss: Any) -> None:
    metric.total.assign_add(loss)
    metric.count.assign_add(1)


def largest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.maximum(metric.total, ops.max(prediction)))


def smallest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.minimum(metric.total, ops.min(prediction)))


def latest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.mean(prediction))


def smoothed(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(0.9 * metric.total + 0.1 * ops.mean(prediction))


def of_whole_batch(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign_add(ops.std(prediction))


def kinds(metric: Any, *specs: Any) -> Any:
    found: list[Any] = []

    @tf.function(input_signature=specs, autograph=False)
    def step(*args: Any) -> None:
        found.append(metrics._kinds_of(metric, metric.update_state, Arguments((args, {}))))

    step.get_concrete_function()
    return found[-1]


@pytest.mark.parametrize(
    ("metric", "specs", "expected"),
    [
        (lambda: Counting(of_examples), (Y, P), "sum"),
        (lambda: Counting(of_batches), (Y, P), "mean"),
        (lambda: Counting(of_number), (NUMBER,), "mean"),
        (lambda: Counting(of_examples, dtype="int32"), (Y, P), "sum"),
        (lambda: Counting(of_whole_batch), (Y, P), "whole"),
        (lambda: Counting(largest, aggregation="only_first_replica"), (Y, P), "sum"),
    ],
)
def test_what_an_update_adds(metric: Callable[[], Any], specs: tuple[Any, ...], expected: str) -> None:
    made = metric()
    before = [np.asarray(variable.value) for variable in made.variables]
    assert set(kinds(made, *specs)) == {expected}
    for variable, value in zip(made.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)


@pytest.mark.parametrize(
    ("update", "dtype"),
    [(largest, None), (latest, None), (smallest, None), (smoothed, None), (of_batches, "int32")],
)
def test_what_is_no_sum_is_named(update: Callable[..., Any], dtype: str | None) -> None:
    found = kinds(Counting(update, dtype), Y, P)
    assert isinstance(found, NotSupportedError)
    assert "metric 'counting' (Counting), variable 'counting/" in str(found)


def test_what_cannot_be_traced_is_no_sum() -> None:
    def checked(metric: Any, y: Any, prediction: Any) -> None:
        assert float(ops.max(y)) < 1.0
        metric.total.assign_add(ops.sum(y))

    found = kinds(Counting(checked), Y, P)
    assert "What this metric counts can't be told: `update_state` can't be traced." in str(found)


def square_of_number(metric: Any, loss: Any) -> None:
    metric.total.assign_add(loss**2)


def test_a_number_that_is_no_mean_is_named() -> None:
    """Its share cannot be gathered."""
    assert "variable 'counting/total'" in str(kinds(Counting(square_of_number), NUMBER))
