"""The loss rule: the factor of a rank's loss, so that the mean over ranks is the loss of the global batch.

A rank's loss counts as a mean over the examples of its share. Most losses are such a mean. The others divide by
something else: nothing (`"sum"`), the sum of the weights (`"mean_with_sample_weight"`), or the number of unmasked
entries (Keras masks). Their loss for the global batch is `sum of numerators / sum of denominators`. So a rank's
`numerator / denominator` is multiplied by `denominator / sum of denominators * total / count`. The sum of denominators
costs one small reduction, and only models with such a loss pay for it.

A loss that is one number for the batch (Dice, a root of a mean, a sum) need not be a mean, and some losses compare the
examples of a batch. Unless its graph proves that it is a mean, each replica gathers labels and predictions and computes
such a loss on the whole batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_losses
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Arguments, Kind, Proof, traced
from keras_dist.step.gathering import check_own_rows, gather
from keras_dist.step.step import Step, ratio


def rescale(
    sum_over_replicas: Callable[[Any, str], Any], loss: Any, values: Any, weights: Any, mask: Any, reduction: str | None
) -> Any:
    """Returns the loss of the current share, rescaled by the loss rule.

    `sum_over_replicas` sums a tensor over the shares of the batch, under a name, as `Backend.all_reduce_exact`.
    `loss` is what Keras reduced the `values` of the entries to.
    """
    step, values = step_module.current(), tf.convert_to_tensor(values)
    if step is None or reduction in (None, "none") or values.shape.rank == 0:
        return loss
    if values.shape.as_list() == [0]:
        loss = tf.reduce_sum(loss)  # in an eager loop, Keras does not reduce the loss of an empty batch
    if reduction == "sum":
        with tf.control_dependencies([check_own_rows(step, values, "a loss with reduction='sum'")]):
            loss = tf.identity(loss)
        return loss * ratio(step.total, step.count, loss.dtype)
    # Keras divides this reduction by the sum of this; others by the number of entries.
    used = (weights, mask) if reduction == "mean_with_sample_weight" else (mask,)
    parts = [tf.cast(part, step.dtype) for part in used if part is not None]
    if not parts:
        return step.mean_over_examples(loss)
    summands = parts[0] if len(parts) == 1 else _same_rank(parts[0], parts[1]) * parts[1]
    denominator, counted = step.denominators(summands)
    total = tf.stop_gradient(sum_over_replicas(counted, step.next_name("denominator")))
    factor = tf.math.divide_no_nan(denominator, total) * ratio(step.total, step.count, step.dtype)
    return loss * tf.cast(tf.stop_gradient(factor), loss.dtype)


def of_loss(exchange: Backend, plain: Callable[..., Any], *args: Any) -> Any:
    """Calls a Keras loss by `on_whole_batch`, and notes that its value counts as the mean over the share."""
    value, step = on_whole_batch(exchange, plain, *args), step_module.current()
    if step is not None and tf.is_tensor(value) and value.shape.rank == 0:
        step.means.append(value)
    return value


def on_whole_batch(
    exchange: Backend, plain: Callable[..., Any], values_of: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any,
    sample_weight: Any = None,
) -> Any:  # fmt: skip
    """Calls a Keras loss on the current share, or on the whole batch if its value can't be added up from shares.

    `plain` is the `__call__` of the loss. `values_of` computes what tells whether it compares examples, see
    `keras_losses.wrapped_losses`.
    """
    step = step_module.current()
    y_true, y_pred = _of_dtype(y_true, loss.dtype), _of_dtype(y_pred, loss.dtype)
    weights = [] if sample_weight is None else [sample_weight]  # a `__call__` of the script's own need not take them
    if step is None or not _couples(loss, values_of, y_true, y_pred, bool(weights) or keras_losses.has_mask(y_pred)):
        return plain(y_true, y_pred, *weights)

    logger().debug("the loss %r is computed on the whole batch", loss.name)

    def whole(values: Any) -> Any:
        if values.shape.rank == 0:
            return values
        return gather(exchange, step, values, all_compute_the_same=True).rows

    y_pred = keras.tree.map_structure(lambda rows: check_own_rows(step, rows, f"the loss {loss.name!r}"), y_pred)
    weights = [whole(_of_dtype(each, loss.dtype)) for each in weights]
    y_true, y_pred = keras.tree.map_structure(whole, y_true), keras.tree.map_structure(whole, y_pred)
    with step_module.entered(None):
        value = plain(y_true, y_pred, *weights)
    if value.shape.rank != 0 and value.shape != [0]:  # Keras does not reduce a loss of no entries, in an eager step
        raise NotSupportedError(
            "A loss that compares the examples of a batch must be reduced to one number.",
            f"the loss {loss.name!r} with reduction={loss.reduction!r}",
            "Use another reduction, such as 'sum_over_batch_size'.",
        )
    return value


def of_own_function(exchange: Backend, counted: Sequence[Any], call: Callable[..., Any], given: Any) -> Any:
    """Calls a model's own `compute_loss` on the current share. Where its value is not proven to be a mean over the
    rows, or its values to depend on single rows, it is called on the whole batch.

    What it adds to `counted`, the variables of the model's metrics, counts once, not once for each replica.
    """
    step, arguments = step_module.current(), Arguments(given)
    is_share = step is not None and not step.is_plain and bool(arguments.rows)
    if step is None or not is_share or (used := _used_on_whole_batch(call, arguments)) is None:
        return of_each_example(step, call(*given[0], **given[1]))
    logger().debug("compute_loss computes on the whole batch")
    rows = [
        gather(exchange, step, own, all_compute_the_same=True).rows if is_used else own
        for own, is_used in zip(arguments.rows, used, strict=True)
    ]
    args, kwargs = arguments.with_rows(rows)
    floats = [variable for variable in counted if keras.backend.is_float_dtype(variable.dtype)]
    with step.weighing(floats), step_module.entered(None):
        return call(*args, **kwargs)


def _used_on_whole_batch(call: Callable[..., Any], arguments: Arguments) -> list[bool] | None:
    """Returns which rows a loss needs of the whole batch; `None` if it is a mean, or each value is of one row."""

    def used(rows: Sequence[Any]) -> list[bool] | None:
        args, kwargs = arguments.with_rows(rows)
        with keras.StatelessScope():
            loss = tf.convert_to_tensor(call(*args, **kwargs))
        proof = Proof(rows)
        is_proven = proof.kind(loss) is Kind.ROWS if loss.shape.rank else proof.is_mean(loss)
        return None if is_proven else [bool(leaf.consumers()) for leaf in rows]

    try:
        return traced(arguments, used)
    except Exception as error:  # on the whole batch any loss is right
        logger().debug("compute_loss cannot be traced: %s", error)
        return [True] * len(arguments.rows)


def _of_dtype(values: Any, dtype: Any) -> Any:
    """Converts labels or predictions as Keras does; the masks of layers stay attached."""
    return keras.tree.map_structure(
        lambda leaf: keras_losses.with_mask_of(keras.ops.convert_to_tensor(leaf, dtype), leaf), values
    )


def _couples(loss: Any, values_of: Callable[..., Any], y_true: Any, y_pred: Any, is_weighted: bool) -> bool:
    """True if the loss of a batch is not a mean over its examples. Keras multiplies one number by the mean weight.

    The answer does not depend on the size of a share, so it is the same on all replicas.
    """
    if keras_losses.compares_examples(loss):
        return True
    arguments = Arguments((y_true, y_pred))
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 for leaf in arguments.leaves):
        return False

    def couples(rows: Sequence[Any]) -> bool:
        with keras.StatelessScope():
            values = tf.convert_to_tensor(values_of(*arguments.with_rows(rows)))
        if values.shape.rank == 0:
            return is_weighted or not Proof(rows).is_mean(values)
        return not (keras_losses.has_values_of_examples(loss) or Proof(rows).kind(values) is Kind.ROWS)

    try:
        return traced(arguments, couples)
    except Exception:  # it can't be traced: on the whole batch any loss is right
        return True


def of_each_example(step: Step | None, losses: Any) -> Any:
    """Pads a loss of one value per example with zeros for the other ranks' examples, and weights it by the loss rule.

    Then both its sum and its mean over the share are right, and Keras, which weights such a loss by its length, counts
    the examples of the global batch. Other losses are returned as they are.
    """
    if step is None or not tf.is_tensor(losses) or losses.shape.rank in (0, None):
        return losses
    others = tf.maximum(step.total - tf.shape(losses)[0], 0)
    padding = tf.pad(others[None, None], [[0, losses.shape.rank - 1], [1, 0]])
    return tf.pad(losses, padding) * ratio(step.total, step.count, losses.dtype)


def _same_rank(weights: Any, mask: Any) -> Any:
    while weights.shape.rank < mask.shape.rank:
        weights = tf.expand_dims(weights, -1)
    return weights
