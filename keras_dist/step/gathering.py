"""Gathers the rows of all shares in a step, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_losses
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.gradients import step_of
from keras_dist.step.step import Step


class Exchange(Protocol):
    """What replicas tell each other within a step, see `Backend`."""

    def all_gather(self, tensor: Any, name: str) -> Any: ...

    def all_reduce_exact(self, numbers: Any, name: str) -> Any: ...


class Gathered(NamedTuple):
    """The rows of all shares.

    Args:
        rows: The rows, in the order of the shares. The placeholder of an empty share is left out.
        start: int32 scalar, the index of this share's first row among them.
    """

    rows: Any
    start: Any


def gather_in_step(backend: Backend, tensor: Any) -> Any:
    """See `kd.gather`.

    Raises:
        ConfigurationError: If there are several replicas and no step runs.
    """
    is_whole = step_module.current() is None and not step_module.is_outside()
    # When Keras builds a layer, it calls it on no batch.
    if backend.num_replicas == 1 or is_whole or keras_layers.is_symbolic():
        return tensor
    step = step_of("kd.gather()")
    if step.is_plain:
        return tensor
    step.has_gathered = True
    rows = keras_losses.with_mask_of(tf.convert_to_tensor(tensor), tensor, lambda mask: mask)
    return gather_masked(backend, step, rows).rows


def check_own_rows(step: Step, values: Any, loss: str) -> Any:
    """Returns the values of a loss that counts shares, or gathers them; fails if they are not those of this share."""
    if not step.has_gathered or values.shape.rank == 0:
        return values
    text = (
        "After kd.gather a loss of the whole batch, or with reduction='sum', gets other rows than its share's.\n"
        f"Received: {loss}\nRemedy: Give it the rows of the share, and use kd.losses.WholeBatch. Or compute the loss "
        "of the gathered rows by a function, as a mean."
    )
    is_own = tf.debugging.assert_less_equal(tf.shape(values)[0], tf.maximum(step.count, 1), text)
    with tf.control_dependencies([] if is_own is None else [is_own]):
        return keras_losses.with_mask_of(tf.identity(values), values, lambda mask: mask)


def check_rows(tensor: Any) -> None:
    """Raises `ConfigurationError` for what `kd.gather` can't gather."""
    is_tensor = isinstance(tensor, tf.Tensor | tf.Variable | keras.Variable | np.ndarray)
    if is_tensor and tf.as_dtype(tensor.dtype) != tf.string and len(tensor.shape) > 0:
        return
    described = f"{tensor.dtype} of shape {tensor.shape}" if is_tensor else type(tensor).__name__
    raise ConfigurationError(
        "kd.gather() takes a tensor of numbers or bools with a row for each example.",
        described,
        "Pass the tensors of a structure one by one, and the codes of strings. In a functional model call it in the "
        "`call` of a layer or in the loss.",
    )


def gather(exchange: Exchange, step: Step, rows: Any, all_compute_the_same: bool = False) -> Gathered:
    """Gathers the rows of all shares.

    Args:
        exchange: How the replicas gather.
        step: The current step.
        rows: Tensor with the rows of this share.
        all_compute_the_same: True if every replica computes the same from the rows. Then gradients need not be summed
            over the replicas, only weighted: they will be weighted by the share when they are reduced.
    """
    own = tf.convert_to_tensor(rows)
    sent, count = _counted(step, own)
    counts = exchange.all_gather(count[None], step.next_name("rows"))
    name = step.next_name("gathered")
    logger().debug("rows of shape %s and type %s are gathered from all shares", own.shape, own.dtype.name)

    def start_in(whole: Any) -> Any:
        # The placeholder of an empty share may lie behind the last row.
        last = tf.maximum(tf.shape(whole)[0] - tf.shape(own)[0], 0)
        return tf.minimum(tf.cumsum(counts, exclusive=True)[step.position], last)

    @tf.custom_gradient
    def gathered(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            part = tf.cast(step.part, upstream.dtype)
            if not all_compute_the_same:
                if step.weighs_losses_of:  # so the gradients of each replica's loss are weighted already
                    part = tf.cast(step.count > 0, upstream.dtype)
                weighted = tf.math.multiply_no_nan(upstream, part)
                upstream = exchange.all_reduce_exact(weighted, f"{name}_gradient")
            own_rows = take_rows(upstream, start_in(upstream), tf.shape(values)[0])
            return tf.math.divide_no_nan(own_rows, part)

        return exchange.all_gather(values if sent is own else values[:count], name), gradient

    whole = tf.identity(gathered(own), name=step_module.WHOLE)
    return Gathered(whole, start_in(whole))


def gather_masked(exchange: Exchange, step: Step, rows: Any, all_compute_the_same: bool = False) -> Gathered:
    """Gathers the rows of all shares, as `gather`, with the mask that a layer attached to them. They may be bools."""
    sent = tf.cast(rows, tf.int32) if rows.dtype == tf.bool else rows
    whole, start = gather(exchange, step, sent, all_compute_the_same)
    whole = keras_losses.with_mask_of(
        tf.cast(whole, rows.dtype), rows, lambda mask: gather_masked(exchange, step, mask, all_compute_the_same).rows
    )
    return Gathered(whole, start)


def _counted(step: Step, rows: Any) -> tuple[Any, Any]:
    count = tf.shape(rows)[0]
    if tf.get_static_value(step.count):  # a TPU needs static shapes
        return rows, count
    count = tf.where(step.count > 0, count, 0)
    return rows[:count], count


def take_rows(rows: Any, start: Any, count: Any) -> Any:
    """Returns some of the rows of a tensor. On a TPU only `start` may be unknown when the step is compiled."""
    begin = tf.concat([[start], tf.zeros([rows.shape.rank - 1], tf.int32)], 0)
    taken = tf.slice(rows, begin, tf.concat([[count], tf.shape(rows)[1:]], 0))
    taken.set_shape([tf.get_static_value(count), *rows.shape[1:]])
    return taken
