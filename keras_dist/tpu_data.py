"""Batches of one shape, as a TPU needs them: the last one, if it is smaller, is filled up with rows of weight 0."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.backends import tf_compat
from keras_dist.errors import NotSupportedError


def padded(dataset: tf.data.Dataset, size: int, replicas: int) -> tf.data.Dataset:
    """Returns a data set of batches of one shape, each with what is real in it.

    Args:
        dataset: A batched data set.
        size: Examples in its full batches.
        replicas: The batches are filled up to a multiple of this.

    Returns:
        Elements `(batch, rows, totals)`, all of the same length: `rows` is 1 for a real example and 0 for one that
        fills up, `totals` the number of real ones in the batch, once for each row, so that each replica gets it;
        both in float32 (in int32 TensorFlow 2.21 loses them between the devices of MirroredStrategy).
    """
    length = -(-size // replicas) * replicas

    def fill(*parts: Any) -> Any:
        batch = parts if len(parts) != 1 else parts[0]
        leaves = [leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)]
        total = tf.shape(leaves[0])[0]
        # A real row again, not zeros: of zeros a model may make NaN, which times 0 is still NaN.
        index = tf.minimum(tf.range(length), total - 1)
        rows = tf.cast(tf.range(length) < total, tf.float32)

        def one(leaf: Any) -> Any:
            if not tf.is_tensor(leaf):
                return leaf
            return tf.ensure_shape(tf.gather(leaf, index), [length, *leaf.shape[1:]])

        return tf.nest.map_structure(one, batch), rows, tf.repeat(tf.cast(total, tf.float32), length)

    return dataset.map(fill, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def shares(dataset: tf.data.Dataset, replicas: int, pipeline: int, pipelines: int) -> tf.data.Dataset:
    """Cuts each batch into the replicas' shares, one after the other; of them those of one host.

    Args:
        dataset: From `padded`.
        replicas: On all hosts.
        pipeline: Index of the host.
        pipelines: Number of hosts.
    """
    own = replicas // pipelines

    def cut(*element: Any) -> Any:
        def one(leaf: Any) -> Any:
            if not tf.is_tensor(leaf):
                return leaf
            parts = tf.reshape(leaf, [replicas, leaf.shape[0] // replicas, *leaf.shape[1:]])
            return parts[pipeline * own : (pipeline + 1) * own]

        return tf.nest.map_structure(one, element)

    return dataset.map(cut).unbatch().prefetch(tf.data.AUTOTUNE)


def batch_size_of(dataset: tf.data.Dataset) -> tuple[int | None, bool]:
    """Returns how many examples a full batch has, `None` if the data set doesn't tell, and if all are full.

    It is not iterated over: that would make another epoch of it.
    """
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape.rank and first.shape[0] is not None:
        return int(first.shape[0]), True
    stage = tf_compat.last_stage(dataset)
    while stage.kind in ("map", "repeat", "prefetch", "options"):
        stage = tf_compat.last_stage(stage.input)
    size = tf.get_static_value(stage.arguments["batch_size"]) if stage.kind == "batch" else None
    return (None if size is None else int(size)), False


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


def unknown_size(dataset: tf.data.Dataset) -> NotSupportedError:
    """Returns the error for a data set whose batches have a size that isn't known beforehand."""
    return NotSupportedError(
        "A TPU needs batches of a size that is known beforehand.",
        f"{type(dataset).__name__.strip('_')} with {dataset.element_spec}",
        "End the data set in `.batch(n)` or `.batch(n, drop_remainder=True)`; of a Python generator make one by "
        "tf.data.Dataset.from_generator first.",
    )
