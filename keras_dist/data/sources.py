"""Where a rank's data come from: a stream that all ranks read, the chief, or the rank's own shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.data import wire
from keras_dist.data.shares import (
    Share,
    Shares,
    any_batch_size,
    map_batches,
    repack,
    row_count,
    shard_dataset,
    take_share,
    take_shares,
)
from keras_dist.errors import ConfigurationError

# The collectives of each dataset have unique names: training data may be prefetched while validation runs.
_numbers = itertools.count()
_no_autograph = tf.autograph.experimental.do_not_convert


def split(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Every rank reads the same stream and keeps its share of each batch."""
    topology = backend.topology

    def agrees(digest: str | None) -> bool:
        if not tf.executing_eagerly():
            return False
        digests = backend.all_gather_object("the functions of the dataset", digest)
        return all(other == digests[0] for other in digests)

    return shard_dataset(dataset, topology.rank, topology.size, agrees)


def split_for_replicas(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Turns a dataset of batches into a dataset of the shares of this process's replicas."""

    @_no_autograph
    def cut(*batch: Any) -> Shares:
        return take_shares(repack(dataset, batch), size)

    return map_batches(dataset, cut)


def from_chief(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """The chief reads, cuts and scatters. The other ranks receive their shares and never open their own stream."""
    size = backend.topology.size

    @_no_autograph
    def pack(*batch: Any) -> tuple[Any, Any]:
        whole = repack(dataset, batch)
        return pack_shares([take_share(whole, rank, size) for rank in range(size)])

    return receive_from_chief(map_batches(dataset, pack), batch_spec(dataset), backend)


def receive_from_chief(packed: tf.data.Dataset, spec: Any, backend: Backend) -> tf.data.Dataset:
    """Returns a dataset of this rank's shares, which the chief scatters.

    They are sent as bytes, so batches may have any structure, dtype and shape. Nothing is prefetched after the
    scatter, so at any step all ranks have taken part in the same collectives.

    Args:
        packed: Dataset with the result of `pack_shares` for each step. Only the chief iterates over it.
        spec: The specification of a share's data.
        backend: The backend.
    """
    name = f"keras_dist_batch_{next(_numbers)}"
    size = backend.topology.size

    @_no_autograph
    def receive(payload: Any, lengths: Any) -> Any:
        return backend.scatter(payload, lengths, name)

    @_no_autograph
    def is_share(payload: Any) -> Any:
        return tf.size(payload) > 0  # no bytes mean that the chief's stream has ended

    @_no_autograph
    def parse(payload: Any) -> Share:
        return _parse(payload, spec)

    empty = tf.data.Dataset.from_tensors((tf.zeros([0], tf.uint8), tf.zeros([size], tf.int32)))
    sent = packed.concatenate(empty) if backend.topology.is_chief else empty.repeat()
    return sent.map(receive).take_while(is_share).map(parse).with_options(_without_prefetch())


def sharded(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Each rank reads its own shard. After its end the rank has empty shares until all ranks have ended."""
    name = f"keras_dist_count_{next(_numbers)}"

    @_no_autograph
    def share(*batch: Any) -> Share:
        whole = repack(dataset, batch)
        count = row_count(whole)
        return Share(whole, count, count, tf.constant(0.0))

    @_no_autograph
    def with_total(share: Share) -> Share:
        total = backend.all_reduce_exact(tf.cast(share.count, tf.float64), name)
        return share._replace(total=tf.cast(total, tf.int32))

    @_no_autograph
    def has_examples(share: Share) -> Any:
        return share.total > 0

    shares = dataset.map(share, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
    shares = shares.concatenate(tf.data.Dataset.from_tensors(empty_share(batch_spec(dataset))).repeat())
    options = _without_prefetch()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return shares.map(with_total).take_while(has_examples).with_options(options)


def _without_prefetch() -> tf.data.Options:
    """Keeps tf.data from prefetching by itself: a rank that starts one more collective than the others hangs."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def is_sharded(dataset: tf.data.Dataset) -> bool:
    """True if the dataset is marked as a rank's own shard, by `AutoShardPolicy.OFF`."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


MODES: dict[str, Callable[[tf.data.Dataset, Backend], tf.data.Dataset]] = {
    "split": split,
    "chief": from_chief,
    "sharded": sharded,
}


def check_source(source: Any) -> None:
    """Raises `ConfigurationError` if `kd.shard` cannot take `source`."""
    if not isinstance(source, tf.data.Dataset) and not callable(source):
        raise ConfigurationError(
            "kd.shard() takes a tf.data.Dataset or a function that returns one.",
            f"{type(source).__name__}",
            "Convert it to a dataset: tf.data.Dataset.from_tensor_slices((x, y)).batch(32).",
        )


def batch_spec(dataset: tf.data.Dataset) -> Any:
    """Returns the specification of the dataset's batches, with any batch size."""
    return tf.nest.map_structure(any_batch_size, dataset.element_spec)


# --- Shares as tensors and as bytes ---


def flatten(structure: Any) -> list[Any]:
    """Returns the plain tensors of a structure, or the specifications of a structure of these."""
    return list(tf.nest.flatten([leaf for leaf in tf.nest.flatten(structure) if not _is_none(leaf)], True))


def unflatten(spec: Any, tensors: Any) -> Any:
    """Returns the structure with these tensors, the inverse of `flatten`."""
    parts = tf.nest.flatten(spec)
    leaves = iter(tf.nest.pack_sequence_as([part for part in parts if not _is_none(part)], tensors, True))
    return tf.nest.pack_sequence_as(spec, [_nothing() if _is_none(part) else next(leaves) for part in parts])


def pack_shares(shares: Sequence[Share]) -> tuple[Any, Any]:
    """Returns the shares of all ranks as concatenated bytes, and the length of each."""
    payloads = [wire.pack(flatten(share)) for share in shares]
    return tf.concat(payloads, 0), tf.stack([tf.size(payload) for payload in payloads])


def _parse(payload: Any, spec: Any) -> Share:
    integer, real, boolean = (tf.TensorSpec([], dtype) for dtype in (tf.int32, tf.float32, tf.bool))
    share_spec = Share(spec, integer, integer, real, boolean)
    share: Share = unflatten(share_spec, wire.unpack(payload, flatten(share_spec)))
    return share


def _is_none(leaf: Any) -> bool:
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def _nothing() -> Any:
    """Returns what Keras turns a `None` of a generator into."""
    return tf.experimental.Optional.empty(None)


def empty_share(spec: Any) -> Share:
    """Returns an empty share, with one example as a placeholder: no layer ever sees an empty batch."""

    def example(part: Any) -> Any:
        if isinstance(part, tf.OptionalSpec):
            return _nothing()
        shape = [1 if length is None else length for length in getattr(part, "shape", ())]
        if isinstance(part, tf.TensorSpec):
            return tf.zeros(shape, part.dtype)
        if isinstance(part, tf.RaggedTensorSpec):
            values, splits = tf.zeros([0, *shape[2:]], part.dtype), tf.constant([0, 0], part.row_splits_dtype)
            return tf.RaggedTensor.from_row_splits(values, splits)
        if isinstance(part, tf.SparseTensorSpec):
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], part.dtype), shape)
        return part

    zero = tf.constant(0)
    return Share(tf.nest.map_structure(example, spec), zero, zero, tf.constant(0.0))
