"""A step that is run to look at what it computes: everything that it assigns is undone, and numbers are compared."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_dist.compat import keras_model, tf_compat, tf_graphs
from keras_dist.compat.keras_model import Attributes, attached
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import build_at_once, parts_of, variables_of

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
    """Something that a step computes."""

    name: str  # for messages, such as `"the gradient of 'dense/kernel'"`
    group: str  # what it is compared with in size: the gradients of one update, the state of one metric
    value: Any  # tensor


class Difference(NamedTuple):
    """How far a quantity is off."""

    name: str
    group: str
    error: float  # the largest difference of a number
    size: float  # the largest number in one process
    factor: float  # if the quantity is about the one of one process times a factor: the factor, else NaN
    is_wrong: bool  # the difference is more than rounding
    relative: float  # the error in terms of the sizes by which it is judged


def table_of(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> Any:
    """Returns a float64 tensor of shape `(n, 4)`, a row for each quantity: error, size, factor, and what is left of the
    error without the factor.
    """
    with tf_compat.functions_run_eagerly(False):  # one call for each quantity, not forty small operations
        rows = [_row(one.value, other.value) for one, other in zip(expected, actual, strict=True)]
    return tf.reshape(tf.stack(rows), [-1, 4]) if rows else tf.zeros([0, 4], tf.float64)


def _row(expected: Any, actual: Any) -> Any:
    have_same_shape = tf.constant(False)
    if expected.shape.rank == actual.shape.rank:
        have_same_shape = tf.reduce_all(tf.shape(expected) == tf.shape(actual))
    if expected.dtype in (tf.string, tf.bool):
        same = tf.cond(have_same_shape, lambda: tf.reduce_all(expected == actual), lambda: tf.constant(False))
        error = tf.where(same, tf.zeros([], tf.float64), tf.ones([], tf.float64))
        return tf.stack([error, tf.zeros_like(error), error * np.nan, error])
    dtype = expected.dtype if expected.dtype == actual.dtype == tf.float32 else tf.float64
    flat = [tf.reshape(tf.cast(value, dtype), [-1]) for value in (expected, actual)]
    infinite = tf.constant([np.inf, 0, np.nan, np.inf], tf.float64)
    tolerated = tf.constant(epsilon(expected.dtype) ** 0.5, tf.float64)  # so much is never wrong
    return tf.cond(have_same_shape, lambda: _compared(dtype)(*flat, tolerated), lambda: infinite)


@functools.cache
def _compared(dtype: tf.DType) -> Any:
    """Returns a function that returns a row of `table_of` for two vectors and what is tolerated of their size."""

    def compared(expected: Any, actual: Any, tolerated: Any) -> Any:
        are_same = (expected == actual) | (tf.math.is_nan(expected) & tf.math.is_nan(actual))
        size = _largest(tf.where(tf.math.is_finite(expected), expected, tf.zeros_like(expected)))
        error = _largest(tf.where(are_same, tf.zeros_like(expected), actual - expected))

        def explained() -> Any:
            wide, other = tf.cast(expected, tf.float64), tf.cast(actual, tf.float64)
            factor = tf.math.divide_no_nan(tf.reduce_sum(wide * other), tf.reduce_sum(wide * wide))
            return tf.stack([factor, _largest(other - factor * wide)])

        unneeded = tf.constant([np.nan, np.inf], tf.float64)
        factor = tf.cond(error > tolerated * size, explained, lambda: unneeded)
        return tf.concat([[error, size], factor], 0)

    vector = tf.TensorSpec([None], dtype)
    return tf.function(compared, (vector, vector, tf.TensorSpec([], tf.float64)), autograph=False)


def _largest(values: Any) -> Any:
    largest = tf.cast(tf.reduce_max(tf.abs(values)), tf.float64)
    return tf.where(tf.math.is_nan(largest), tf.constant(np.inf, tf.float64), tf.maximum(largest, 0.0))


def differences_in(
    quantities: Sequence[Quantity], table: np.ndarray, precision: float, disturbed: np.ndarray | None = None
) -> list[Difference]:
    """Returns how far each quantity is off.

    `table`, see `table_of`, has a row for each quantity. So has `disturbed`, of a step whose weights were rounded once
    more, if it was computed. `precision` is the relative size of rounding errors that is taken for none.
    """
    sizes = dict[str, float]()
    for quantity, row in zip(quantities, table, strict=True):
        sizes[quantity.group] = max(sizes.get(quantity.group, 0.0), row[1])
    # By what to measure the error of each quantity: its size, and a part of the largest in its group.
    scales = [row[1] + _FLOOR * sizes[quantity.group] for quantity, row in zip(quantities, table, strict=True)]
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
        factor = factor if is_wrong and rest <= _FACTOR * error else np.nan
        differences.append(Difference(quantity.name, quantity.group, error, size, factor, is_wrong, relative))
    return differences


class Trial:
    """Runs functions from the same state.

    Eager functions may change the `attributes` and `others`, handles of variables that are not Keras's.
    """

    def __init__(self, others: Sequence[Any] = (), attributes: Attributes | None = None) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}  # of eager steps
        self._others = [(handle, tf_graphs.read_handle(handle)) for handle in others]
        self.attributes = attributes or Attributes([])
        self._held = self.attributes.now()
        self.left: Any = None  # what the last function has left in the attributes

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function that returns a structure of tensors, and undoes what it changes."""
        if tf.executing_eagerly():
            try:
                with keras_model.observed(self.note):
                    return function()
            finally:
                for variable, value in self._before.values():
                    keras_model.backing(variable).assign(value)
                for handle, value in self._others:
                    tf_graphs.assign_handle(handle, value)
                self.left = self.attributes.now()
                self.attributes.set(self._held)
        concrete = tf.function(function, autograph=False).get_concrete_function()
        handles = tf_graphs.captured_variables(concrete.graph)
        before = [(handle, tf_graphs.read_handle(handle)) for handle in handles]
        outputs = concrete()
        with tf.control_dependencies([leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]):
            for handle, value in before:
                tf_graphs.assign_handle(handle, value)
        return outputs

    @contextlib.contextmanager
    def beginning_with(self, held: Any) -> Iterator[None]:
        """Runs eager functions from other attributes in this context, unless that is `None`: what one has `left`."""
        self.attributes.set(held or self._held)
        try:
            yield
        finally:
            self.attributes.set(self._held)

    def applied(self) -> list[Any]:
        """Returns a list for `Step.applied`. What is about to be updated is noted."""
        return _Applied(self)

    def note(self, variable: Any) -> None:
        """Notes the value of a Keras variable that an eager step is about to change."""
        if tf.executing_eagerly() and id(variable) not in self._before:
            self._before[id(variable)] = variable, tf.identity(keras_model.backing(variable))


class _Applied(list[Any]):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial
        self._graph = tf_graphs.current()

    def append(self, update: tuple[Any, Any, Any]) -> None:
        optimizer, gradients, variables = update
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            return  # in a tf.cond: nothing of it can be returned; its effect on the variables can be seen
        if tf.executing_eagerly():
            build_at_once(optimizer, variables)
            for variable in (*keras_model.updated_variables(optimizer, variables), *state_of(optimizer)):
                self._trial.note(variable)
        # A variable in which the step accumulates gradients is set to zero after the update.
        now = [tf.convert_to_tensor(g) if isinstance(g, tf.Variable | keras.Variable) else g for g in gradients]
        super().append((optimizer, now, variables))


@contextlib.contextmanager
def descending(optimizers: Sequence[Any]) -> Iterator[None]:
    """In this context Keras's optimizers descend along the gradients, by one operation for each weight."""
    with contextlib.ExitStack() as stack:
        for part in itertools.chain.from_iterable(map(parts_of, optimizers)):
            if keras_model.is_kerass(type(part)):
                stack.enter_context(attached(part, "update_step", functools.partial(_descend, part)))
        yield


def _descend(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    gradient, rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
    if isinstance(gradient, tf.Tensor) and isinstance(variable, tf.Variable):
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
    else:
        optimizer.assign_sub(variable, keras.ops.multiply(gradient, rate))


def state_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that its update may change. `descending` leaves momenta as they are."""
    parts = list(parts_of(optimizer))
    descend = all(getattr(part.update_step, "func", None) is _descend for part in parts)
    if not descend or any(part.use_ema or part.gradient_accumulation_steps for part in parts):
        return variables_of(optimizer)
    return [variable for variable in variables_of(optimizer) if len(variable.shape) == 0]


@contextlib.contextmanager
def plain_step(data: Any, applied: list[Any]) -> Iterator[None]:
    """The context of a step on the whole batch in this process, as without keras_dist. `applied` as in `Step`."""
    one, none = tf.constant(1), tf.constant(0.0)
    with step_module.entered(step_module.Step(one, one, none, data=data, is_plain=True, applied=applied)):
        yield
