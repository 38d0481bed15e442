"""One step on a replica's share: what it counts in the batch, and that rows which fill it up leave no trace.

The loss rule (`keras_dist/step/losses.py`) holds: a replica's loss counts as a mean over its share, so its gradient is
weighted by `count / total`. Keras's own division by the number of replicas is switched off.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.tpu.data import Even, Filled
from keras_dist.compat import keras_losses, keras_model, keras_random, keras_strategy
from keras_dist.compat.keras_strategy import like
from keras_dist.errors import NotSupportedError


@dataclasses.dataclass(frozen=True)
class Share:
    """What a replica works on.

    Args:
        rows: 1 for each real row of the share, 0 for others; `None` if all are real.
        length: Rows of the share.
        count: Number of real rows, a float32 scalar.
        total: That of the whole batch.
    """

    rows: Any
    length: int
    count: Any
    total: Any

    def part(self, dtype: Any) -> Any:
        """The part of the batch that the share is."""
        return _ratio(self.count, self.total, dtype)


_CURRENT: contextvars.ContextVar[Share | None] = contextvars.ContextVar("keras_dist_tpu_share", default=None)


def _current() -> Share:
    share = _CURRENT.get()
    assert share is not None
    return share


def run(model: keras.Model, function: Callable[[Any], Any], element: Even | Filled) -> Any:
    """Runs a step on a replica's share, in the context of the replica. Only inside of `counting`.

    Args:
        model: The model.
        function: Its `train_step` or `test_step`.
        element: The share.
    """
    share = _share_of(element)
    trains = function == model.train_step
    token = _CURRENT.set(share)
    try:
        with _own_random_stream(model), _statistics_together(model, share) if trains else contextlib.nullcontext():
            outputs = _of_all(model, function(_with_rows(element.batch, share.rows)), share)
    finally:
        _CURRENT.reset(token)
    adding = keras_strategy.layers_with_losses(model)
    if share.rows is not None and adding:
        raise not_filled(f"the layer {adding[0]!r} adds a loss")
    return outputs


def _of_all(model: keras.Model, logs: Any, share: Share) -> Any:
    """The mean over the batch of what a step of the user's own returns; metrics have counted for themselves."""
    if _context().num_replicas_in_sync == 1 or keras_model.logs_are_metrics(model, logs):
        return logs

    def one(leaf: Any) -> Any:
        if not (tf.is_tensor(leaf) and leaf.dtype.is_floating):
            return leaf
        return _add_up(tf.math.multiply_no_nan(leaf, share.part(leaf.dtype)))

    return tf.nest.map_structure(one, logs)


def _share_of(element: Even | Filled) -> Share:
    length = next(leaf for leaf in tf.nest.flatten(element.batch) if tf.is_tensor(leaf)).shape[0]
    if isinstance(element, Filled):
        return Share(element.rows, length, tf.reduce_sum(element.rows), element.totals[0])
    count = tf.constant(length, tf.float32)
    return Share(None, length, count, count * _context().num_replicas_in_sync)


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _add_up(values: Any) -> Any:
    return _context().all_reduce(tf.distribute.ReduceOp.SUM, values)


def _statistics_of_batch(numbers: Any) -> Any:
    """Adds numbers up. What flows back comes from all losses, and counts by their shares (`batch_statistics.py`)."""
    share = _current()

    @tf.custom_gradient
    def total(numbers: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            part = share.part(upstream.dtype)
            return tf.math.divide_no_nan(_add_up(tf.math.multiply_no_nan(upstream, part)), part)

        return _add_up(numbers), gradient

    return total(numbers)


def _with_rows(data: Any, rows: Any) -> Any:
    """Returns a batch in which the user's weights are 0 for rows that fill up."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    if weights is None or rows is None:
        return data
    return x, y, tf.nest.map_structure(lambda weight: weight * like(rows, weight), weights)


def _ratio(numerator: Any, denominator: Any, dtype: Any) -> Any:
    """A quotient, computed in float32 at least; 0 for nothing of nothing."""
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    return tf.cast(tf.math.divide_no_nan(tf.cast(numerator, wide), tf.cast(denominator, wide)), dtype)


# --- What is around the steps of all replicas ---


@contextlib.contextmanager
def counting(model: keras.Model, is_filled: bool) -> Iterator[None]:
    """Makes losses, metrics, averages and statistics count real rows only, while replicas run in it.

    Args:
        model: The model.
        is_filled: True if there may be rows that fill up.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_strategy.unscaled_losses())
        stack.enter_context(keras_losses.rescaled_losses(_rescale, _without_others))
        stack.enter_context(
            keras_strategy.weighted_averages(model, lambda: _current().count, lambda: _current().part(tf.float64))
        )
        if is_filled:
            stack.enter_context(keras_strategy.moments_of_rows(model, lambda: _current().rows, _statistics_of_batch))
            stack.enter_context(_metrics_count(model))
        yield


def gradients_of_batch(gradients: list[Any]) -> list[Any]:
    """Returns the gradients of the whole batch, of each replica's own."""
    share = _CURRENT.get()
    if share is None or not gradients:
        return gradients

    def weigh(gradient: Any) -> Any:
        # Not 0 × NaN: a replica without examples has no gradient, whatever its loss made of nothing.
        return tf.math.multiply_no_nan(gradient, share.part(gradient.dtype))

    def weighed(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(weigh(gradient.values), gradient.indices, gradient.dense_shape)
        return weigh(gradient)

    return list(_add_up([weighed(gradient) for gradient in gradients]))


@contextlib.contextmanager
def _statistics_together(model: keras.Model, share: Share) -> Iterator[None]:
    """Gives all replicas the average of what each has collected, such as BatchNorm's moving averages.

    What a step hasn't changed stays as it is, bit for bit.
    """
    statistics = keras_model.float_statistics(model)
    if not statistics or _context().num_replicas_in_sync == 1:
        yield
        return
    before = [tf.identity(variable.value) for variable in statistics]
    yield
    changes = [
        tf.math.multiply_no_nan(variable.value - old, share.part(old.dtype))
        for variable, old in zip(statistics, before, strict=True)
    ]
    for variable, old, change in zip(statistics, before, _add_up(changes), strict=True):
        variable.assign(old + change)


@contextlib.contextmanager
def _own_random_stream(model: keras.Model) -> Iterator[None]:
    """Moves random generators apart, or Dropout would draw the same on each replica; the first has one process's."""
    context = _context()
    seeds = [generator.state for generator in keras_random.seed_generators(model)]
    if not seeds or context.num_replicas_in_sync == 1:
        yield
        return
    offset = keras_random.stream_offset(tf.cast(context.replica_id_in_sync_group, seeds[0].dtype), seeds[0].dtype)
    for seed in seeds:
        seed.assign(seed.value + offset)
    yield
    for seed in seeds:
        seed.assign(seed.value - offset)


# --- Losses and metrics ---


def _without_others(values: Any) -> Any:
    """The losses of single entries, 0 where a row fills up."""
    share, values = _current(), tf.convert_to_tensor(values)
    if share.rows is None:
        return values
    if values.shape.rank == 0 or values.shape[0] != share.length:
        raise not_filled(f"a loss of shape {values.shape} has no row for each of {share.length} examples")
    return tf.where(like(share.rows, values) > 0, values, tf.zeros_like(values))


def _rescale(loss: Any, values: Any, weights: Any, mask: Any, reduction: str | None) -> Any:
    """The loss rule for shares that may be filled up."""
    share, values = _current(), tf.convert_to_tensor(values)
    if reduction in (None, "none"):
        return _of_each_example(share, loss)
    if values.shape.rank == 0:
        return loss
    if reduction == "sum":
        return loss * _ratio(share.total, share.count, loss.dtype)
    if reduction == "mean_with_sample_weight" or mask is not None:
        own, real = _denominators(values, weights, mask, share.rows, reduction)
        factor = _ratio(own, _add_up(real), real.dtype) * _ratio(share.total, share.count, real.dtype)
    else:
        factor = _ratio(share.length, share.count, loss.dtype)
    return loss * tf.cast(tf.stop_gradient(factor), loss.dtype)


def _of_each_example(share: Share, losses: Any) -> Any:
    """A loss that is one value for each example; zeros stand for those of other replicas, so that its mean is right."""
    if losses.shape.rank == 0:
        return losses
    if share.rows is not None:
        raise not_filled("a loss with reduction='none'")
    replicas = _context().num_replicas_in_sync
    padding = [[0, losses.shape[0] * (replicas - 1)]] + [[0, 0]] * (losses.shape.rank - 1)
    return tf.pad(losses, padding) * tf.cast(replicas, losses.dtype)


def _denominators(values: Any, weights: Any, mask: Any, rows: Any, reduction: str) -> tuple[Any, Any]:
    """What Keras divides by in this share, and what of it is real."""
    entries = tf.ones_like(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
    parts = [weights] if reduction == "mean_with_sample_weight" and weights is not None else []
    for part in [*parts, *([mask] if mask is not None else [])]:
        part = tf.cast(part, entries.dtype)
        entries = entries * (part if part.shape.rank == values.shape.rank else like(part, entries))
    real = entries if rows is None else entries * like(rows, entries)
    return tf.reduce_sum(entries), tf.reduce_sum(real)


@contextlib.contextmanager
def _metrics_count(model: keras.Model) -> Iterator[None]:
    metrics = keras_strategy.compiled_metrics(model)
    for metric in metrics:
        keras_model.attach(metric, "update_state", _with_rows_of_share(metric.name, metric.update_state))
    try:
        with keras_strategy.metric_values(metrics, _has_rows):
            yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


def _has_rows(metric: Any, values: Any) -> None:
    if values.shape.rank == 0:
        raise not_filled(f"the metric {metric.name!r} is one number for {_current().length} examples")


def _with_rows_of_share(name: str, update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None:  # a weight of the user's has the rows in it already
            rows, mask = _current().rows, keras_model.mask_of(y_pred)
            sample_weight = rows if mask is None else like(rows, mask) * tf.ones_like(mask, tf.float32)
        sample_weight = tf.identity(sample_weight)
        updated = update_state(y_true, y_pred, sample_weight=sample_weight)
        if not sample_weight.consumers():
            raise not_filled(f"the metric {name!r} makes no use of `sample_weight`")
        return updated

    return update


# --- What can't be filled up ---


def why_not_filled(model: keras.Model, kind: str) -> str | None:
    """Returns why rows of weight 0 would count in a model's steps, `None` if they would not.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if kind == "predict":
        return None
    name = f"{kind}_step"
    if getattr(type(model), name) is not getattr(keras.Model, name):
        return f"{type(model).__name__} has a {name} of its own"
    keeping = keras_strategy.layers_with_metrics(model)
    return f"the layer {keeping[0]!r} keeps a metric" if keeping else None


def not_filled(received: str) -> NotSupportedError:
    """Returns the error for a batch that would have to be filled up."""
    return NotSupportedError(
        "A batch is smaller than the others, or no multiple of the number of TPU cores. A TPU needs all shares of one "
        "size, so they are filled up with rows of weight 0, and this model would count them.",
        received,
        "Use a batch size that divides the number of examples and is a multiple of the number of TPU cores, or "
        "`.batch(n, drop_remainder=True)`.",
    )
