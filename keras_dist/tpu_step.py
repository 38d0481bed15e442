"""One step on a share that is filled up: rows of weight 0 leave no trace in loss, gradients and metrics.

Keras divides a replica's loss by the number of replicas, unless it is a sum, and adds up. So a mean over a share of `b`
rows has to be multiplied by `b * replicas / total`, where `total` real examples are in the whole batch; means with
other denominators likewise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends import keras_compat
from keras_dist.errors import NotSupportedError


def with_rows(data: Any, rows: Any) -> Any:
    """Returns a batch in which the user's weights are 0 for rows that fill up."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    if weights is None:
        return data
    return x, y, tf.nest.map_structure(lambda weight: weight * _like(rows, weight), weights)


def _like(rows: Any, values: Any) -> Any:
    """The rows, cast and with more axes, so that they can be multiplied with values of each row."""
    rows = tf.cast(rows, tf.float32 if values.dtype == tf.bool else values.dtype)
    return tf.reshape(rows, [-1] + [1] * (len(values.shape) - 1))


class Share(threading.local):
    """What the replica of this thread works on: MirroredStrategy has a thread for each.

    Args:
        rows: 1 for each real row of the share, 0 for others.
        total: Number of real rows in the whole batch, a float32 scalar.
    """

    rows: Any = None
    total: Any = None

    def part(self) -> Any:
        """What a replica counts in an average: all together the real rows."""
        return self.total / tf.distribute.get_replica_context().num_replicas_in_sync


@contextlib.contextmanager
def counting(model: keras.Model, share: Share, filled: bool) -> Iterator[None]:
    """Makes losses, metrics and averages count real rows only, while replicas run in it.

    Args:
        model: The model.
        share: Each replica sets it to its own.
        filled: True if there may be rows that fill up.
    """
    without_others = functools.partial(_without_others, share) if filled else lambda values: values
    with (
        keras_compat.loss_denominators(functools.partial(_rescale, share), without_others),
        keras_compat.averages_count(model, share.part),
        _metrics_count(model, share) if filled else contextlib.nullcontext(),
    ):
        yield


def _without_others(share: Share, values: Any) -> Any:
    """The losses of single entries, 0 where a row fills up."""
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        return values
    if values.shape[0] != share.rows.shape[0]:
        raise _not_filled(f"a loss of shape {values.shape} has no row for each of {share.rows.shape[0]} examples")
    return tf.where(_like(share.rows, values) > 0, values, tf.zeros_like(values))


def _rescale(share: Share, loss: Any, values: Any, weights: Any, mask: Any, reduction: str | None) -> Any:
    """The loss rule (`keras_dist/losses.py`) for shares that are filled up."""
    context = tf.distribute.get_replica_context()
    values, replicas = tf.convert_to_tensor(values), context.num_replicas_in_sync
    if reduction in (None, "none") or values.shape.rank == 0:
        return loss
    if reduction == "sum":
        return loss
    if reduction == "mean_with_sample_weight" or mask is not None:
        own, real = _denominators(values, weights, mask, share.rows, reduction)
        everyones = context.all_reduce(tf.distribute.ReduceOp.SUM, real)
        factor = tf.math.divide_no_nan(own, everyones) * replicas
    else:
        factor = tf.cast(share.rows.shape[0] * replicas, tf.float64) / tf.cast(share.total, tf.float64)
    return loss * tf.cast(tf.stop_gradient(factor), loss.dtype)


def _denominators(values: Any, weights: Any, mask: Any, rows: Any, reduction: str | None) -> tuple[Any, Any]:
    """What Keras divides by in this share, and what of it is real."""
    ones = tf.ones_like(values, tf.float64)
    parts = []
    if reduction == "mean_with_sample_weight" and weights is not None:
        parts.append(tf.cast(weights, tf.float64))
    if mask is not None:
        parts.append(tf.cast(mask, tf.float64))
    entries = ones
    for part in parts:
        entries = entries * (part if part.shape.rank == values.shape.rank else _like(part, entries))
    return tf.reduce_sum(entries), tf.reduce_sum(entries * _like(rows, entries))


@contextlib.contextmanager
def _metrics_count(model: keras.Model, share: Share) -> Iterator[None]:
    metrics = keras_compat.compiled_metrics(model)
    for metric in metrics:
        keras_compat.attach(metric, "update_state", _with_rows(metric.update_state, share))
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


def _with_rows(update_state: Callable[..., Any], share: Share) -> Callable[..., Any]:
    def update(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None:  # a weight of the user's has the rows in it already
            mask = keras_compat.mask_of(y_pred)
            sample_weight = share.rows if mask is None else _like(share.rows, mask) * tf.ones_like(mask, tf.float32)
        return update_state(y_true, y_pred, sample_weight=sample_weight)

    return update


def check_can_be_filled(model: keras.Model) -> None:
    """Raises if rows of weight 0 would count in a model.

    Raises:
        NotSupportedError: If it has a step of its own, metrics without weights, or BatchNorm.
    """
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise _not_filled(f"{type(model).__name__} has a {name} of its own")
    for metric in keras_compat.compiled_metrics(model):
        if "sample_weight" not in inspect.signature(metric.update_state).parameters:
            raise _not_filled(f"the metric {metric.name!r} takes no sample_weight")
    for layer in keras_compat.flatten_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise _not_filled(f"the layer {layer.name!r} takes statistics of the whole batch")


def _not_filled(received: str) -> NotSupportedError:
    return NotSupportedError(
        "The last batch may be smaller than the others. A TPU needs all of one size, so it is filled up with rows of "
        "weight 0, and this model would count them.",
        received,
        "Use a batch size that divides the number of examples and is a multiple of the number of TPU cores, or "
        "`.batch(n, drop_remainder=True)`.",
    )
