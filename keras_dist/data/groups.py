"""`batch="per_replica"`: as many batches of the script as there are ranks make one global batch, each rank takes one.

An epoch has the same examples as in one process, each once; where the batches of an epoch are no multiple of the ranks,
its last step has fewer of them, and some ranks an empty share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.data import sources
from keras_dist.data.fingerprint import fingerprint_of
from keras_dist.data.shares import Share, Shares, repack, row_count

_as_written = tf.autograph.experimental.do_not_convert


class Group(NamedTuple):
    """What one step of all ranks is about.

    Args:
        batches: One for each rank. Where there are not enough of them, the first are left over from the step before.
        counts: int32 of shape `(size,)`, the number of examples of each; 0 for one that is left over.
        fingerprint: float32 scalar, a hash of all that count.
    """

    batches: tuple[Any, ...]
    counts: Any
    fingerprint: Any

    def share(self, rank: int) -> Share:
        """Returns what a rank gets."""
        return Share(self.batches[rank], self.counts[rank], tf.reduce_sum(self.counts), self.fingerprint)


def number_of_steps(batches: int, size: int, batches_per_epoch: int | None = None) -> int:
    """Returns how many steps so many batches are. A step has batches of one epoch only.

    Example:

    >>> number_of_steps(10, 4), number_of_steps(10, 4, batches_per_epoch=5)
    (3, 4)
    """
    epochs, rest = divmod(batches, batches_per_epoch) if batches_per_epoch else (0, batches)
    return epochs * -(-(batches_per_epoch or 0) // size) + -(-rest // size)


def in_groups(dataset: tf.data.Dataset, mode: str, backend: Backend, batches_per_epoch: int | None) -> tf.data.Dataset:
    """Turns a data set of the script's batches into one of this rank's shares, in steps of one batch for each rank.

    Args:
        dataset: Batches.
        mode: `"split"` or `"chief"`, see `sources.MODES`.
        backend: How the ranks talk.
        batches_per_epoch: After so many batches a step is complete, however few it has; `None`: at the end only.
    """
    return _MODES[mode](dataset, backend, batches_per_epoch)


def in_groups_of_shares(dataset: tf.data.Dataset, size: int, batches_per_epoch: int | None) -> tf.data.Dataset:
    """Turns a data set of the script's batches into one of the shares of all replicas of this process."""

    @_as_written
    def shares(group: Group) -> Shares:
        return Shares(tuple(group.share(index) for index in range(size)))

    groups = _groups(dataset, size, batches_per_epoch)
    return groups.map(shares, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _split(dataset: tf.data.Dataset, backend: Backend, batches_per_epoch: int | None) -> tf.data.Dataset:
    @_as_written
    def own(group: Group) -> Share:
        return group.share(backend.topology.rank)

    groups = _groups(dataset, backend.topology.size, batches_per_epoch)
    return groups.map(own, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _from_chief(dataset: tf.data.Dataset, backend: Backend, batches_per_epoch: int | None) -> tf.data.Dataset:
    size = backend.topology.size

    @_as_written
    def cut(group: Group) -> tuple[Any, Any]:
        return sources.in_parts([group.share(rank) for rank in range(size)])

    parts = _groups(dataset, size, batches_per_epoch).map(cut, tf.data.AUTOTUNE, deterministic=True)
    return sources.sent_by_chief(parts, sources.batch_spec(dataset), backend)


_MODES: dict[str, Callable[[tf.data.Dataset, Backend, int | None], tf.data.Dataset]] = {
    "split": _split,
    "chief": _from_chief,
}


def _groups(dataset: tf.data.Dataset, size: int, batches_per_epoch: int | None) -> tf.data.Dataset:
    """Returns a data set of `Group`s. The batches are passed on, not copied."""
    spec, length = sources.batch_spec(dataset), batches_per_epoch or tf.int64.max
    nothing = tuple(sources.tensors_of(sources.empty_share(spec).data)), tf.constant(0), tf.constant(0.0)

    @_as_written
    def noted(*batch: Any) -> Any:
        whole = repack(dataset, batch)
        return tuple(sources.tensors_of(whole)), row_count(whole), fingerprint_of(whole)

    @_as_written
    def with_next(state: Any, batch: Any) -> Any:
        """The state is the last `size` batches. A step is complete when all of them are new, or its epoch ends."""
        place, batches, counts, fingerprints = state
        tensors, count, fingerprint = batch
        batches = (*batches[1:], tensors)
        counts = tf.concat([counts[1:], count[None]], 0)
        fingerprints = tf.concat([fingerprints[1:], fingerprint[None]], 0)
        new = tf.cast(place % length % size, tf.int32) + 1
        is_new = tf.range(size) >= size - new
        group = batches, tf.where(is_new, counts, 0), fingerprint_of(tf.where(is_new, fingerprints, 0.0))
        is_complete = (new == size) | (place % length == length - 1)
        return (place + 1, batches, counts, fingerprints), (is_complete & (tf.reduce_sum(group[1]) > 0), *group)

    @_as_written
    def is_complete(complete: Any, *_: Any) -> Any:
        return complete

    @_as_written
    def as_group(_: Any, batches: Any, counts: Any, fingerprint: Any) -> Group:
        return Group(tuple(sources.put_together(spec, tensors) for tensors in batches), counts, fingerprint)

    # The last step is filled up with batches of nothing.
    batches = dataset.map(noted, tf.data.AUTOTUNE, deterministic=True)
    batches = batches.concatenate(tf.data.Dataset.from_tensors(nothing).repeat(size - 1))
    start = tf.constant(0, tf.int64), (nothing[0],) * size, tf.zeros([size], tf.int32), tf.zeros([size])
    return batches.scan(start, with_next).filter(is_complete).map(as_group)
