"""Private names of Keras for steps under a real `tf.distribute` strategy. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_strategy.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module
from tensorflow.python.distribute import values_util

from keras_dist.compat.keras_fit import FUNCTIONS
from keras_dist.compat.keras_losses import output_losses, weighted_updates
from keras_dist.compat.keras_model import attach, attached, flatten_layers

_SCALINGS = ("scale_loss_for_distribution", "unscale_loss_for_distribution")


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas, which it does not do for scalar losses."""
    plain = {name: getattr(loss_module, name) for name in _SCALINGS}
    for name in _SCALINGS:
        setattr(loss_module, name, lambda value: value)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(loss_module, name, function)


@contextlib.contextmanager
def updates_outside_of_replicas() -> Iterator[None]:
    """Lets optimizers and metrics update a strategy's variables where no replica runs, in this context."""
    interim, scaling = tf.__internal__.distribute.interim, keras.optimizers.LossScaleOptimizer
    merge, apply, assign = interim.maybe_merge_call, scaling._tf_apply, values_util.on_read_assign_cross_replica
    interim.maybe_merge_call = lambda function, strategy, *args, **kwargs: function(strategy, *args, **kwargs)
    scaling._tf_apply = scaling._common_apply
    values_util.on_read_assign_cross_replica = functools.partial(_assign_to_first, assign)
    try:
        yield
    finally:
        interim.maybe_merge_call, scaling._tf_apply = merge, apply
        values_util.on_read_assign_cross_replica = assign


def _assign_to_first(plain: Callable[..., Any], variable: Any, value: Any, read_value: bool = True) -> Any:
    """TensorFlow gives each replica its part of a sum, and rounds it if it is an integer: 2 of 8 replicas is 0."""
    if variable.aggregation != tf.VariableAggregation.SUM:
        return plain(variable, value, read_value)
    first, *others = variable.values
    for other in others:
        other.assign(tf.zeros_like(other))
    return first.assign(value, read_value=read_value)


@contextlib.contextmanager
def weighted_averages(model: keras.Model, count: Callable[[], Any], part: Callable[[], Any]) -> Iterator[None]:
    """Makes the averages of losses count real rows only, in this context. Keras counts all rows.

    A step of the script's own may count its loss without a weight, as 1 for each batch. That is for
    `keras_losses.weighted_scalars`.

    Args:
        model: A model.
        count: Returns the number of real rows.
        part: Returns the fraction of the batch in these rows, the weights of all shares sum to 1.
    """
    tracker, outputs = [model._loss_tracker], output_losses(model)
    of_tracker = weighted_updates(tracker, lambda rows: None if rows is None else count())
    with of_tracker, weighted_updates(outputs, lambda _: part()):
        yield


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics that the user passed to `compile`."""
    metrics = getattr(model, "_compile_metrics", None)
    return list(metrics.metrics) if metrics is not None and metrics.built else []


def skip_gradient_reduction(optimizer: Any) -> None:
    """Keeps an optimizer from summing gradients over replicas itself, which it does after clipping."""
    attach(optimizer, "_all_reduce_sum_gradients", lambda grads_and_vars: grads_and_vars)


@contextlib.contextmanager
def moments_of_rows(
    model: keras.Model, rows: Callable[[], Any], sum_over_replicas: Callable[[Any], Any], of_all: bool = False
) -> Iterator[None]:
    """Makes BatchNormalization compute moments of real rows only, in this context.

    Args:
        model: The model.
        rows: Returns a float tensor of shape `(rows,)`, 1 for each real row and 0 for each filler row.
        sum_over_replicas: Sums a tensor over the replicas. Must be differentiable.
        of_all: True for moments of all replicas' rows in every layer, as if it were synchronized.
    """
    with contextlib.ExitStack() as stack:
        for layer in flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                moments = functools.partial(_moments, layer, layer._moments, rows, sum_over_replicas, of_all)
                stack.enter_context(attached(layer, "_moments", moments))
        yield


def _moments(
    layer: Any, plain: Any, rows: Any, sum_over_replicas: Any, of_all: bool, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    axes = layer._reduction_axes
    if 0 not in axes:
        return plain(inputs, mask)
    is_real = like(rows(), inputs)
    if mask is not None:  # Keras's own formula for masks, with filler rows masked too
        return plain(inputs, tf.cast(mask, tf.bool) & (like(rows(), mask) > 0))
    values = tf.where(is_real > 0, inputs, tf.zeros_like(inputs))
    count = tf.reduce_sum(tf.broadcast_to(is_real, tf.shape(inputs)), axes)
    total = tf.reduce_sum(values, axes)
    if layer.synchronized or of_all:
        sums = tf.stack([total, tf.reduce_sum(tf.square(values), axes), count])
        total, squares, count = tf.unstack(sum_over_replicas(sums))
        mean = tf.math.divide_no_nan(total, count)
        return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    mean = tf.math.divide_no_nan(total, count)
    shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
    squares = tf.square(inputs - tf.stop_gradient(tf.reshape(mean, shape)))
    squares = tf.where(is_real > 0, squares, tf.zeros_like(squares))
    return mean, tf.math.divide_no_nan(tf.reduce_sum(squares, axes), count)


def like(rows: Any, values: Any) -> Any:
    """Returns `rows` with the dtype and rank of `values`, to broadcast over them."""
    dtype = tf.float32 if values.dtype == tf.bool else values.dtype
    return tf.reshape(tf.cast(rows, dtype), [-1] + [1] * (len(values.shape) - 1))


@contextlib.contextmanager
def metric_values(metrics: list[Any], look: Callable[[Any, Any], None]) -> Iterator[None]:
    """Passes the values that metrics average (`metrics=["mae"]`, a function) to `look`, in this context."""
    averaging = [(metric, metric._fn) for metric in metrics if hasattr(metric, "_fn")]
    for metric, plain in averaging:

        def seen(*args: Any, plain: Any = plain, metric: Any = metric, **kwargs: Any) -> Any:
            values = plain(*args, **kwargs)
            look(metric, values)
            return values

        attach(metric, "_fn", seen)
    try:
        yield
    finally:
        for metric, plain in averaging:
            attach(metric, "_fn", plain)


def layers_with_losses(model: keras.Model) -> list[str]:
    """Returns the names of layers that have called `add_loss` in the current step."""
    return [layer.name for layer in flatten_layers(model) if layer._losses]


def layers_with_metrics(model: keras.Model) -> list[str]:
    """Returns the names of layers with metrics."""
    return [layer.name for layer in flatten_layers(model) if layer._metrics]


def batch_size_of(adapter: Any) -> int | None:
    """Returns the batch size of Keras's data adapter, `None` if it is unknown."""
    if adapter.batch_size is not None:
        return int(adapter.batch_size)
    if (first := getattr(adapter, "_first_batches", None)) is not None:  # of a generator
        return int(tf.nest.flatten(first[0])[0].shape[0])
    if (dataset := getattr(adapter, "py_dataset", None)) is not None:
        return int(tf.nest.flatten(dataset[0])[0].shape[0])
    return None


def batches_are_full(adapter: Any) -> bool | None:
    """Returns whether all batches are full, `None` if the data are not arrays."""
    return None if adapter.batch_size is None else not adapter.has_partial_batch


def functions_of(model: keras.Model) -> dict[str, Any]:
    """Returns a model's train, test and predict functions, `None` for those that do not exist yet."""
    return {name: getattr(model, name, None) for name in FUNCTIONS}


def set_functions(model: keras.Model, functions: dict[str, Any]) -> None:
    """Sets the functions from `functions_of`. Keras creates missing ones when it needs them."""
    for name in FUNCTIONS:
        attach(model, name, functions.get(name))


def forget_function(model: keras.Model, kind: str) -> None:
    """Drops the function of a model's `"train"`, `"test"` or `"predict"` steps, so that Keras creates it again."""
    attach(model, f"{kind}_function", None)
