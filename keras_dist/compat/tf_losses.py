"""TensorFlow's own functions that add up the losses of single examples. TensorFlow 2.20 to 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when one of its assumptions no longer holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def added_losses(weights_of: Callable[[Any], Any]) -> Iterator[None]:
    """Weighs the losses of single examples where they are added up, in this context.

    That is in the gradient of a tensor that is no single number, with respect to variables, and in
    `tf.nn.compute_average_loss`.

    Args:
        weights_of: Takes a tensor with a row for each example; returns a scalar, or `None` to leave it as it is.
    """
    gradient_of, average = tf.GradientTape.gradient, tf.nn.compute_average_loss
    regularization = tf.nn.scale_regularization_loss

    @functools.wraps(gradient_of)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        if output_gradients is None and _is_of_examples(target) and all(map(_is_variable, tf.nest.flatten(sources))):
            weight = weights_of(target)
            output_gradients = None if weight is None else tf.ones_like(target) * tf.cast(weight, target.dtype)
        return gradient_of(self, target, sources, output_gradients, **options)

    @functools.wraps(average)
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        losses = tf.convert_to_tensor(per_example_loss)
        weight = weights_of(losses)
        if weight is None:
            return average(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is None:  # the share's mean: TensorFlow would divide by the number of its replicas too
            weight, global_batch_size = tf.ones_like(weight), tf.maximum(tf.shape(losses)[0], 1)
        return average(losses, sample_weight, global_batch_size) * tf.cast(weight, losses.dtype)

    @functools.wraps(regularization)
    def scale_regularization_loss(regularization_loss: Any) -> Any:
        """Every replica adds all of it: its gradients are weighted as those of a mean."""
        return tf.reduce_sum(regularization_loss)

    _set(gradient, compute_average_loss, scale_regularization_loss)
    try:
        yield
    finally:
        _set(gradient_of, average, regularization)


def _set(gradient: Any, average: Any, regularization: Any) -> None:
    tf.GradientTape.gradient = gradient
    tf.nn.compute_average_loss, tf.nn.scale_regularization_loss = average, regularization


def _is_of_examples(target: Any) -> bool:
    return isinstance(target, tf.Tensor) and bool(target.shape.rank) and target.dtype.is_floating


def _is_variable(source: Any) -> bool:
    return isinstance(source, tf.Variable | keras.Variable)
