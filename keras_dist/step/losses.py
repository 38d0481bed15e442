"""The loss rule: by what a rank's loss is multiplied, so that the mean over ranks is the loss of the global batch.

A rank's loss counts as a mean over the examples of its share. Most losses are such a mean. The others divide by
something else: nothing (`"sum"`), the sum of the weights (`"mean_with_sample_weight"`), or the number of unmasked
entries (Keras masks). Their loss for the global batch is `sum of numerators / sum of denominators`. So a rank's
`numerator / denominator` is multiplied by `denominator / sum of denominators * total / count`. The sum of denominators
costs one small reduction, and only models with such a loss pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.step import step as step_module
from keras_dist.step.step import Step


def rescale(
    sum_over_replicas: Callable[[Any, str], Any], loss: Any, values: Any, weights: Any, mask: Any, reduction: str | None
) -> Any:
    """Returns the loss of the current share, rescaled by the loss rule.

    Args:
        sum_over_replicas: Sums a tensor over the shares of the batch, under a name, as `Backend.all_reduce_exact`.
        loss: The loss as Keras reduced it.
        values: The loss of each entry, before reduction.
        weights: The sample weights, or `None`.
        mask: The mask, or `None`.
        reduction: Keras's name for the reduction.
    """
    step, values = step_module.current(), tf.convert_to_tensor(values)
    if step is None or reduction in (None, "none") or values.shape.rank == 0:
        return loss
    if values.shape.as_list() == [0]:
        loss = tf.reduce_sum(loss)  # in an eager loop, Keras does not reduce the loss of an empty batch
    if reduction == "sum":
        return loss * _ratio(step.total, step.count, loss.dtype)
    summands = _summands_of_denominator(weights, mask, reduction, step.dtype)
    if summands is None:
        return loss if step.rows is None else loss * _ratio(tf.size(step.rows), step.count, loss.dtype)
    denominator = tf.reduce_sum(summands)
    if step.rows is None:  # the single row of an empty share does not count
        counted = denominator = tf.where(step.count > 0, denominator, tf.zeros_like(denominator))
    else:
        counted = tf.reduce_sum(summands * _same_rank(tf.cast(step.rows, step.dtype), summands))
    total = tf.stop_gradient(sum_over_replicas(counted, step.next_name("denominator")))
    factor = tf.math.divide_no_nan(denominator, total) * _ratio(step.total, step.count, step.dtype)
    return loss * tf.cast(tf.stop_gradient(factor), loss.dtype)


def of_each_example(step: Step, losses: Any) -> Any:
    """Pads a loss with one value per example by zeros for the other ranks' examples, and weights it by the loss rule.

    Then its sum and its mean over the share are both right, and Keras, which weights such a loss by its length, counts
    the examples of the global batch.

    Args:
        step: The current step.
        losses: Float tensor of shape `(count, ...)`.
    """
    others = tf.maximum(step.total - tf.shape(losses)[0], 0)
    padding = tf.pad(others[None, None], [[0, losses.shape.rank - 1], [1, 0]])
    return tf.pad(losses, padding) * _ratio(step.total, step.count, losses.dtype)


def _ratio(numerator: Any, denominator: Any, dtype: Any) -> Any:
    return tf.math.divide_no_nan(tf.cast(numerator, dtype), tf.cast(denominator, dtype))


def _summands_of_denominator(weights: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Returns what Keras sums up and divides this reduction by, `None` if it divides by the number of entries."""
    used = (weights, mask) if reduction == "mean_with_sample_weight" else (mask,)
    parts = [tf.cast(part, dtype) for part in used if part is not None]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else _same_rank(parts[0], parts[1]) * parts[1]


def _same_rank(weights: Any, mask: Any) -> Any:
    while weights.shape.rank < mask.shape.rank:
        weights = tf.expand_dims(weights, -1)
    return weights
