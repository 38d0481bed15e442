"""What replicas see of the whole batch: the rows of all shares, and random numbers drawn for all of them.

With `kd.distribute(exact=True)` each replica draws for the whole batch and takes the rows of its share. Without it,
every replica has a random stream of its own, which costs nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_losses, keras_model, keras_random, tf_graphs
from keras_dist.data.shares import row_count, static_length
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import step_of
from keras_dist.step.step import RowRange, Step


class Gathered(NamedTuple):
    """The rows of all shares."""

    rows: Any  # in the order of the shares, without the placeholder of an empty one
    start: Any  # int32 scalar, the index of this share's first row among them


def gather_in_step(backend: Backend, tensor: Any) -> Any:
    """See `kd.gather`. Raises `ConfigurationError` if there are several replicas and no step runs."""
    is_whole = step_module.current() is None and not step_module.is_outside()
    # When Keras builds a layer, it calls it on no batch.
    if backend.num_replicas == 1 or is_whole or keras_layers.is_symbolic():
        return tensor
    step = step_of("kd.gather()")
    if step.is_plain:
        return tensor
    step.has_gathered = True
    rows = gather(backend, step, tensor).rows
    step.reduced.append(rows)
    return rows


def check_own_rows(step: Step, values: Any, loss: str) -> Any:
    """Returns the values of a loss that counts or gathers shares; fails if they belong to rows of other shares."""
    if not step.has_gathered or values.shape.rank == 0:
        return values
    text = (
        "After kd.gather a loss of the whole batch, or with reduction='sum', gets other rows than its share's.\n"
        f"Received: {loss}\nRemedy: Give it the rows of the share, and use kd.losses.WholeBatch. Or compute the loss "
        "of the gathered rows by a function, as a mean."
    )
    is_own = tf.debugging.assert_less_equal(tf.shape(values)[0], tf.maximum(step.count, 1), text)
    with tf.control_dependencies([is_own]):
        return keras_losses.with_mask_of(tf.identity(values), values)


def check_rows(tensor: Any) -> None:
    """Raises `ConfigurationError` for what `kd.gather` can't gather."""
    is_tensor = isinstance(tensor, tf.Tensor | tf.Variable | keras.Variable | np.ndarray)
    if is_tensor and tf.as_dtype(tensor.dtype) != tf.string and len(tensor.shape) > 0:
        return
    raise ConfigurationError(
        "kd.gather() takes a tensor of numbers or bools with a row for each example.",
        f"{tensor.dtype} of shape {tensor.shape}" if is_tensor else type(tensor).__name__,
        "Pass the tensors of a structure one by one, and the codes of strings. In a functional model call it in the "
        "`call` of a layer or in the loss.",
    )


def gather(exchange: Backend, step: Step, rows: Any, all_compute_the_same: bool = False) -> Gathered:
    """Gathers the rows of all shares, which may be bools, with the mask that a layer attached to them.

    If all replicas compute the same from the rows, gradients need not be summed over the replicas, only weighted: they
    will be weighted by the share when they are reduced.
    """
    own = tf.convert_to_tensor(rows)
    dtype, own = own.dtype, tf.cast(own, tf.int32) if own.dtype == tf.bool else own
    sent, count = own, tf.shape(own)[0]
    if not tf.get_static_value(step.count):  # a TPU needs static shapes
        count = tf.where(step.count > 0, count, 0)
        sent = own[:count]
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
            part = tf.cast(step.part if all_compute_the_same else step.part_of_gradients, upstream.dtype)
            if not all_compute_the_same:
                weighted = tf.math.multiply_no_nan(upstream, part)
                upstream = exchange.all_reduce_exact(weighted, f"{name}_gradient")
            own_rows = take_rows(upstream, start_in(upstream), tf.shape(values)[0])
            return tf.math.divide_no_nan(own_rows, part)

        return exchange.all_gather(values if sent is own else values[:count], name), gradient

    whole = tf.identity(gathered(own), name=step_module.WHOLE)
    masked = keras_losses.with_mask_of(
        tf.cast(whole, dtype), rows, lambda mask: gather(exchange, step, mask, all_compute_the_same).rows
    )
    return Gathered(masked, start_in(whole))


def take_rows(rows: Any, start: Any, count: Any) -> Any:
    """Returns some of the rows of a tensor. On a TPU only `start` may be unknown when the step is compiled."""
    begin = tf.concat([[start], tf.zeros([rows.shape.rank - 1], tf.int32)], 0)
    taken = tf.slice(rows, begin, tf.concat([[count], tf.shape(rows)[1:]], 0))
    taken.set_shape([tf.get_static_value(count), *rows.shape[1:]])
    return taken


_Draw = Callable[..., Any]


def whole_draws(exchange: Backend) -> contextlib.AbstractContextManager[None]:
    """In this context `keras.random`, and so every layer of Keras, draws for the whole batch.

    Tensors with a row for each example are drawn for all examples. All others are drawn alike on all replicas.
    """
    replacements: dict[str, _Draw] = dict.fromkeys(keras_random.OF_SHAPE, functools.partial(_of_shape, exchange))
    replacements["dropout"] = _dropout
    replacements["categorical"] = functools.partial(_categorical, exchange)
    replacements["shuffle"] = functools.partial(_shuffle, exchange)
    return keras_random.replaced(replacements)


class _Rows(NamedTuple):
    """The rows of a share among those of the batch, of a tensor that may have several rows for each example."""

    total: Any  # int32 scalar, the rows of the batch
    start: Any  # int32 scalar, the first one of the share
    count: Any  # int32 scalar, the rows of the share
    parts: Any = None  # the number of batches that were concatenated, each as long as the others; `None` for one

    def of(self, whole: Any) -> Any:
        if self.parts is None:
            return take_rows(whole, self.start, self.count)
        by_part = self._by_part(whole)
        own = self.start // self.parts + tf.range(self.count // self.parts)
        return self._one_after_the_other(tf.gather(by_part, own, axis=1), whole)

    def gathered(self, rows: Any, gather: Callable[[Any], Any]) -> Any:
        """Returns the rows of the batch from those of each share, which `gather` concatenates."""
        if self.parts is None:
            return gather(rows)
        swapped = [1, 0, *range(2, rows.shape.rank + 1)]
        whole = gather(tf.transpose(self._by_part(rows), swapped))
        return self._one_after_the_other(tf.transpose(whole, swapped), rows)

    def _by_part(self, rows: Any) -> Any:
        shape = tf.shape(rows)
        return tf.reshape(rows, tf.concat([[self.parts, shape[0] // self.parts], shape[1:]], 0))

    def _one_after_the_other(self, by_part: Any, like: Any) -> Any:
        rows = tf.reshape(by_part, tf.concat([[-1], tf.shape(like)[1:]], 0))
        return tf.ensure_shape(rows, [None, *like.shape[1:]])


def _rows(step: Step | None, length: Any) -> _Rows | None:
    """Returns where the rows of a tensor of this length are in the batch, `None` if they are not rows of examples.

    The rows of one example follow each other, unless the script has concatenated batches, as a GAN does.
    """
    if step is None or step.place is None or keras_model.applying() is not None:
        return None
    own = static_length(step.data)
    if (static := tf.get_static_value(length)) is not None:
        # The length of a batch is static only if the length of the share is.
        if own is None or tf.executing_eagerly() and static != own:
            return None
        if static == own:
            return _Rows(step.place.total, step.place.start, own)
        parts = tf_graphs.concatenated(int(static), own)
        if parts > 1:
            step.check_concatenated(static)
        rows = _Rows(parts * step.place.total, parts * step.place.start, int(static), parts)
        return rows if static == parts * own else None
    rows = row_count(step.data)
    each = length // tf.maximum(rows, 1)
    is_batch = each * rows == length
    total = tf.where(is_batch, each * step.place.total, length)
    # The placeholder of an empty share may lie behind the last row.
    start = tf.minimum(tf.where(is_batch, each * step.place.start, 0), tf.maximum(total - length, 0))
    parts = tf_graphs.concatenated(length, None)
    of_batch = tf.where(is_batch & (each % parts == 0), parts, 1) if parts > 1 else None
    return _Rows(tf.maximum(total, start + length), start, length, of_batch)


def _of_shape(exchange: Backend, draw: _Draw, shape: Any, *args: Any, **kwargs: Any) -> Any:
    shape = _unpacked(shape)
    rows = _rows(step_module.current(), shape[0]) if shape else None
    if rows is None:
        return draw(shape, *args, **kwargs)

    def of_batch(argument: Any) -> Any:
        is_like = isinstance(argument, tf.Tensor) and argument.shape.rank == len(shape)
        has_rows = is_like and (argument.shape[0] is None or argument.shape[0] == rows.count)
        return _gathered(exchange, argument, rows) if has_rows else argument

    args, kwargs = keras.tree.map_structure(of_batch, (args, kwargs))
    return rows.of(draw((rows.total, *shape[1:]), *args, **kwargs))


def _unpacked(shape: Any) -> list[Any]:
    """Returns a shape as a list. Its numbers are tensors where they are known only when the step runs."""
    if not tf.is_tensor(shape):
        return list(shape)
    sizes = tf.unstack(tf.cast(shape, tf.int32))
    static = [tf.get_static_value(size) for size in sizes]
    return [size if known is None else int(known) for size, known in zip(sizes, static, strict=True)]


def _dropout(draw: _Draw, inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    """Draws a mask for the whole batch. The inputs of other shares are not needed."""
    sizes = zip(_unpacked(tf.shape(inputs)), inputs.shape.as_list(), strict=True)
    shape = [size if known is None else known for size, known in sizes]
    noise = None if noise_shape is None else list(noise_shape)
    length = noise[0] if noise and noise[0] is not None else shape[0] if shape else None
    rows = None if length is None else _rows(step_module.current(), length)
    if rows is None:
        return draw(inputs, rate, noise_shape, seed)
    if noise and noise[0] is not None:
        noise = [rows.total, *noise[1:]]
    kept = rows.of(draw(tf.ones([rows.total, *shape[1:]], inputs.dtype), rate, noise, seed))
    return tf.where(kept != 0, inputs * kept, tf.zeros_like(inputs))


def _categorical(exchange: Backend, draw: _Draw, logits: Any, *args: Any, **kwargs: Any) -> Any:
    rows = _rows(step_module.current(), tf.shape(logits)[0])
    if rows is None:
        return draw(logits, *args, **kwargs)
    return rows.of(draw(_gathered(exchange, logits, rows), *args, **kwargs))


def _shuffle(exchange: Backend, draw: _Draw, x: Any, axis: int = 0, seed: Any = None) -> Any:
    rows = _rows(step_module.current(), tf.shape(x)[axis]) if axis == 0 else None
    return draw(x, axis, seed) if rows is None else rows.of(draw(_gathered(exchange, x, rows), axis, seed))


def _gathered(exchange: Backend, values: Any, rows: _Rows) -> Any:
    step = step_module.current()
    assert step is not None
    whole = rows.gathered(values, lambda own: gather(exchange, step, tf.identity(own)).rows)  # without its mask
    if step.shares is None:
        return whole
    # On parameter servers the first run of a step does not know the other shares' rows: any rows take their place.
    return tf.gather(whole, tf.range(rows.total) % tf.maximum(tf.shape(whole)[0], 1))


@contextlib.contextmanager
def on_share(exchange: Backend, step: Step, data: Any, exact: bool | None) -> Iterator[Any]:
    """The context of a step on a share. Yields the data of the share. Every replica must enter it.

    If the data have an unknown length, one step finds that they have ended. TensorFlow starts whatever needs no data
    (counting, drawing, a collective) in that step too, on some devices or ranks but not on others. So nothing of a step
    runs before all tensors of its data are there.

    For `exact` numbers the step knows where its share starts. Its data then have no static length, which tells a length
    that comes from the batch from an equal number.
    """
    leaves = tf.nest.flatten(data, expand_composites=True)
    with tf.control_dependencies([leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]):
        if exact:
            counts = exchange.all_gather(tf.reshape(step.count, [1]), step.next_name("counts"))
            data = place(step, tf.cumsum(counts, exclusive=True)[step.replica], data)
        with step_module.entered(step):
            yield data


def place(step: Step, start: Any, data: Any) -> Any:
    """Lets a step know where its share starts. Returns its data without a static length."""

    def of_any_length(leaf: Any) -> Any:
        if tf.executing_eagerly() or not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])

    step.place = RowRange(start, step.total)
    step.data = tf.nest.map_structure(of_any_length, data)
    return step.data
