"""Private names of Keras's losses and metrics. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them moves, or is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.losses import loss as loss_module

from keras_dist.compat.keras_model import attach


@contextlib.contextmanager
def loss_denominators(
    rescale: Callable[..., Any], prepare: Callable[[Any], Any] = lambda values: values
) -> Iterator[None]:
    """Lets `rescale` see every reduction of a Keras loss while this is entered.

    `Loss.__call__` reduces by one function of its module, which alone knows values, weights and mask together.
    There is no other seam: the loss objects are the user's, and a mask may arise inside them (`ignore_class`).

    Args:
        rescale: Called with the reduced loss, and `values`, `weights` and `mask` as tensors or `None`, and the
            reduction's name; returns the loss to use.
        prepare: Called with `values` before they are reduced; returns those to use.
    """
    plain = loss_module.reduce_weighted_values

    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        values = prepare(values)
        loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return rescale(loss, values, sample_weight, mask, reduction)

    loss_module.reduce_weighted_values = reduce_weighted_values
    try:
        yield
    finally:
        loss_module.reduce_weighted_values = plain


@contextlib.contextmanager
def batch_statistics(sum_over_replicas: Callable[[Any], Any]) -> Iterator[None]:
    """Lets `BatchNormalization(synchronized=True)` see the whole batch while this is entered.

    Keras asks `tf.distribute` for the sums, which knows nothing of other processes.

    Args:
        sum_over_replicas: Adds a float tensor up over all replicas, and lets gradients through.
    """

    def moments(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
        own = [tf.reduce_sum(value, axis=axes, keepdims=True) for value in (x, tf.square(x), tf.ones_like(x))]
        total, squares, count = tf.unstack(sum_over_replicas(tf.stack(own)))
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    plain = tensorflow_nn._compute_moments_sync
    tensorflow_nn._compute_moments_sync = moments
    try:
        yield
    finally:
        tensorflow_nn._compute_moments_sync = plain


@contextlib.contextmanager
def output_losses_count(model: keras.Model, weight: Callable[[], Any]) -> Iterator[None]:
    """Lets a step count by `weight()` in the averages of the losses of single outputs, while this is entered.

    `CompileLoss` counts a batch by its static size, and where that isn't known, each batch as one. So the shares
    of a batch have to count as one together.

    Args:
        model: A model.
        weight: Returns a scalar tensor, the part of the batch that this share is.
    """
    with updated_with(output_losses(model), lambda given: weight() if given is None else given):
        yield


def output_losses(model: keras.Model) -> list[Any]:
    """Returns the metrics that average the losses of single outputs."""
    losses = getattr(model, "_compile_loss", None)
    return [metric for metric in getattr(losses, "metrics", ()) if metric is not None]


@contextlib.contextmanager
def updated_with(metrics: Sequence[Any], weigh: Callable[[Any], Any]) -> Iterator[None]:
    """Lets `weigh` choose the weight of what metrics count, given Keras's, while this is entered."""
    for metric in metrics:
        plain = metric.update_state

        def update_state(value: Any, sample_weight: Any = None, plain: Any = plain) -> Any:
            return plain(value, sample_weight=weigh(sample_weight))

        attach(metric, "update_state", update_state)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]
