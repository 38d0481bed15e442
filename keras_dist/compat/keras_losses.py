"""Private names of losses, metrics and batch statistics. Keras 3.13 to 3.15, TensorFlow 2.20 to 2.21, 2026-11."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import set_keras_mask
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics

from keras_dist.compat.keras_model import attach, attached_to, is_kerass, mask_of, subclasses
from keras_dist.compat.tf_compat import patched


def rescaled_losses(
    rescale: Callable[..., Any], prepare: Callable[[Any], Any] = lambda values: values
) -> contextlib.AbstractContextManager[None]:
    """Rescales every Keras loss after its reduction, in this context.

    It replaces the function of `keras.src.losses.loss` with which `Loss.__call__` reduces. Only this function has
    values, weights and mask together: a user's loss object may compute the mask itself (`ignore_class`).

    `rescale` takes the reduced loss, `values`, `weights` and `mask` as tensors or `None`, and the name of the
    reduction, and returns the loss to use. `prepare` takes `values` before the reduction and returns the ones to use.
    """
    plain = loss_module.reduce_weighted_values

    def reduce_weighted_values(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:  # fmt: skip
        values = prepare(values)
        loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return rescale(loss, values, sample_weight, mask, reduction)

    return patched(loss_module, reduce_weighted_values=reduce_weighted_values)


def wrapped_losses(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Calls `call(plain, values_of, loss, y_true, y_pred, sample_weight)` for every Keras loss, in this context.

    `plain` is the `__call__` of the loss. If it is the one of `Loss`, it also takes the mask that a layer attached to
    `y_pred`, and `values_of` is the `call` of the loss, before the reduction. A class with its own `__call__` does
    everything there, so `values_of` is the same.
    """
    base = keras.losses.Loss

    def wrapped(function: Callable[..., Any], is_own: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(loss: Any, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(function).bind(loss, *args, **kwargs)
            _, y_true, y_pred, *weights = given.args

            def plain(y_true: Any, y_pred: Any, *weights: Any) -> Any:
                return function(loss, y_true, y_pred, *weights, **given.kwargs)

            return call(plain, plain if is_own else loss.call, loss, y_true, y_pred, *weights)

        return wrapper

    classes = {cls for cls in subclasses(base) if "__call__" in vars(cls) and not is_kerass(cls)}
    return attached_to([base, *classes], "__call__", lambda cls, plain: wrapped(plain, is_own=cls is not base))


def with_mask_of(values: Any, masked: Any, change: Callable[[Any], Any] = lambda mask: mask) -> Any:
    """Attaches the mask of another tensor to `values`, changed by a function."""
    if (mask := mask_of(masked)) is not None:
        set_keras_mask(values, change(mask))
    return values


def has_mask(values: Any) -> bool:
    return any(mask_of(leaf) is not None for leaf in keras.tree.flatten(values))


_WHOLE = "_keras_dist_whole_batch"


def on_whole_batch(loss: Any) -> Any:
    """Returns a loss with the same class and attributes that says that it compares examples."""
    marked = object.__new__(type(loss))  # `copy` would save and load it
    vars(marked).update(vars(loss))
    attach(marked, _WHOLE, True)
    return marked


def on_whole_batch_as(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as a loss that compares examples, which files name as they name another function."""
    attach(function, _WHOLE, True)
    package, separator, name = keras.saving.get_registered_name(plain).partition(">")
    if separator:
        for registered in (function, plain):  # the last one is what a file's name stands for
            keras.saving.register_keras_serializable(package, name)(registered)
    return function


def compares_examples(loss: Any) -> bool:
    """True for a loss that is known to compare the examples of a batch, although it may have a value for each."""
    function = getattr(loss, "fn", None)
    return function is keras.losses.circle or any(getattr(part, _WHOLE, False) for part in (loss, function))


def has_values_of_examples(loss: Any) -> bool:
    """True if a loss is known to have values that depend on one example each: those that Keras has written do."""
    function = getattr(loss, "fn", None)
    # These sum over the axes that they are given, which may be the axis of the examples.
    over_axes = (keras.losses.dice, keras.losses.tversky)
    return all(map(is_kerass, (type(loss), function or type(loss)))) and function not in over_axes


@contextlib.contextmanager
def batch_statistics(
    sum_over_replicas: Callable[[Any], Any], of_all: bool = False, rows: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Makes `BatchNormalization(synchronized=True)` compute moments of the whole batch, in this context.

    Keras sums with `tf.distribute`, which does not reach other processes, and not at all if there is a mask.
    `sum_over_replicas` must be differentiable. With `of_all` every BatchNormalization is as if it were synchronized.
    `rows` returns a float vector, 1 for each real row and 0 for each filler row, which no layer counts; or `None`.
    """
    plain = keras.layers.BatchNormalization._moments

    def of_tensor(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
        return whole_moments(x, tf.ones_like(x), axes, sum_over_replicas, keepdims=keepdims)

    def of_layer(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axes, real = layer._reduction_axes, rows()
        real = None if real is None or 0 not in axes else like(real, inputs) > 0
        if mask is not None:
            mask = tf.cast(mask, tf.bool)[..., None]
            mask = mask if real is None else mask & real
        if not (layer.synchronized or of_all):
            if mask is not None or real is None:
                return plain(layer, inputs, None if mask is None else mask[..., 0])
            # An empty share, which is not counted, has the moments of its filler rows: without rows they would be NaN.
            weights = tf.where(tf.reduce_any(real), real, tf.ones_like(real))
            return tf.nn.weighted_moments(inputs, axes, tf.cast(weights, inputs.dtype))
        if mask is None and real is None:
            return of_tensor(inputs, axes, keepdims=False)
        is_counted = tf.broadcast_to(real if mask is None else mask, tf.shape(inputs))
        values, counted = tf.where(is_counted, inputs, tf.zeros_like(inputs)), tf.cast(is_counted, inputs.dtype)
        epsilon = 0.0 if mask is None else keras.config.epsilon()  # as in Keras's own formula
        return whole_moments(values, counted, axes, sum_over_replicas, epsilon)

    of_nn = patched(tensorflow_nn, _compute_moments_sync=of_tensor)
    with of_nn, patched(keras.layers.BatchNormalization, _moments=of_layer):
        yield


def like(rows: Any, values: Any) -> Any:
    """Returns `rows` with the dtype and rank of `values`, to broadcast over them."""
    dtype = tf.float32 if values.dtype == tf.bool else values.dtype
    return tf.reshape(tf.cast(rows, dtype), [-1] + [1] * (len(values.shape) - 1))


def whole_moments(
    values: Any, counted: Any, axes: Any, sum_over_replicas: Callable[[Any], Any], epsilon: float = 0.0,
    keepdims: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns mean and variance over all replicas of what is `counted`: 1, or 0 where the value is 0 too."""
    sums = [tf.reduce_sum(part, axes, keepdims) for part in (values, tf.square(values), counted)]
    total, squares, count = tf.unstack(sum_over_replicas(tf.stack(sums)))
    mean = tf.math.divide_no_nan(total, count + epsilon)
    squared_differences = squares - 2.0 * mean * total + tf.square(mean) * count
    return mean, tf.maximum(tf.math.divide_no_nan(squared_differences, count + epsilon), 0.0)


def weighted_scalars(weight: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Weighs the single numbers that Keras's averages count, in this context.

    `keras.metrics.Mean` counts a number without a weight as 1, however many examples it is the mean of. That holds for
    trackers of a loss, for functions in `metrics=` that return one number, and for the losses of single outputs.
    `weight` returns a scalar tensor, or `None` to leave the number as it is.
    """
    plain = reduction_metrics.reduce_to_samplewise_values

    def reduce_to_samplewise_values(values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> tuple[Any, Any]:
        values, sample_weight = plain(values, sample_weight, reduce_fn=reduce_fn, dtype=dtype)
        is_number = sample_weight is None and len(values.shape) == 0
        part = weight() if reduce_fn is keras.ops.mean and is_number else None
        if part is None:
            return values, sample_weight
        part = tf.cast(part, values.dtype)
        return tf.math.multiply_no_nan(values, part), part

    return patched(reduction_metrics, reduce_to_samplewise_values=reduce_to_samplewise_values)


def weighted_updates(
    metrics: Sequence[Any], weigh: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Replaces the sample weight of updates of metrics by `weigh(sample_weight)`, in this context."""

    def weighted(metric: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, sample_weight=None: plain(value, sample_weight=weigh(sample_weight))

    return attached_to(metrics, "update_state", weighted)


@contextlib.contextmanager
def added_losses(weights_of: Callable[[Any], Any], observe: Callable[[Any, Any], None]) -> Iterator[None]:
    """Weighs the losses of single examples where they are added up, in this context.

    They are added up in the gradient of a tensor of several numbers, with respect to variables, and in
    `tf.nn.compute_average_loss`. `weights_of` takes a tensor with a row for each example, and returns a scalar, or
    `None` to leave it as it is. `observe` takes a loss, and its gradients with respect to variables.
    """
    gradient_of, average = tf.GradientTape.gradient, tf.nn.compute_average_loss

    @functools.wraps(gradient_of)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        is_number = isinstance(target, tf.Tensor) and target.dtype.is_floating
        to_variables = all(isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources))
        if output_gradients is None and is_number and to_variables and target.shape.rank:
            weight = weights_of(target)
            output_gradients = None if weight is None else tf.ones_like(target) * tf.cast(weight, target.dtype)
        gradients = gradient_of(self, target, sources, output_gradients, **options)
        if is_number and to_variables:
            observe(target, gradients)
        return gradients

    @functools.wraps(average)
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        losses = tf.convert_to_tensor(per_example_loss)
        weight = weights_of(losses)
        if weight is None:
            return average(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is None:  # the share's mean: TensorFlow would divide by the number of its replicas too
            weight, global_batch_size = tf.ones_like(weight), tf.maximum(tf.shape(losses)[0], 1)
        return average(losses, sample_weight, global_batch_size) * tf.cast(weight, losses.dtype)

    @functools.wraps(tf.nn.scale_regularization_loss)
    def regularization(regularization_loss: Any) -> Any:
        """Every replica adds all of it: its gradients are weighted as those of a mean."""
        return tf.reduce_sum(regularization_loss)

    of_nn = patched(tf.nn, compute_average_loss=compute_average_loss, scale_regularization_loss=regularization)
    with patched(tf.GradientTape, gradient=gradient), of_nn:
        yield
