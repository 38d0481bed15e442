"""Compares what a step has computed on shares with what it computes on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Differences below this part of the group's largest value are rounding: values that cancel each other out.
_FLOOR = 0.1
_FACTOR = 0.2  # of the error may be left when a factor explains it
_AMPLIFIED = 10  # rounding errors of a step, in terms of those that come from rounding its weights and gradients once


def epsilon(dtype: Any) -> float:
    """Returns the machine epsilon of a float type, 0 of other types."""
    dtype = tf.as_dtype(dtype)
    return float(np.spacing(np.ones((), dtype.as_numpy_dtype))) if dtype.is_floating else 0.0


def precisions_of_float32() -> set[str]:
    """Returns the types whose precision the devices use when they multiply float32.

    A TPU rounds to bfloat16, a GPU with TF32 to as many bits as float16 has.
    """
    if tf.config.list_logical_devices("TPU"):
        return {"bfloat16"}
    if tf.config.list_logical_devices("GPU") and tf.config.experimental.tensor_float_32_execution_enabled():
        return {"float16"}
    return {"float32"}


class Quantity(NamedTuple):
    """Something that a step computes.

    Args:
        name: For messages, such as `"the gradient of 'dense/kernel'"`.
        group: What it is compared with in size: the gradients of one update, the state of one metric.
        value: Tensor.
    """

    name: str
    group: str
    value: Any


class Difference(NamedTuple):
    """How far a quantity is off.

    Args:
        name: Of the quantity.
        group: Of the quantity.
        error: The largest difference of a number.
        size: The largest number in one process.
        factor: If the quantity is about that of one process times a factor: the factor. Else NaN.
        is_wrong: True if the difference is more than rounding.
        relative: The error in terms of the sizes by which that is judged.
    """

    name: str
    group: str
    error: float
    size: float
    factor: float
    is_wrong: bool
    relative: float


def table_of(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> Any:
    """Returns a float64 tensor of shape `(n, 4)`, a row for each quantity: error, size, factor, and what is left of the
    error without the factor.
    """
    rows = [_row(one.value, other.value) for one, other in zip(expected, actual, strict=True)]
    return tf.reshape(tf.stack(rows), [-1, 4]) if rows else tf.zeros([0, 4], tf.float64)


def _row(expected: Any, actual: Any) -> Any:
    if expected.dtype in (tf.string, tf.bool):
        same = tf.cond(
            _same_shape(expected, actual), lambda: tf.reduce_all(expected == actual), lambda: tf.constant(False)
        )
        error = tf.where(same, tf.zeros([], tf.float64), tf.ones([], tf.float64))
        return tf.stack([error, tf.zeros_like(error), error * np.nan, error])
    expected, actual = tf.cast(expected, tf.float64), tf.cast(actual, tf.float64)
    infinite = tf.constant([np.inf, 0, np.nan, np.inf], tf.float64)
    return tf.cond(_same_shape(expected, actual), lambda: _compared(expected, actual), lambda: infinite)


def _same_shape(expected: Any, actual: Any) -> Any:
    if expected.shape.rank != actual.shape.rank:
        return tf.constant(False)
    return tf.reduce_all(tf.shape(expected) == tf.shape(actual))


def _compared(expected: Any, actual: Any) -> Any:
    actual = tf.reshape(actual, tf.shape(expected))
    are_same = (expected == actual) | (tf.math.is_nan(expected) & tf.math.is_nan(actual))
    size = _largest(tf.where(tf.math.is_finite(expected), expected, tf.zeros_like(expected)))
    factor = tf.math.divide_no_nan(tf.reduce_sum(expected * actual), tf.reduce_sum(expected * expected))
    error = _largest(tf.where(are_same, tf.zeros_like(expected), actual - expected))
    return tf.stack([error, size, factor, _largest(actual - factor * expected)])


def _largest(values: Any) -> Any:
    largest = tf.reduce_max(tf.concat([[0.0], tf.reshape(tf.abs(values), [-1])], 0))
    return tf.where(tf.math.is_nan(largest), tf.constant(np.inf, tf.float64), largest)


def judge(
    quantities: Sequence[Quantity], table: np.ndarray, precision: float, disturbed: np.ndarray | None = None
) -> list[Difference]:
    """Returns how far each quantity is off.

    Args:
        quantities: In the order of the table.
        table: See `table_of`.
        precision: The relative size of rounding errors that is taken for none.
        disturbed: The table of a step whose weights were rounded once more. `None` if that was not computed.
    """
    scales = _scales(quantities, table)
    amplified = dict[str, float]()  # rounding errors of each group
    if disturbed is not None:
        for quantity, scale, (error, *_) in zip(quantities, scales, disturbed, strict=True):
            relative = _AMPLIFIED * error / scale if error and scale else 0.0
            amplified[quantity.group] = max(amplified.get(quantity.group, 0.0), relative)
    differences = []
    for quantity, scale, (error, size, factor, rest) in zip(quantities, scales, table, strict=True):
        allowed = 0.0 if quantity.value.dtype.is_integer else max(precision, amplified.get(quantity.group, 0.0)) * scale
        relative = error / scale if error and scale else 0.0
        is_wrong = not error <= allowed
        has_factor = is_wrong and rest <= _FACTOR * error
        differences.append(
            Difference(quantity.name, quantity.group, error, size, factor if has_factor else np.nan, is_wrong, relative)
        )
    return differences


def _scales(quantities: Sequence[Quantity], table: np.ndarray) -> list[float]:
    """Returns by what to measure the error of each quantity: its size, and a part of the largest in its group."""
    sizes = dict[str, float]()
    for quantity, row in zip(quantities, table, strict=True):
        sizes[quantity.group] = max(sizes.get(quantity.group, 0.0), row[1])
    return [row[1] + _FLOOR * sizes[quantity.group] for quantity, row in zip(quantities, table, strict=True)]
