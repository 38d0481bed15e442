"""Every private name of Keras that steps under a `tf.distribute` strategy need, beside those of `keras_model` and `keras_fit`.

Keras 3.13 to 3.15, 2026-11. `tests/unit/test_keras_strategy.py` fails when one of them moves, or is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.losses import loss as loss_module

from keras_dist.compat.keras_fit import FUNCTIONS
from keras_dist.compat.keras_losses import output_losses, updated_with
from keras_dist.compat.keras_model import attach, flatten_layers
from keras_dist.compat.keras_random import seed_generators

_SCALINGS = ("scale_loss_for_distribution", "unscale_loss_for_distribution")


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas, which it forgets where a loss is a scalar."""
    plain = {name: getattr(loss_module, name) for name in _SCALINGS}
    for name in _SCALINGS:
        setattr(loss_module, name, lambda value: value)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(loss_module, name, function)


@contextlib.contextmanager
def averages_count(model: keras.Model, count: Callable[[], Any], part: Callable[[], Any]) -> Iterator[None]:
    """Lets steps count real rows only in the averages of losses, while this is entered; Keras takes the rows it sees.

    Unlike `keras_losses.output_losses_count` it holds for all replicas of a step, each in a thread of its own.

    Args:
        model: A model.
        count: Returns the number of rows that count.
        part: Returns the part of the batch that they are: see `keras_losses.output_losses_count`.
    """
    singles = output_losses(model)
    with updated_with([model._loss_tracker], lambda given: count()), updated_with(singles, lambda given: part()):
        yield


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics that the user gave `compile`."""
    metrics = getattr(model, "_compile_metrics", None)
    return list(metrics.metrics) if metrics is not None and metrics.built else []


def leave_gradients(optimizer: Any) -> None:
    """Keeps an optimizer from adding gradients up over replicas itself, which it does after it has clipped them."""
    attach(optimizer, "_all_reduce_sum_gradients", lambda grads_and_vars: grads_and_vars)


@contextlib.contextmanager
def moments_of_rows(model: keras.Model, rows: Callable[[], Any], add_up: Callable[[Any], Any]) -> Iterator[None]:
    """Lets BatchNormalization leave out rows that don't count, while this is entered.

    Args:
        model: The model.
        rows: Returns 1 for each row that counts and 0 for others, as floats.
        add_up: Adds a tensor up over the replicas, and lets gradients through.
    """
    layers = [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in layers:
        attach(layer, "_moments", functools.partial(_moments, layer, layer._moments, rows, add_up))
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["_moments"]


def _moments(layer: Any, plain: Any, rows: Any, add_up: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    axes = layer._reduction_axes
    if 0 not in axes:
        return plain(inputs, mask)
    own = like(rows(), inputs)
    if mask is not None:  # Keras's own formula for masks, with rows that don't count masked too
        return plain(inputs, tf.cast(mask, tf.bool) & (like(rows(), mask) > 0))
    values = tf.where(own > 0, inputs, tf.zeros_like(inputs))
    count = tf.reduce_sum(tf.broadcast_to(own, tf.shape(inputs)), axes)
    total = tf.reduce_sum(values, axes)
    if layer.synchronized:
        total, squares, count = tf.unstack(add_up(tf.stack([total, tf.reduce_sum(tf.square(values), axes), count])))
        mean = tf.math.divide_no_nan(total, count)
        return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    mean = tf.math.divide_no_nan(total, count)
    shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
    squares = tf.square(inputs - tf.stop_gradient(tf.reshape(mean, shape)))
    return mean, tf.math.divide_no_nan(tf.reduce_sum(tf.where(own > 0, squares, tf.zeros_like(squares)), axes), count)


def like(rows: Any, values: Any) -> Any:
    """Returns the rows, cast and with more axes, so that they can be multiplied with values of each row."""
    dtype = tf.float32 if values.dtype == tf.bool else values.dtype
    return tf.reshape(tf.cast(rows, dtype), [-1] + [1] * (len(values.shape) - 1))


@contextlib.contextmanager
def metric_values(metrics: list[Any], look: Callable[[Any, Any], None]) -> Iterator[None]:
    """Hands the values that a metric averages (`metrics=["mae"]`, a function) to `look`, while this is entered."""
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


def statistics_of(model: keras.Model) -> list[Any]:
    """Returns the variables in which a training step collects what it has seen, such as BatchNorm's moving averages."""
    seeds = {id(generator.state) for generator in seed_generators(model)}
    floats = [v for v in model.non_trainable_variables if keras_backend.is_float_dtype(v.dtype)]
    return [variable for variable in floats if id(variable) not in seeds]


def layers_with_losses(model: keras.Model) -> list[str]:
    """Returns the names of layers that have added a loss in the step that is being traced (`add_loss`)."""
    return [layer.name for layer in flatten_layers(model) if layer._losses]


def layers_with_metrics(model: keras.Model) -> list[str]:
    """Returns the names of layers that keep a metric of their own."""
    return [layer.name for layer in flatten_layers(model) if layer._metrics]


def batch_size_of(adapter: Any) -> int | None:
    """Returns how many examples a batch has, as Keras's adapter of the data knows it; `None` if it doesn't."""
    if adapter.batch_size is not None:
        return int(adapter.batch_size)
    if (first := getattr(adapter, "_first_batches", None)) is not None:  # of a generator
        return int(tf.nest.flatten(first[0])[0].shape[0])
    if (dataset := getattr(adapter, "py_dataset", None)) is not None:
        return int(tf.nest.flatten(dataset[0])[0].shape[0])
    return None


def is_known_full(adapter: Any) -> bool | None:
    """Returns if all batches of arrays are full; `None` where the data are no arrays, so that nobody knows."""
    return None if adapter.batch_size is None else not adapter.has_partial_batch


def functions_of(model: keras.Model) -> dict[str, Any]:
    """Returns the functions that Keras has made of a model's steps; `None` for one that isn't made."""
    return {name: getattr(model, name, None) for name in FUNCTIONS}


def set_functions(model: keras.Model, functions: dict[str, Any]) -> None:
    """Gives a model functions from `functions_of`; those that are missing are made when they are needed."""
    for name in FUNCTIONS:
        attach(model, name, functions.get(name))


def forget_function(model: keras.Model, kind: str) -> None:
    """Lets Keras make the function of a model's `"train"`, `"test"` or `"predict"` steps anew."""
    attach(model, f"{kind}_function", None)
