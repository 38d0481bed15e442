"""What `kd.shard` makes of a data set function: data that Keras trains on, and workers read."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_dist.backends.parameter_server.batches import Share
from keras_dist.backends.parameter_server.source import Function, FunctionSource, current_context
from keras_dist.backends.parameter_server.worker_data import END, Batch, Part
from keras_dist.compat import keras_placement
from keras_dist.compat.keras_fit import distributed_dataset, set_dataset
from keras_dist.compat.keras_model import attach
from keras_dist.data import shares as data
from keras_dist.data.sources import check_source
from keras_dist.errors import NotSupportedError

if TYPE_CHECKING:
    from keras_dist.backends.parameter_server.backend import ParameterServer

_DATA = "_keras_dist_on_workers"


def shard(source: Any, backend: ParameterServer) -> Any:
    """See `kd.shard`. Returns `None` for a data set of this process, which is for a loop of its own."""
    check_source(source)
    context = current_context()
    if context is None:
        return None if isinstance(source, tf.data.Dataset) else OnWorkers(source, backend)
    if not isinstance(source, tf.data.Dataset):
        return source(context)
    # Some of these may be empty: that is, too, what the other workers' counts are put together with.
    return data.shard_dataset(source, context.input_pipeline_id, context.num_input_pipelines).map(data.examples_of)


class OnWorkers:
    """Data that the workers read: `fit`, `evaluate` and `validation_data` take them.

    Args:
        function: Returns the data set of a worker.
        backend: Whose workers.
    """

    def __init__(self, function: Function, backend: ParameterServer) -> None:
        size = backend.workers.size
        self._function = function
        self._backend = backend
        # A step takes one batch of each worker, or of one.
        self._source = FunctionSource(function, size, size if backend.mode == "sync" else 1)

    @property
    def element_spec(self) -> Any:
        """What a batch looks like."""
        return self._source.element_spec

    def __iter__(self) -> Iterator[Any]:
        raise _never_here()

    def weighted(self, class_weight: dict[int, float] | None) -> OnWorkers:
        """Returns data whose examples have the weights of their classes."""
        if class_weight is None:
            return self
        function = self._function
        return OnWorkers(lambda context: keras_placement.weighted(function(context), class_weight), self._backend)

    def stand_in(self) -> tf.data.Dataset:
        """Returns a data set that Keras takes; `exchange` puts these data in its place."""
        nothing = tf.data.Dataset.from_generator(lambda: iter(self), output_signature=tf.TensorSpec([None]))
        attach(nothing, _DATA, self)
        return nothing

    def begin(self, limit: int | None) -> Pass:
        """Begins a pass over the data."""
        return Pass(self._source.parts(), self.element_spec, limit)


def _never_here() -> NotSupportedError:
    return NotSupportedError(
        "What workers read is for `fit`, `evaluate` and `validation_data`; this process never sees it.",
        "a loop over kd.shard(function), or predict",
        "Pass the data set itself: then this process reads it, for all workers.",
    )


def is_stand_in(dataset: Any) -> bool:
    """True if Keras was given this data set in the place of what workers read."""
    return getattr(dataset, _DATA, None) is not None


def exchange(epoch_iterator: Any) -> None:
    """Makes Keras iterate over what the workers read, where it was given a stand-in."""
    on_workers = getattr(distributed_dataset(epoch_iterator), _DATA, None)
    if on_workers is not None:
        per_epoch, at_once = epoch_iterator.steps_per_epoch, epoch_iterator.steps_per_execution
        limit = per_epoch and -(-per_epoch // at_once) * at_once
        set_dataset(epoch_iterator, _Passes(on_workers, limit))


@dataclasses.dataclass(frozen=True)
class _Passes:
    on_workers: OnWorkers
    limit: int | None

    @property
    def element_spec(self) -> Any:
        return self.on_workers.element_spec

    def __iter__(self) -> Pass:
        return self.on_workers.begin(self.limit)


@dataclasses.dataclass
class _Lane:
    """How far a part was given out."""

    part: Part
    place: int = 0
    has_ended: bool = False

    def next(self) -> Batch:
        self.place += 1
        return Batch(self.part, self.place - 1)


class Pass:
    """One pass over the data that workers read.

    Args:
        parts: Of the workers.
        element_spec: What a batch looks like.
        limit: Steps of an epoch, `None` if it lasts as long as there are data.
    """

    def __init__(self, parts: list[Part], element_spec: Any, limit: int | None) -> None:
        self.element_spec = element_spec
        self.lanes = [_Lane(part) for part in parts]
        self.jobs: collections.deque[tuple[_Lane, Any]] = collections.deque()  # steps of single workers, under way
        self.counts: list[Any] = []  # of the next step's batches, which are being read
        self._reading: list[_Lane] = []
        self._batches: list[Batch] = []
        self.done = 0
        self._limit = limit
        self._turn = 0

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        raise _never_here()  # the engine takes steps, not batches

    def next_lane(self, ahead: int) -> _Lane | None:
        """Returns whose batch may be the next one; `None` if all have ended, or enough is under way.

        Args:
            ahead: How many batches of a worker may be under way.
        """
        if self._limit is not None and len(self.jobs) >= self._limit - self.done % self._limit:
            return None  # a step that Keras doesn't ask for must not be made
        for offset in range(len(self.lanes)):
            lane = self.lanes[(self._turn + offset) % len(self.lanes)]
            if not lane.has_ended and sum(other is lane for other, _ in self.jobs) < ahead:
                self._turn += offset + 1
                return lane
        return None

    def pop(self, job: Any) -> _Lane:
        """Takes a job out of those that are under way, and returns whose it was."""
        found = next(item for item in self.jobs if item[1] is job)
        self.jobs.remove(found)
        return found[0]

    def read(self, read: Callable[[Batch], Any]) -> None:
        """Lets all workers read their next batch.

        Args:
            read: Returns the number of examples in a batch, or a job that does.
        """
        self._reading = [lane for lane in self.lanes if not lane.has_ended]
        if not self._reading:
            raise StopIteration
        self._batches = [lane.next() for lane in self._reading]
        self.counts = [read(batch) for batch in self._batches]

    def shares(self, counts: Sequence[Any]) -> list[Share]:
        """Returns the batches that were read, as the shares of a step.

        Args:
            counts: Number of examples of each, or `END`.
        """
        total = sum(count for count in counts if count != END)
        shares = []
        for lane, batch, count in zip(self._reading, self._batches, counts, strict=True):
            lane.has_ended = count == END
            if not lane.has_ended:
                shares.append(Share(batch, lane.part.home, count, total))
        self.counts = []
        return shares
