"""Shards of the data that workers read themselves: how far each was given out, and what a worker has open.

A dataset function is traced for each worker, and makes the worker's dataset there. When a worker is lost, another
worker, or the same one after its return, reads its shard on from where it was left. One call may run several steps; if
its worker is lost, all of them are made again.
"""

from __future__ import annotations

import contextvars
import dataclasses
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from keras_dist.backends.parameter_server.cluster import HERE, first_devices
from keras_dist.backends.parameter_server.exchange import NO_FINGERPRINT, Outputs, type_of
from keras_dist.compat import keras_model, tf_compat, tf_data
from keras_dist.compat.keras_model import attach
from keras_dist.compat.keras_random import tensorflow_seed
from keras_dist.data import sources
from keras_dist.data.shares import Share, Shares, any_batch_size, row_count
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import logger

_DATA = "_keras_dist_on_workers"  # attribute of a dataset
Function = Callable[[tf.distribute.InputContext], tf.data.Dataset]

# The context of the dataset function that is being traced, `None` outside of one.
INPUT_CONTEXT: contextvars.ContextVar[tf.distribute.InputContext | None] = contextvars.ContextVar(
    "keras_dist_input_context", default=None
)


class DatasetFunction:
    """A dataset function, traced for each of the workers. `replicas` of them share the batch of a step.

    `fit`, `evaluate` and `validation_data` take it for data that the workers read, or a custom loop.
    """

    def __init__(self, function: Function, workers: int, replicas: int) -> None:
        # All shards draw the same random numbers, and the same ones again if a shard is read again.
        self._seed = secrets.randbelow(2**31) if tensorflow_seed() is None else None
        self._function, self._workers, self._replicas = function, workers, replicas
        self._epochs, self._reader = 0, ShardReader()  # that of a custom loop
        self._specs: list[Any] = []
        contexts = [tf.distribute.InputContext(workers, index, replicas) for index in range(workers)]
        self.makers = [self._traced(context) for context in contexts]
        self.element_spec = self._specs[0]
        for index, spec in enumerate(self._specs):
            if spec != self.element_spec:
                raise ConfigurationError(
                    "The dataset function returns elements of different types for different workers.",
                    f"{self.element_spec} for worker 0, {spec} for worker {index}",
                    "Use `context` only to choose the examples.",
                )

        def next_batch(iterator: Any) -> tuple[Any, Any]:
            batch = next(iterator)
            return batch, row_count(batch)

        iterator_spec = tf.data.IteratorSpec(self.element_spec)
        # Takes an iterator, returns its next batch and the number of examples in it.
        self.next: Any = tf.function(next_batch, autograph=False).get_concrete_function(iterator_spec)

    def _traced(self, context: tf.distribute.InputContext) -> Any:
        def make() -> Any:
            if self._seed is not None:
                tf.compat.v1.set_random_seed(self._seed)
            with tf_compat.context_value(INPUT_CONTEXT, context):
                dataset = self._function(context)
            if not isinstance(dataset, tf.data.Dataset):
                received, hint = type(dataset).__name__, "Add a `return` at its end."
                raise ConfigurationError("A dataset function must return a tf.data.Dataset.", received, hint)
            self._specs.append(tf.nest.map_structure(any_batch_size, dataset.element_spec))
            return tf.data.experimental.to_variant(tf_data.untuned(dataset.prefetch(tf.data.AUTOTUNE)))

        maker = tf.function(make, autograph=False).get_concrete_function()
        _check_graph(maker)
        return maker

    def __iter__(self) -> Iterator[Shares]:
        """Yields the workers' next batches, as the shares of a step in a custom loop. They stay on the workers."""
        shards, devices, empty = self.shards(), first_devices(self._workers), sources.empty_share(self.element_spec)
        while open_shards := [shard for shard in shards if not shard.has_ended]:
            found = {}
            for shard in open_shards:
                with tf.device(devices[shard.index]):
                    batch = self._reader.run(shard.next_batch(), lambda data: data, ())
                shard.has_ended = batch is None
                if batch is not None and not isinstance(batch, int):  # which it is if there are no examples
                    found[shard.index] = empty._replace(data=batch, count=row_count(batch))
            if total := sum(int(share.count) for share in found.values()):
                shares = [found.get(shard.index, empty) for shard in shards]
                yield Shares(tuple(share._replace(total=tf.constant(total)) for share in shares))

    def shards(self) -> list[Shard]:
        """Begins a pass over the data."""
        self._epochs += 1
        return [Shard(self, index, self._epochs - 1) for index in range(self._workers)]

    def weighted(self, class_weight: dict[int, float]) -> DatasetFunction:
        def function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return keras_model.weighted(self._function(context), class_weight)

        return DatasetFunction(function, self._workers, self._replicas)

    def stand_in(self) -> tf.data.Dataset:
        """Returns a dataset that Keras takes, until a `Pass` over these data replaces it."""
        nothing = tf.data.Dataset.from_generator(_not_read, output_signature=tf.TensorSpec([None]))
        attach(nothing, _DATA, self)
        return nothing


def _not_read() -> Iterator[Any]:
    raise not_read_here()


def not_read_here(received: str = "the batches of kd.shard(function), in `fit`") -> NotSupportedError:
    """Returns the error for data that this process would have to read, though the workers do."""
    return NotSupportedError(
        "What workers read is for `fit`, `evaluate`, `validation_data` and `kd.run`; this process never sees it.",
        received,
        "Pass the dataset itself: then this process reads it for all workers.",
    )


def stood_for(dataset: Any) -> DatasetFunction | None:
    """Returns the data that workers read for which this dataset stands, `None` if it is a dataset of its own."""
    return getattr(dataset, _DATA, None)


def _check_graph(maker: Any) -> None:
    """Raises an error if a dataset needs what only this process has."""
    operations = {node.op for node in tf_compat.nodes_of(maker.graph.as_graph_def())}
    if python := sorted(operations & {"PyFunc", "EagerPyFunc", "PyFuncStateless"}):
        raise NotSupportedError(
            "Workers can't run Python code for their data: tf.py_function, tf.numpy_function, from_generator.",
            f"the operation {python[0]} in the dataset function",
            "Use TensorFlow's operations, or pass the dataset itself: then this process reads it for all workers.",
        )
    if any(tensor.dtype == tf.variant for tensor in maker.captured_inputs):
        raise ConfigurationError(
            "The dataset function uses a dataset that was made outside of it, so only this process has it.",
            "a tf.data.Dataset in the dataset function",
            "Make it inside the function, from file names or arrays.",
        )
    if any(tensor.dtype == tf.resource for tensor in maker.captured_inputs):
        raise NotSupportedError(
            "Workers can't use a table or a variable of this process for their data.",
            "one in the dataset function (a lookup table, a preprocessing layer with a vocabulary, a tf.Variable)",
            "Use it in the model, or pass the dataset itself: then this process reads it for all workers.",
        )


_END = -1  # in the place of the number of examples, after the last batch


class Done(NamedTuple):
    """What came of the steps of a call."""

    steps: int  # how many there were: a batch without examples has none
    has_ended: bool  # True if there are no more batches
    outputs: Outputs | None  # of the last step, with the metrics of all; `None` if there was none


class _State(NamedTuple):
    """Where a call is, between two steps."""

    steps: Any  # number of steps
    metrics: list[Any]  # their states
    results: Any  # the other outputs of the last step, serialized


class _Batch(NamedTuple):
    read: Any  # how many batches of the call were read, with this one
    examples: Any  # how many it has; `_END` if there are no more batches
    data: Any  # an optional that holds it


def packed(tensors: Sequence[Any]) -> Any:
    """Returns tensors as one: to fetch a tensor from a worker takes calls of its own."""
    return tf.stack([tf.io.serialize_tensor(tensor) for tensor in tensors]) if tensors else tf.zeros([0], tf.string)


def unpacked(texts: Any) -> list[np.ndarray]:
    """Returns `packed` tensors. Operations would take longer than the other work of a step here."""
    return [tf.make_ndarray(tensor_pb2.TensorProto.FromString(text)) for text in texts]


class RemoteSteps:
    """A traced function that makes steps. It takes the batches, of the specification `spec`, from an iterator.

    Args:
        function: Makes a step. Its arguments are a batch, others, and the states of the metrics before it; it returns
            `Outputs`.
        types: The specifications of the other arguments, without the first axis, which is that of the steps.
        together: False if it is called for one step at a time: no loop is needed.
    """

    def __init__(self, function: Any, spec: Any, types: Any, metrics: Sequence[Any], together: bool) -> None:
        self._function = function
        self._together = together
        self._metrics = [tf.convert_to_tensor(state) for state in metrics]
        self._specs: Any = None  # of the results
        types = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), types)
        self._traced = tf.function(self._run, autograph=False).get_concrete_function(
            tf.data.IteratorSpec(spec), tf.TensorSpec([], tf.int32), types
        )

    def __call__(self, iterator: Any, count: int, args: Any) -> Any:
        """Makes the steps of a call on `count` batches. `args` are of all steps."""
        with tf.device(HERE):  # on a worker a constant would be sent in a call of its own, while Python stands still
            number = tf.constant(count)
        return self._traced(iterator, number, args)

    def results(self, sent: Any) -> Done:
        """Returns the results of a call from what it returned, `None` if there was no batch."""
        if sent is None:
            return Done(0, True, None)
        steps, has_ended, *others = unpacked(sent.numpy())
        if not steps:
            return Done(0, bool(has_ended), None)
        metrics, leaves = others[: len(self._metrics)], others[len(self._metrics) :]
        leaves = [tf.convert_to_tensor(leaf) for leaf in leaves]
        outputs = tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)
        return Done(int(steps), bool(has_ended), outputs._replace(metrics=metrics))

    def _run(self, iterator: Any, count: Any, args: Any) -> Any:
        def step(batch: _Batch, state: _State) -> _State:
            tf.compat.v1.get_default_graph().seed = None  # see `RemoteFunction`
            own = tf.nest.map_structure(lambda of_all: of_all[batch.read - 1], args)
            outputs = self._function(batch.data.get_value(), *own, state.metrics)
            others = outputs._replace(metrics=(), seeds=())
            self._specs = tf.nest.map_structure(type_of, others)
            results = packed(tf.nest.flatten(others, expand_composites=True))
            return _State(state.steps + 1, [*outputs.metrics], results)

        def step_and_read(batch: _Batch, state: _State) -> tuple[_Batch, _State]:
            after = step(batch, state)
            return _next_batch(iterator, batch.read, count), after

        zero = tf.constant(0)
        batch, state = _next_batch(iterator, zero, count), _State(zero, self._metrics, tf.zeros([0], tf.string))
        if self._together:
            of_batch, of_state = tf.nest.map_structure(_shape, (batch, state))
            batch, state = tf.while_loop(
                lambda batch, _: batch.examples > 0,
                step_and_read,
                (batch, state),
                (of_batch, of_state._replace(results=tf.TensorShape([None]))),
                parallel_iterations=1,
            )
        else:
            state = tf.cond(batch.examples > 0, lambda: step(batch, state), lambda: state)
        has_ended = tf.cast(tf.equal(batch.examples, _END), tf.int32)
        return tf.concat([packed([state.steps, has_ended, *state.metrics]), state.results], 0)


def _next_batch(iterator: Any, read: Any, count: Any) -> _Batch:
    """Reads up to the next batch of a step. There is none if `examples` isn't positive.

    The call has `count` batches, of which `read` were read before.
    """

    def read_one(batch: _Batch) -> tuple[_Batch]:
        data = iterator.get_next_as_optional()
        examples = tf.cond(data.has_value(), lambda: row_count(data.get_value()), lambda: tf.constant(_END))
        return (_Batch(batch.read + 1, examples, data),)

    none = _Batch(read, tf.constant(0), tf.experimental.Optional.empty(iterator.element_spec))
    (batch,) = tf.while_loop(
        lambda batch: (batch.read < count) & tf.equal(batch.examples, 0),
        read_one,
        (none,),
        tf.nest.map_structure(_shape, (none,)),
        parallel_iterations=1,
    )
    return batch


def _shape(leaf: Any) -> Any:
    """Returns the shape of a tensor in a loop, the type of an optional."""
    return tf.type_spec_from_value(leaf) if isinstance(leaf, tf.experimental.Optional) else leaf.shape


_KEPT = 2  # batches of a shard: that of the step which runs, and the next one


class Shard:
    """What one worker reads in one pass over the data."""

    def __init__(self, source: DatasetFunction, index: int, epoch: int) -> None:
        self.source = source
        self.index = index  # of the worker who reads it unless that is lost
        self.epoch = epoch  # number of the pass; each shuffles again
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
        if worker != (self.index if self._reader is None else self._reader):
            logger().warning("worker %d reads the part of worker %d, from batch %d on.", worker, self.index, number)
        self._reader = worker


@dataclasses.dataclass(frozen=True, eq=False)
class ShardBatch:
    """Names a batch that a worker reads, or several in a row."""

    shard: Shard
    number: int  # of the first batch in the shard
    count: int = 1


class ShardReader:
    """Reads batches of shards. Only its worker's thread may hold its handles: to drop one it calls the worker."""

    def __init__(self) -> None:
        # A dataset for each shard's function and index, and how many of its epochs have begun.
        self._datasets: dict[tuple[weakref.ref[DatasetFunction], int], tuple[tf.data.Dataset, int]] = {}
        self._open: dict[weakref.ref[Shard], _OpenShard] = {}

    def run(self, batch: ShardBatch, function: Callable[..., Any] | None, args: Any) -> Any:
        """Runs a function on a batch, on the current device. `RemoteSteps` get the iterator.

        Returns what it returned; the number of examples if there is no function, or none of them; `None` after the last
        batch of the shard.
        """
        try:
            if isinstance(function, RemoteSteps):
                return function(self._opened(batch).at(batch), batch.count, *args)
            data, count = self._opened(batch).read(batch.number)
        except tf.errors.OutOfRangeError:
            return None
        return function(data, *args) if function is not None and count else count

    def _opened(self, batch: ShardBatch) -> _OpenShard:
        for gone in [key for key in self._open if key() is None]:
            del self._open[gone]
        for of_source in [of_source for of_source in self._datasets if of_source[0]() is None]:
            del self._datasets[of_source]
        shard, key = batch.shard, weakref.ref(batch.shard)
        if key not in self._open or not self._open[key].can_read(batch.number):
            self._open.pop(key, None)
            of_source = weakref.ref(shard.source), shard.index
            dataset, begun = self._datasets.get(of_source, (None, 0))
            if dataset is None or begun > shard.epoch:
                variant = shard.source.makers[shard.index]()
                dataset, begun = tf.data.experimental.from_variant(variant, shard.source.element_spec), 0
            for _ in range(begun, shard.epoch):
                iter(dataset)  # draws what that epoch is shuffled by: the next one has its order wherever it is made
            self._datasets[of_source] = dataset, shard.epoch + 1
            iterator = iter(dataset.skip(batch.number) if batch.number else dataset)
            self._open[key] = _OpenShard(shard.source, iterator, batch.number)
        return self._open[key]

    def clear(self) -> None:
        self._datasets.clear()
        self._open.clear()


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


class Pass:
    """Data that workers read, where Keras was given a stand-in; and one pass over them.

    An epoch has `limit` steps, or lasts as long as there are data. Steps may be put `together` into one call.
    """

    def __init__(
        self, source: DatasetFunction, limit: int | None, together: bool, shards: Sequence[Shard] = ()
    ) -> None:
        self.element_spec = source.element_spec
        self.together = together
        self.reads: dict[ShardBatch, Any] = {}  # calls that read the batches of the next synchronous step
        self.asked = 0  # asynchronous steps that Keras has asked for
        self.done = 0  # those that were made
        self._source, self._limit, self._of_workers = source, limit, shards
        self._turn = 0

    def __iter__(self) -> Pass:
        return Pass(self._source, self._limit, self.together, self._source.shards())

    def __next__(self) -> Any:
        raise not_read_here()  # the engine takes steps, not batches

    def next_batches(self) -> list[ShardBatch]:
        """Returns the next batch of each worker; raises `StopIteration` if all shards have ended."""
        batches = [shard.next_batch() for shard in self._of_workers if not shard.has_ended]
        if not batches:
            raise StopIteration
        return batches

    def shares(self, counts: Sequence[int | None]) -> dict[int, Share]:
        """Returns the batches that were read as shares, by replica. `counts` are their examples, `None` at the end."""
        total, found = sum(count or 0 for count in counts), {}
        for batch, count in zip(self.reads, counts, strict=True):
            batch.shard.has_ended = count is None
            if count:
                found[batch.shard.index] = Share(batch, count, total, NO_FINGERPRINT)
        self.reads = {}
        return found

    def next_batch(
        self, most: int, ahead: int, window: int | None, under_way: Sequence[ShardBatch]
    ) -> ShardBatch | None:
        """Returns the batches of the next call; `None` if all shards have ended, or enough steps are under way.

        `ahead` is how many calls on a shard may be under way, `window` how many steps may be; `None` for any number.
        """
        begun = sum(batch.count for batch in under_way)
        if window is not None:
            most = min(most, window - begun)
        if self._limit is not None:  # a step that Keras doesn't ask for must not be made
            left = self._limit - self.done % self._limit - begun
            # Calls get shorter towards the end of an epoch: otherwise one worker still has many steps when the others
            # have none. Guided self-scheduling, Polychronopoulos and Kuck, 1987.
            most = min(most, -(-left // len(self._of_workers)))
        reading = [batch.shard for batch in under_way]
        for offset in range(len(self._of_workers) if most > 0 else 0):
            shard = self._of_workers[(self._turn + offset) % len(self._of_workers)]
            if not shard.has_ended and reading.count(shard) < ahead:
                self._turn += offset + 1
                return shard.next_batch(most)
        return None
