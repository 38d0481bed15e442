"""Cuts batches into shares of one shape, which a TPU needs. Smaller shares are filled up with rows of weight 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.compat import keras_fit, tf_data
from keras_dist.data.shares import all_equal, lengths_of, repack, row_count, share_bounds
from keras_dist.errors import NotSupportedError

# The errors of a pipeline begin with one of these.
_REFUSED = "keras_dist: a batch of"
_LENGTHS = "keras_dist: a batch with tensors of different lengths"


class Even(NamedTuple):
    """A batch, or a replica's share of one, without filler rows."""

    batch: Any


class Filled(NamedTuple):
    """A batch, or a share of one, that may have filler rows. The step is traced separately for this structure.

    Args:
        batch: The rows.
        rows: 1 for each real row, 0 for each filler row.
        totals: The number of real rows in the whole batch, once for each row, so that each replica gets it.
    """

    batch: Any
    rows: Any
    totals: Any


def even(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns a dataset of `Even` batches, which raises at a batch of another size.

    Args:
        dataset: A batched dataset.
        size: Examples in each batch.
    """

    def same(*elements: Any) -> Even:
        batch = repack(dataset, elements)
        with tf.control_dependencies([_check(tf.equal, batch, size)]):
            return Even(_map(lambda leaf: tf.ensure_shape(tf.identity(leaf), [size, *leaf.shape[1:]]), batch))

    return dataset.map(same, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def filled(dataset: tf.data.Dataset, size: int, replicas: int) -> tf.data.Dataset:
    """Returns a dataset of `Filled` batches, with the shares of other backends.

    Args:
        dataset: A batched dataset.
        size: The largest number of examples in a batch.
        replicas: Number of replicas. Each gets the same number of rows.
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
    # Filler rows repeat a real row. From zeros a model may compute NaN, and NaN times 0 is NaN.
    index = tf.reshape(tf.minimum(index, total - 1), [-1])
    whole = share * replicas

    def one(leaf: Any) -> Any:
        return tf.ensure_shape(tf.gather(leaf, index), [whole, *leaf.shape[1:]])

    totals = tf.repeat(total, whole)
    return Filled(_map(one, batch), tf.cast(is_real, tf.float32), tf.ensure_shape(totals, [whole]))


def share_of_batch(batch: Any, replica: Any, replicas: int) -> Even | Filled:
    """Returns a replica's share of a batch that does not come from a dataset (`train_on_batch`).

    Args:
        batch: Tensors with a known number of rows.
        replica: Integer scalar tensor, the index of the replica.
        replicas: Number of replicas.
    """
    size, lengths = size_of(batch), lengths_of(batch)
    if all_equal(lengths) is not True:
        raise different_lengths(lengths)
    whole: Even | Filled = Even(batch) if size % replicas == 0 else _filled(batch, -(-size // replicas), replicas)
    share = -(-size // replicas)
    return _map(lambda leaf: tf.reshape(leaf, [replicas, share, *leaf.shape[1:]])[replica], whole)


def size_of(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
        NotSupportedError: If it is unknown, since batches of several sizes were passed.
    """
    size = _first(batch).shape[0]
    if size is None:
        raise NotSupportedError(
            "A TPU needs batches of one size.", "batches of several sizes", "Pass batches of the same size."
        )
    return int(size)


def _map(function: Any, batch: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: function(leaf) if tf.is_tensor(leaf) else leaf, batch)


def _first(batch: Any) -> Any:
    return next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None and hasattr(leaf, "shape"))


def _check(is_right: Any, batch: Any, size: int) -> Any:
    lengths, count = lengths_of(batch), row_count(batch)
    with tf.control_dependencies([tf.debugging.Assert(all_equal(lengths), [_LENGTHS, *lengths])]):
        return tf.debugging.Assert(is_right(count, size), [_REFUSED, count, "examples, of", size])


def refused_sizes(error: Exception) -> str | None:
    """Returns the size that a pipeline of `even` or `filled` has refused as text, `None` for other errors."""
    words = str(error)
    if _REFUSED not in words:
        return None
    numbers = [int(part) for part in words[words.index(_REFUSED) :].replace("]", " ").replace("[", " ").split()
               if part.isdigit()]  # fmt: skip
    return f"a batch of {numbers[0]} examples, where {numbers[1]} were expected" if len(numbers) > 1 else words


def refuse_lengths(error: Exception) -> None:
    """Raises `NotSupportedError` if a pipeline has refused tensors of different lengths."""
    if _LENGTHS in str(error):
        raise different_lengths(str(error)[str(error).index(_LENGTHS) + len(_LENGTHS) :].split("\n")[0]) from error


def different_lengths(received: Any) -> NotSupportedError:
    """Returns the error for a batch whose tensors have different lengths."""
    return NotSupportedError(
        "A TPU needs a batch whose tensors have the same length: each core gets the same rows of all of them.",
        f"lengths {received}",
        "Make batches of one size (`batch`, `padded_batch`), or keep a table that belongs to no example in the model.",
    )


def shares(dataset: tf.data.Dataset, replicas: int, pipeline: int, pipelines: int) -> tf.data.Dataset:
    """Cuts each batch into the shares of the replicas of one host.

    Args:
        dataset: From `even` or `filled`.
        replicas: Number of replicas of all hosts.
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
    """Returns the number of examples of a full batch, and if all batches are full; `None` if unknown.

    The dataset is not iterated over, since that would be another epoch.
    """
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape.rank and first.shape[0] is not None:
        return int(first.shape[0]), True
    stage = tf_data.last_stage(dataset)
    while stage.kind in ("map", "repeat", "prefetch", "options"):
        stage = tf_data.last_stage(stage.input)
    size = stage.arguments["batch_size"] if stage.kind == "batch" else None
    if not isinstance(size, int):
        return None, None
    examples = int(stage.input.cardinality())  # type: ignore[union-attr]
    known = examples >= 0 or examples == tf.data.INFINITE_CARDINALITY
    return int(size), examples < 0 or examples % int(size) == 0 if known else None


def check_shapes(dataset: tf.data.Dataset) -> None:
    """Raises `NotSupportedError` if a shape varies in more than the batch size, or data are no numbers."""
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    lengths = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if len(lengths) > 1:
        raise different_lengths(sorted(lengths))
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.OptionalSpec):
            continue
        dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank and None not in spec.shape[1:]
        if not dense or spec.dtype == tf.string:
            raise NotSupportedError(
                "A TPU needs numbers in tensors of a fixed shape.",
                f"{spec} in the data",
                "Pad each example in the dataset (`padded_batch`, `to_tensor(shape=...)`), and turn strings into "
                "numbers there (StringLookup, TextVectorization in `map`).",
            )


def make_fewer_steps(epoch_iterator: Any, batches: int) -> None:
    """Reduces the steps of an epoch to one for each `batches` batches of the script.

    Args:
        epoch_iterator: Keras's iterator.
        batches: Number of the script's batches in one step.

    Raises:
        NotSupportedError: If it does not divide `steps_per_epoch`: a step would have batches of two epochs.
    """
    steps, counted = epoch_iterator.steps_per_epoch, epoch_iterator.data_adapter.num_batches
    if steps and steps % batches:
        raise NotSupportedError(
            "With batch='per_replica' on a TPU `steps_per_epoch` must be a multiple of the number of cores.",
            f"steps_per_epoch={steps}, {batches} cores",
            f"For example steps_per_epoch={-(-steps // batches) * batches}.",
        )
    keras_fit.set_steps(epoch_iterator, counted and -(-counted // batches))
    epoch_iterator.steps_per_epoch = steps and steps // batches


def unknown_size(dataset: tf.data.Dataset) -> NotSupportedError:
    """Returns the error for a dataset whose batch size is unknown."""
    return NotSupportedError(
        "A TPU needs batches of a known size.",
        f"{type(dataset).__name__.strip('_')} with {dataset.element_spec}",
        "End the dataset in `.batch(n)` or `.batch(n, drop_remainder=True)`. Turn a Python generator into a dataset "
        "by tf.data.Dataset.from_generator.",
    )
