"""Batches of one shape, as a TPU needs them: shares that are smaller are filled up with rows of weight 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.compat import keras_fit, tf_compat
from keras_dist.data.shares import repack, row_count, share_bounds
from keras_dist.errors import NotSupportedError

_REFUSED = "keras_dist: a batch of"  # the first words of what the pipeline raises


class Even(NamedTuple):
    """A batch, or a replica's share of one, in which every row is real."""

    batch: Any


class Filled(NamedTuple):
    """A batch, or a share of one, that may be filled up: another structure, so another trace of the step.

    Args:
        batch: The rows.
        rows: 1 for each real row, 0 for one that fills up.
        totals: The number of real rows in the whole batch, once for each row, so that each replica gets it.
    """

    batch: Any
    rows: Any
    totals: Any


def even(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns a data set of `Even` batches; raises, when it comes to one of another size.

    Args:
        dataset: A batched data set.
        size: Examples in each batch.
    """

    def same(*elements: Any) -> Even:
        batch = repack(dataset, elements)
        with tf.control_dependencies([_check(tf.equal, batch, size)]):
            return Even(_map(lambda leaf: tf.ensure_shape(tf.identity(leaf), [size, *leaf.shape[1:]]), batch))

    return dataset.map(same, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def filled(dataset: tf.data.Dataset, size: int, replicas: int) -> tf.data.Dataset:
    """Returns a data set of `Filled` batches.

    Of `B` examples replica `r` of `n` gets those from `r * B // n` to `(r + 1) * B // n`, as on other backends.

    Args:
        dataset: A batched data set.
        size: The most examples in a batch.
        replicas: Each gets the same number of rows.
    """

    def fill(*elements: Any) -> Filled:
        batch = repack(dataset, elements)
        with tf.control_dependencies([_check(tf.less_equal, batch, size)]):
            return _filled(batch, -(-size // replicas), replicas)

    return dataset.map(fill, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _filled(batch: Any, share: int, replicas: int) -> Filled:
    total = row_count(batch)
    start, stop = share_bounds(total, tf.range(replicas)[:, None], replicas)
    index = start + tf.range(share)[None]
    is_real = tf.reshape(index < stop, [-1])
    # A real row again, not zeros: of zeros a model may make NaN, which times 0 is still NaN.
    index = tf.reshape(tf.minimum(index, total - 1), [-1])
    whole = share * replicas

    def one(leaf: Any) -> Any:
        return tf.ensure_shape(tf.gather(leaf, index), [whole, *leaf.shape[1:]])

    totals = tf.repeat(total, whole)
    return Filled(_map(one, batch), tf.cast(is_real, tf.float32), tf.ensure_shape(totals, [whole]))


def share_of_batch(batch: Any, replica: Any, replicas: int) -> Even | Filled:
    """Returns a replica's share of a batch that never was in a data set (`train_on_batch`).

    Args:
        batch: Tensors with a known number of rows.
        replica: Which replica, a scalar tensor.
        replicas: How many there are.
    """
    size = size_of(batch)
    whole: Even | Filled = Even(batch) if size % replicas == 0 else _filled(batch, -(-size // replicas), replicas)
    share = -(-size // replicas)
    return _map(lambda leaf: tf.reshape(leaf, [replicas, share, *leaf.shape[1:]])[replica], whole)


def size_of(batch: Any) -> int:
    """Returns how many rows the tensors of a batch have.

    Raises:
        NotSupportedError: If that isn't known: batches of several sizes were passed.
    """
    size = _first(batch).shape[0]
    if size is None:
        raise NotSupportedError(
            "A TPU needs batches of one size.", "batches of several sizes, one by one", "Pass batches of the same size."
        )
    return int(size)


def _map(function: Any, batch: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: function(leaf) if tf.is_tensor(leaf) else leaf, batch)


def _first(batch: Any) -> Any:
    return next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None and hasattr(leaf, "shape"))


def _check(is_right: Any, batch: Any, size: int) -> Any:
    count = row_count(batch)
    return tf.debugging.Assert(is_right(count, size), [_REFUSED, count, "examples, of", size])


def refused_sizes(error: Exception) -> str | None:
    """Returns what a pipeline of `even` or `filled` has refused, in words; `None` if the error is another one."""
    words = str(error)
    if _REFUSED not in words:
        return None
    numbers = [int(part) for part in words[words.index(_REFUSED) :].replace("]", " ").replace("[", " ").split()
               if part.isdigit()]  # fmt: skip
    return f"a batch of {numbers[0]} examples, where {numbers[1]} were expected" if len(numbers) > 1 else words


def shares(dataset: tf.data.Dataset, replicas: int, pipeline: int, pipelines: int) -> tf.data.Dataset:
    """Cuts each batch into the replicas' shares, one after the other; of them those of one host.

    Args:
        dataset: From `even` or `filled`.
        replicas: On all hosts.
        pipeline: Index of the host.
        pipelines: Number of hosts.
    """
    own = replicas // pipelines

    def cut(element: Any) -> Any:
        def one(leaf: Any) -> Any:
            pieces = tf.reshape(leaf, [replicas, leaf.shape[0] // replicas, *leaf.shape[1:]])
            return pieces[pipeline * own : (pipeline + 1) * own]

        return _map(one, element)

    return dataset.map(cut).unbatch().prefetch(tf.data.AUTOTUNE)


def batch_size_of(dataset: tf.data.Dataset) -> tuple[int | None, bool | None]:
    """Returns how many examples a full batch has, and if all are full; `None` for what the data set doesn't tell.

    It is not iterated over: that would make another epoch of it.
    """
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape.rank and first.shape[0] is not None:
        return int(first.shape[0]), True
    stage = tf_compat.last_stage(dataset)
    while stage.kind in ("map", "repeat", "prefetch", "options"):
        stage = tf_compat.last_stage(stage.input)
    size = tf.get_static_value(stage.arguments["batch_size"]) if stage.kind == "batch" else None
    if size is None:
        return None, None
    examples = int(stage.input.cardinality())  # type: ignore[union-attr]
    known = examples >= 0 or examples == tf.data.INFINITE_CARDINALITY
    return int(size), examples < 0 or examples % int(size) == 0 if known else None


def check_shapes(dataset: tf.data.Dataset) -> None:
    """Raises if something else than the batch's size isn't fixed.

    Raises:
        NotSupportedError: Names what varies.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.OptionalSpec):
            continue
        dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank and None not in spec.shape[1:]
        if not dense or spec.dtype == tf.string:
            raise NotSupportedError(
                "A TPU needs numbers in tensors of a fixed shape.",
                f"{spec} in the data",
                "Pad each example in the data set (`padded_batch`, `to_tensor(shape=...)`), and turn strings into "
                "numbers there (StringLookup, TextVectorization in `map`).",
            )


def make_fewer_steps(epoch_iterator: Any, batches: int) -> None:
    """Lets an epoch have a step for so many of the script's batches.

    Args:
        epoch_iterator: Keras's.
        batches: Of the script, in one step.

    Raises:
        NotSupportedError: If `steps_per_epoch` is no multiple of it: a step would have batches of two epochs.
    """
    steps, counted = epoch_iterator.steps_per_epoch, epoch_iterator.data_adapter.num_batches
    if steps and steps % batches:
        raise NotSupportedError(
            "With batch='per_replica' on a TPU `steps_per_epoch` has to be a multiple of the number of cores.",
            f"steps_per_epoch={steps}, {batches} cores",
            f"For example steps_per_epoch={-(-steps // batches) * batches}.",
        )
    keras_fit.set_steps(epoch_iterator, counted and -(-counted // batches))
    epoch_iterator.steps_per_epoch = steps and steps // batches


def unknown_size(dataset: tf.data.Dataset) -> NotSupportedError:
    """Returns the error for a data set whose batches have a size that isn't known beforehand."""
    return NotSupportedError(
        "A TPU needs batches of a size that is known beforehand.",
        f"{type(dataset).__name__.strip('_')} with {dataset.element_spec}",
        "End the data set in `.batch(n)` or `.batch(n, drop_remainder=True)`; of a Python generator make one by "
        "tf.data.Dataset.from_generator first.",
    )
