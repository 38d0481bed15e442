"""Where a rank's data come from: its part of a stream that all read, the chief, or a stream of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.data import wire
from keras_dist.data.shares import Share, Shares, any_number, repack, row_count, shard_dataset, take_share, take_shares
from keras_dist.errors import ConfigurationError

# Every data set talks under a name of its own: that of training may be read ahead while validation runs.
_numbers = itertools.count()
_as_written = tf.autograph.experimental.do_not_convert


def split(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Every rank reads the same stream and keeps its part of each batch."""
    topology = backend.topology
    return shard_dataset(dataset, topology.rank, topology.size)


def in_shares(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Turns a data set of batches into one of the shares of all replicas of this process."""

    @_as_written
    def cut(*batch: Any) -> Shares:
        return take_shares(repack(dataset, batch), size)

    return dataset.map(cut, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def from_chief(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """The chief reads, cuts and sends; the others receive their shares. Their own stream is never opened."""
    size = backend.topology.size

    @_as_written
    def cut(*batch: Any) -> tuple[Any, Any]:
        whole = repack(dataset, batch)
        return in_parts([take_share(whole, rank, size) for rank in range(size)])

    return sent_by_chief(dataset.map(cut, tf.data.AUTOTUNE, deterministic=True), batch_spec(dataset), backend)


def sent_by_chief(parts: tf.data.Dataset, spec: Any, backend: Backend) -> tf.data.Dataset:
    """Returns a data set of this rank's shares, which the chief sends.

    The parts travel as bytes, so batches may have any structure, dtype and shape. Nothing is read ahead behind
    the sending, so that at any step all ranks have taken part in the same sendings.

    Args:
        parts: What `in_parts` has made of each step. Only the chief's is iterated over.
        spec: The specification of a share's data.
        backend: How the ranks talk.
    """
    name = f"keras_dist_batch_{next(_numbers)}"
    size = backend.topology.size

    @_as_written
    def receive(payload: Any, lengths: Any) -> Any:
        return backend.scatter(payload, lengths, name)

    @_as_written
    def is_part(payload: Any) -> Any:
        return tf.size(payload) > 0  # a part always has some bytes; none at all is the end of the chief's stream

    @_as_written
    def parse(payload: Any) -> Share:
        return _parse(payload, spec)

    nothing = tf.data.Dataset.from_tensors((tf.zeros([0], tf.uint8), tf.zeros([size], tf.int32)))
    sent = parts.prefetch(tf.data.AUTOTUNE).concatenate(nothing) if backend.topology.is_chief else nothing.repeat()
    return sent.map(receive).take_while(is_part).map(parse).with_options(_never_ahead())


def own(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Each rank's stream is its part. One that ends early takes part with empty shares until all have ended."""
    name = f"keras_dist_count_{next(_numbers)}"

    @_as_written
    def share(*batch: Any) -> Share:
        whole = repack(dataset, batch)
        count = row_count(whole)
        return Share(whole, count, count, tf.constant(0.0))

    @_as_written
    def with_total(share: Share) -> Share:
        total = backend.all_reduce_exact(tf.cast(share.count, tf.float64), name)
        return share._replace(total=tf.cast(total, tf.int32))

    @_as_written
    def anybody_has_data(share: Share) -> Any:
        return share.total > 0

    shares = dataset.map(share, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
    shares = shares.concatenate(tf.data.Dataset.from_tensors(empty_share(batch_spec(dataset))).repeat())
    options = _never_ahead()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return shares.map(with_total).take_while(anybody_has_data).with_options(options)


def _never_ahead() -> tf.data.Options:
    """Keeps tf.data from reading ahead by itself: a rank that is in one more collective than the others hangs."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def is_own(dataset: tf.data.Dataset) -> bool:
    """True if the user says that this data set is a rank's own part: `AutoShardPolicy.OFF`."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


MODES: dict[str, Callable[[tf.data.Dataset, Backend], tf.data.Dataset]] = {
    "split": split,
    "chief": from_chief,
    "sharded": own,
}


def check_source(source: Any) -> None:
    """Raises `ConfigurationError` for what `kd.shard` can't take."""
    if not isinstance(source, tf.data.Dataset) and not callable(source):
        raise ConfigurationError(
            "kd.shard() takes a tf.data.Dataset or a function that returns one.",
            f"{type(source).__name__}",
            "Make a data set of it: tf.data.Dataset.from_tensor_slices((x, y)).batch(32).",
        )


def batch_spec(dataset: tf.data.Dataset) -> Any:
    """The specification of a part of a batch."""
    return tf.nest.map_structure(any_number, dataset.element_spec)


# --- Parts as tensors and as bytes ---


def tensors_of(structure: Any) -> list[Any]:
    """Returns the plain tensors that a structure, or its specification, is made of."""
    return list(tf.nest.flatten([leaf for leaf in tf.nest.flatten(structure) if not _is_none(leaf)], True))


def put_together(spec: Any, tensors: Any) -> Any:
    """Returns the structure whose `tensors_of` these are."""
    parts = tf.nest.flatten(spec)
    leaves = iter(tf.nest.pack_sequence_as([part for part in parts if not _is_none(part)], tensors, True))
    return tf.nest.pack_sequence_as(spec, [_nothing() if _is_none(part) else next(leaves) for part in parts])


def in_parts(shares: Sequence[Share]) -> tuple[Any, Any]:
    """Returns the shares of all ranks as bytes behind one another, and the length of each."""
    payloads = [wire.pack(tensors_of(share)) for share in shares]
    return tf.concat(payloads, 0), tf.stack([tf.size(payload) for payload in payloads])


def _parse(payload: Any, spec: Any) -> Share:
    share_spec = Share(spec, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float32))
    share: Share = put_together(share_spec, wire.unpack(payload, tensors_of(share_spec)))
    return share


def _is_none(leaf: Any) -> bool:
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def _nothing() -> Any:
    """What Keras makes of a `None` that a generator yields."""
    return tf.experimental.Optional.empty(None)


def empty_share(spec: Any) -> Share:
    """One example that counts nothing, for a rank whose stream has ended: no layer ever sees an empty batch."""

    def example(part: Any) -> Any:
        if isinstance(part, tf.TensorSpec):
            shape = [1 if length is None else length for length in part.shape]
            return tf.zeros(shape, part.dtype)
        if isinstance(part, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_splits(
                tf.zeros([0, *[1 if n is None else n for n in part.shape[2:]]], part.dtype),
                tf.constant([0, 0], part.row_splits_dtype),
            )
        if isinstance(part, tf.SparseTensorSpec):
            shape = [1 if length is None else length for length in part.shape]
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], part.dtype), shape)
        return _nothing() if isinstance(part, tf.OptionalSpec) else part

    zero = tf.constant(0)
    return Share(tf.nest.map_structure(example, spec), zero, zero, tf.constant(0.0))
