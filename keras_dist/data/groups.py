"""`batch="per_replica"`: a global batch is made of as many batches of the script as there are ranks.

An epoch has the same examples as in one process, each once. If the number of its batches is not a multiple of the
number of ranks, the last step has fewer batches, and some ranks have an empty share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.data import sources
from keras_dist.data.comparison import with_fingerprints
from keras_dist.data.fingerprint import fingerprint_of
from keras_dist.data.shares import Share, Shares, repack, row_count

_no_autograph = tf.autograph.experimental.do_not_convert


class Group(NamedTuple):
    """The batches of one step.

    Args:
        batches: A batch for each rank. In an incomplete group the first ones are from the step before.
        counts: int32 tensor of shape `(size,)`, the number of examples in each batch; 0 if it is from the step before.
        fingerprint: float32 scalar, a hash of the batches of this step.
    """

    batches: tuple[Any, ...]
    counts: Any
    fingerprint: Any

    def share(self, rank: int) -> Share:
        return Share(self.batches[rank], self.counts[rank], tf.reduce_sum(self.counts), self.fingerprint)


def number_of_steps(batches: int, size: int, batches_per_epoch: int | None = None) -> int:
    """Returns the number of steps for a number of batches. A step has batches of one epoch only.

    Example:

    >>> number_of_steps(10, 4), number_of_steps(10, 4, batches_per_epoch=5)
    (3, 4)
    """
    epochs, rest = divmod(batches, batches_per_epoch) if batches_per_epoch else (0, batches)
    return epochs * -(-(batches_per_epoch or 0) // size) + -(-rest // size)


def group_batches(
    dataset: tf.data.Dataset, mode: str, backend: Backend, batches_per_epoch: int | None
) -> tf.data.Dataset:
    """Turns a dataset of the script's batches into a dataset of this rank's shares.

    Args:
        dataset: Batches.
        mode: `"split"` or `"chief"`, see `sources.MODES`.
        backend: The backend.
        batches_per_epoch: After this number of batches a step ends, complete or not. `None`: only after the last one.
    """
    return _MODES[mode](dataset, backend, batches_per_epoch)


def group_for_replicas(dataset: tf.data.Dataset, size: int, batches_per_epoch: int | None) -> tf.data.Dataset:
    """Turns a dataset of the script's batches into a dataset of the shares of this process's replicas."""

    @_no_autograph
    def shares(group: Group) -> Shares:
        return Shares(tuple(group.share(index) for index in range(size)))

    groups = _groups(dataset, size, batches_per_epoch)
    return groups.map(shares, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _split(dataset: tf.data.Dataset, backend: Backend, batches_per_epoch: int | None) -> tf.data.Dataset:
    @_no_autograph
    def share(group: Group) -> Share:
        return group.share(backend.topology.rank)

    groups = _groups(dataset, backend.topology.size, batches_per_epoch)
    return groups.map(share, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _from_chief(dataset: tf.data.Dataset, backend: Backend, batches_per_epoch: int | None) -> tf.data.Dataset:
    size = backend.topology.size

    @_no_autograph
    def pack(group: Group) -> tuple[Any, Any]:
        return sources.pack_shares([group.share(rank) for rank in range(size)])

    packed = _groups(dataset, size, batches_per_epoch).map(pack, tf.data.AUTOTUNE, deterministic=True)
    return sources.receive_from_chief(packed.prefetch(tf.data.AUTOTUNE), sources.batch_spec(dataset), backend)


_MODES: dict[str, Callable[[tf.data.Dataset, Backend, int | None], tf.data.Dataset]] = {
    "split": _split,
    "chief": _from_chief,
}


def _groups(dataset: tf.data.Dataset, size: int, batches_per_epoch: int | None) -> tf.data.Dataset:
    """Returns a dataset of `Group`s. The batches are not copied."""
    spec, length = sources.batch_spec(dataset), batches_per_epoch or tf.int64.max
    empty = tuple(sources.flatten(sources.empty_share(spec).data)), tf.constant(0), tf.constant(0.0)

    @_no_autograph
    def describe(*batch: Any) -> Any:
        whole = repack(dataset, batch)
        return describe_pair(whole, fingerprint_of(whole))

    @_no_autograph
    def describe_pair(whole: Any, fingerprint: Any) -> Any:
        return tuple(sources.flatten(whole)), row_count(whole), fingerprint

    @_no_autograph
    def add_batch(state: Any, batch: Any) -> Any:
        """Adds a batch to the last `size` batches. A step is complete when all of them are new, or the epoch ends."""
        position, batches, counts, fingerprints = state
        tensors, count, fingerprint = batch
        batches = (*batches[1:], tensors)
        counts = tf.concat([counts[1:], count[None]], 0)
        fingerprints = tf.concat([fingerprints[1:], fingerprint[None]], 0)
        new = tf.cast(position % length % size, tf.int32) + 1
        is_new = tf.range(size) >= size - new
        group = batches, tf.where(is_new, counts, 0), fingerprint_of(tf.where(is_new, fingerprints, 0.0))
        is_complete = (new == size) | (position % length == length - 1)
        return (position + 1, batches, counts, fingerprints), (is_complete & (tf.reduce_sum(group[1]) > 0), *group)

    @_no_autograph
    def is_complete(complete: Any, *_: Any) -> Any:
        return complete

    @_no_autograph
    def as_group(_: Any, batches: Any, counts: Any, fingerprint: Any) -> Group:
        return Group(tuple(sources.unflatten(spec, tensors) for tensors in batches), counts, fingerprint)

    # Empty batches complete the last step.
    pairs = with_fingerprints(dataset)
    described = (dataset, describe) if pairs is None else (pairs, describe_pair)
    batches = described[0].map(described[1], tf.data.AUTOTUNE, deterministic=True)
    batches = batches.concatenate(tf.data.Dataset.from_tensors(empty).repeat(size - 1))
    start = tf.constant(0, tf.int64), (empty[0],) * size, tf.zeros([size], tf.int32), tf.zeros([size])
    return batches.scan(start, add_batch).filter(is_complete).map(as_group)
