"""Shards of the data that workers read themselves: how far each was given out, and what a worker has open.

When a worker is lost, another worker, or the same one after its return, reads its shard on from where it was left.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.source import DatasetFunction
from keras_dist.backends.parameter_server.steps import RemoteSteps
from keras_dist.logging import logger

_KEPT = 2  # batches of a shard: that of the step which runs, and the next one


class Shard:
    """What one worker reads in one pass over the data.

    Args:
        source: Makes the dataset.
        index: Of the worker who reads it unless that is lost.
        epoch: Number of the pass; each shuffles anew.
    """

    def __init__(self, source: DatasetFunction, index: int, epoch: int) -> None:
        self.source = source
        self.index = index
        self.epoch = epoch
        self.has_ended = False
        self._given_out = 0
        self._reader: int | None = None  # another worker, if that of this index is lost

    def next_batch(self, count: int = 1) -> ShardBatch:
        """Returns the next batches that weren't given out."""
        self._given_out += count
        return ShardBatch(self, self._given_out - count, count)

    def is_for(self, worker: int, lost: Collection[int]) -> bool:
        """True if a worker may read on: the one of this index, or, while that is lost, whoever has begun to."""
        reader = self._reader if self.index in lost else self.index
        return reader in (None, worker) or reader in lost

    def note_reader(self, worker: int, number: int) -> None:
        """Notes which worker is about to read a batch."""
        if worker != (self.index if self._reader is None else self._reader):
            logger().warning("worker %d reads the part of worker %d, from batch %d on.", worker, self.index, number)
        self._reader = worker


@dataclasses.dataclass(frozen=True, eq=False)
class ShardBatch:
    """Names a batch that a worker reads, or several in a row.

    Args:
        shard: Its shard.
        number: Of the first batch in the shard.
        count: How many there are.
    """

    shard: Shard
    number: int
    count: int = 1


class ShardReader:
    """Reads batches of shards. Only its worker's thread may hold its handles: to drop one it calls the worker."""

    def __init__(self) -> None:
        self._datasets: dict[weakref.ref[DatasetFunction], dict[int, _Reshuffled]] = {}
        self._open: dict[weakref.ref[Shard], _OpenShard] = {}

    def run(self, batch: ShardBatch, function: Callable[..., Any] | None, args: Any, runs: int = 1) -> Any:
        """Runs a function on a batch, on the current device. `RemoteSteps` get the iterator.

        Args:
            batch: The batch.
            function: The function.
            args: Its other arguments.
            runs: How often it was run for this batch, with this time.

        Returns:
            What it returned; the number of examples if there is no function, or none of them; `None` after the last
            batch of the shard.
        """
        try:
            if isinstance(function, RemoteSteps):
                return function(self._opened(batch).at(batch), runs, batch.count, *args)
            data, count = self._opened(batch).read(batch.number)
        except tf.errors.OutOfRangeError:
            return None
        return function(data, *args) if function is not None and count else count

    def _opened(self, batch: ShardBatch) -> _OpenShard:
        self._drop_unused()
        key = weakref.ref(batch.shard)
        if key not in self._open or not self._open[key].can_read(batch.number):
            self._open.pop(key, None)
            self._open[key] = _OpenShard(batch.shard.source, self._iterator(batch), batch.number)
        return self._open[key]

    def _iterator(self, batch: ShardBatch) -> Any:
        shard = batch.shard
        datasets = self._datasets.setdefault(weakref.ref(shard.source), {})
        dataset = datasets.get(shard.index)
        if dataset is None or dataset.epochs > shard.epoch:
            dataset = datasets[shard.index] = _Reshuffled(shard.source.dataset(shard.index))
        return dataset.iterator(shard.epoch, batch.number)

    def clear(self) -> None:
        """Drops all."""
        self._datasets.clear()
        self._open.clear()

    def _drop_unused(self) -> None:
        for shard in [key for key in self._open if key() is None]:
            del self._open[shard]
        for source in [key for key in self._datasets if key() is None]:
            del self._datasets[source]


class _Reshuffled:
    """A dataset whose n-th epoch has the order of the n-th epoch wherever it is made."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self.epochs = 0

    def iterator(self, epoch: int, skipped: int) -> Any:
        while self.epochs < epoch:
            iter(self._dataset)  # draws what that epoch is shuffled by
            self.epochs += 1
        self.epochs += 1
        return iter(self._dataset.skip(skipped) if skipped else self._dataset)


class _OpenShard:
    """An iterator over a shard, and the last batches that it gave."""

    def __init__(self, source: DatasetFunction, iterator: Any, number: int) -> None:
        self._next = source.next
        self._iterator = iterator
        self._number = number  # of the iterator's next batch
        self._kept: dict[int, tuple[Any, int]] = {}

    def can_read(self, number: int) -> bool:
        return number in self._kept or number >= self._number

    def at(self, batch: ShardBatch) -> Any:
        """Returns the iterator, whose next batches are these: the caller takes them."""
        while self._number < batch.number:
            self._next(self._iterator)
            self._number += 1
        self._number += batch.count
        return self._iterator

    def read(self, number: int) -> tuple[Any, int]:
        while number not in self._kept:
            data, count = self._next(self._iterator)
            self._kept[self._number] = data, int(count)
            self._number += 1
            self._kept.pop(self._number - 1 - _KEPT, None)
        return self._kept[number]
