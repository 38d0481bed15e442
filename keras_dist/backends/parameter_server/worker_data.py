"""Data that workers read themselves: the parts, and what is open on a worker.

A part is read again from where it was, when its worker is lost: by another worker, or by the one that returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import tensorflow as tf

from keras_dist.logging import logger

END = "end"  # what a job gives whose part has no such batch
_KEPT = 2  # batches of a part: that of the step which runs, and the next one


class Source(Protocol):
    """Data sets for all workers."""

    @property
    def next(self) -> Callable[[Any], tuple[Any, Any]]:
        """Takes an iterator, and returns its next batch and the number of examples in it."""

    def dataset(self, part: int) -> tf.data.Dataset:
        """Makes the data set of a part on the current device, always the same."""


class Part:
    """What one worker reads in one pass over the data.

    Args:
        source: The data.
        home: Index of the worker, as long as it is there.
        number: Of the pass; each shuffles anew.
    """

    def __init__(self, source: Source, home: int, number: int) -> None:
        self.source = source
        self.home = home
        self.number = number
        self.holder: int | None = None  # who reads it, if its worker is lost

    def is_for(self, worker: int, lost: Collection[int]) -> bool:
        """True if a worker may read on in it: its home, or while that is lost whoever has begun to."""
        reader = self.holder if self.home in lost else self.home
        return reader in (None, worker) or reader in lost


class Batch:
    """A batch that a worker reads.

    Args:
        part: Where.
        place: Its place in the part.
    """

    def __init__(self, part: Part, place: int) -> None:
        self.part = part
        self.place = place

    def note_reader(self, worker: int) -> None:
        """Notes who is about to read it."""
        part = self.part
        if worker != (part.home if part.holder is None else part.holder):
            logger().warning("worker %d reads the part of worker %d, from batch %d on.", worker, part.home, self.place)
        part.holder = worker


class Held:
    """What is open on a worker. It is its thread's alone: who drops a handle talks to the worker, which may hang."""

    def __init__(self) -> None:
        self._datasets: dict[weakref.ref[Source], dict[int, _Reshuffled]] = {}
        self._open: dict[weakref.ref[Part], _Open] = {}

    def run(self, batch: Batch, function: Callable[..., Any] | None, args: Any) -> Any:
        """Runs a function on a batch, on the current device.

        Returns:
            What it returned; the number of examples if there is no function, or none of them; `END` after the last
            batch of the part.
        """
        try:
            data, count = self._read(batch)
        except tf.errors.OutOfRangeError:
            return END
        return function(data, *args) if function is not None and count else count

    def _read(self, batch: Batch) -> tuple[Any, int]:
        self._drop_unused()
        key = weakref.ref(batch.part)
        if key not in self._open or not self._open[key].can_read(batch.place):
            self._open.pop(key, None)
            self._open[key] = _Open(batch.part.source, self._iterator(batch), batch.place)
        return self._open[key].read(batch.place)

    def _iterator(self, batch: Batch) -> Any:
        part = batch.part
        key, home = weakref.ref(part.source), part.home
        dataset = self._datasets.setdefault(key, {}).get(home)
        if dataset is None or dataset.passes > part.number:
            dataset = self._datasets[key][home] = _Reshuffled(part.source.dataset(home))
        return dataset.iterator(part.number, batch.place)

    def clear(self) -> None:
        """Drops all."""
        self._datasets.clear()
        self._open.clear()

    def _drop_unused(self) -> None:
        for part in [key for key in self._open if key() is None]:
            del self._open[part]
        for source in [key for key in self._datasets if key() is None]:
            del self._datasets[source]


class _Reshuffled:
    """A data set of which the n-th pass has the order of the n-th pass, wherever it is made."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self.passes = 0

    def iterator(self, number: int, place: int) -> Any:
        while self.passes < number:
            iter(self._dataset)  # draws what that pass is shuffled by
            self.passes += 1
        self.passes += 1
        return iter(self._dataset.skip(place) if place else self._dataset)


class _Open:
    """An iterator, and the last batches that it gave."""

    def __init__(self, source: Source, iterator: Any, place: int) -> None:
        self._next = source.next
        self._iterator = iterator
        self._place = place
        self._kept: dict[int, tuple[Any, int]] = {}

    def can_read(self, place: int) -> bool:
        return place in self._kept or place >= self._place

    def read(self, place: int) -> tuple[Any, int]:
        while place not in self._kept:
            data, count = self._next(self._iterator)
            self._kept[self._place] = data, int(count)
            self._place += 1
            self._kept.pop(self._place - 1 - _KEPT, None)
        return self._kept[place]
