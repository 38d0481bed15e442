"""Several steps in one call of a worker, on batches that it reads. A journal on a server says how far they have come.

If the worker is lost in such a call, the call is repeated on another one: that reads the journal, and goes on after the
last step that was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.backends.parameter_server.batches import type_of
from keras_dist.backends.parameter_server.exchange import Outputs
from keras_dist.data.shares import row_count

_END = -1  # in the place of the number of examples, after the last batch
_PLACES = 1024  # of calls in a journal; so many later a place is used again


class Done(NamedTuple):
    """What came of the steps of a call.

    Args:
        steps: How many there were: a batch without examples has none.
        has_ended: True if there are no more batches.
        outputs: Of the last step, with the metrics of all; `None` if there was none.
    """

    steps: int
    has_ended: bool
    outputs: Outputs | None

    @classmethod
    def of(cls, output: Any) -> Done:
        """Returns what came of one step: its outputs, 0 if there were no examples, `None` after the last batch."""
        return cls(1, False, output) if isinstance(output, Outputs) else cls(0, output is None, None)


class _Journal:
    """How far calls have come. Each has a place in it.

    Args:
        device: The server that holds it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.device(device):
            self._runs = tf.Variable(tf.zeros([_PLACES, 2], tf.int32))  # the latest run of each call
            self._records = tf.Variable(tf.fill([_PLACES], ""))

    def begin(self, run: Any, first: Any) -> Any:
        """Ends earlier runs of a call. Returns the record of its last step.

        Args:
            run: The numbers of the call and of the run, which is 1 for the first one.
            first: The record before the first step.
        """
        place = run[0] % _PLACES
        with tf.device(self._device):
            begun = self._runs.scatter_update(tf.IndexedSlices(run, place))
            with tf.control_dependencies([begun]):
                record = tf.cond(run[1] > 1, lambda: self._records.sparse_read(place), lambda: first)
                noted = self._records.scatter_update(tf.IndexedSlices(record, place))
        with tf.control_dependencies([noted]):
            return tf.identity(record)

    def note(self, run: Any, record: Any) -> Any:
        """Notes a step once it was applied. Returns False if a later run of the call has begun."""
        place = run[0] % _PLACES
        made = [op for op in tf.compat.v1.get_default_graph().get_operations() if op.op_def.is_stateful]
        with tf.device(self._device), tf.control_dependencies(made):
            noted = self._records.scatter_update(tf.IndexedSlices(record, place))
            with tf.control_dependencies([noted]):
                return tf.reduce_all(tf.equal(self._runs.sparse_read(place), run))


class _State(NamedTuple):
    """Where a call is, between two steps.

    Args:
        read: Number of batches that were read.
        steps: Number of steps.
        has_ended: 1 if there are no more batches.
        metrics: Their states.
        results: The other outputs of the last step, serialized.
    """

    read: Any
    steps: Any
    has_ended: Any
    metrics: list[Any]
    results: Any

    def packed(self) -> Any:
        """Returns the state as one string."""
        numbers = [tf.as_string(number) for number in self[:3]]
        parts = tf.stack([*numbers, *map(tf.io.serialize_tensor, self.metrics)])
        return tf.io.serialize_tensor(tf.concat([parts, self.results], 0))

    @classmethod
    def of(cls, packed: Any, like: Sequence[Any]) -> _State:
        """Returns the state that was packed.

        Args:
            packed: The string.
            like: The metrics are like these.
        """
        parts = tf.ensure_shape(tf.io.parse_tensor(packed, tf.string), [None])
        read, steps, has_ended = (tf.strings.to_number(parts[index], tf.int32) for index in range(3))
        metrics = [
            tf.ensure_shape(tf.io.parse_tensor(parts[3 + index], state.dtype), state.shape)
            for index, state in enumerate(like)
        ]
        return cls(read, steps, has_ended, metrics, parts[3 + len(like) :])


class _Batch(NamedTuple):
    """A batch of a step.

    Args:
        read: How many batches of the call were read, with this one.
        examples: How many it has; `_END` if there are no more batches.
        data: An optional that holds it.
    """

    read: Any
    examples: Any
    data: Any


class RemoteSteps:
    """A traced function that makes steps. It takes the batches from an iterator.

    Args:
        function: Makes a step. Its arguments are a batch, others, and the states of the metrics before it; it returns
            `Outputs`.
        spec: The specification of a batch.
        types: Those of the other arguments, without the first axis, which is that of the steps.
        metrics: The states of the metrics before the first step.
        together: False if it is called for one step at a time.
        device: The server that holds a journal of the calls; `None` if they may be repeated from their start.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Any,
        types: Any,
        metrics: Sequence[Any],
        together: bool,
        device: str | None,
    ) -> None:
        self._function = function
        self._together = together
        self._metrics = [tf.convert_to_tensor(state) for state in metrics]
        self._journal = None if device is None else _Journal(device)
        self._specs: Any = None  # of the results
        self._calls = 0
        types = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), types)
        self._traced = tf.function(self._run, autograph=False).get_concrete_function(
            tf.data.IteratorSpec(spec), tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.int32), types
        )

    def next_call(self) -> int:
        """Returns the number of a call that begins."""
        self._calls += 1
        return self._calls

    def __call__(self, iterator: Any, run: int, count: int, call: int, args: Any) -> Any:
        """Makes the steps of a call; returns the results as they are sent.

        Args:
            iterator: Its next batch is the first one of the call.
            run: 1 if the call is run for the first time.
            count: Number of batches.
            call: Number of the call.
            args: The other arguments, of all steps.
        """
        return self._traced(iterator, tf.constant([call, run]), tf.constant(count), args)

    def results(self, sent: Any) -> Done:
        """Returns the results of a call.

        Args:
            sent: What the call returned; `None` if there was no batch.
        """
        if sent is None:
            return Done(0, True, None)
        state = _State.of(sent, self._metrics)
        steps, has_ended = int(state.steps), bool(state.has_ended)
        if not steps:
            return Done(0, has_ended, None)
        specs = tf.nest.flatten(self._specs, expand_composites=True)
        leaves = [tf.io.parse_tensor(leaf, spec.dtype) for leaf, spec in zip(state.results, specs, strict=True)]
        outputs = tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)
        return Done(steps, has_ended, outputs._replace(metrics=state.metrics))

    def _run(self, iterator: Any, run: Any, count: Any, args: Any) -> Any:
        zero = tf.constant(0)
        before = _State(zero, zero, zero, self._metrics, tf.zeros([0], tf.string))
        if self._journal is not None:
            before = _State.of(self._journal.begin(run, before.packed()), self._metrics)

        def step(batch: _Batch, state: _State) -> tuple[Any, _State]:
            """Returns whether this run goes on, and the state after the step."""
            tf.compat.v1.get_default_graph().seed = None  # see `RemoteFunction`
            own = tf.nest.map_structure(lambda of_all: of_all[batch.read - 1], args)
            outputs = self._function(batch.data.get_value(), *own, state.metrics)
            after = self._after(state._replace(read=batch.read), outputs)
            return tf.constant(True) if self._journal is None else self._journal.note(run, after.packed()), after

        def read(after: Any) -> _Batch:
            return _next_batch(iterator, after, before.read, count)

        def step_and_read(_: Any, batch: _Batch, state: _State) -> tuple[Any, _Batch, _State]:
            goes_on, after = step(batch, state)
            return goes_on, read(batch.read), after

        batch = read(zero)
        first = tf.constant(True), batch, before
        if self._together:
            shapes = tf.nest.map_structure(_shape, first)
            _, batch, state = tf.while_loop(
                lambda goes_on, batch, _: goes_on & (batch.examples > 0),
                step_and_read,
                first,
                (*shapes[:2], shapes[2]._replace(results=tf.TensorShape([None]))),
                parallel_iterations=1,
            )
        else:
            _, state = tf.cond(batch.examples > 0, lambda: step(batch, before), lambda: (first[0], before))
        return state._replace(has_ended=tf.cast(tf.equal(batch.examples, _END), tf.int32)).packed()

    def _after(self, state: _State, outputs: Outputs) -> _State:
        others = outputs._replace(metrics=(), seeds=())
        self._specs = tf.nest.map_structure(type_of, others)
        leaves = [tf.io.serialize_tensor(leaf) for leaf in tf.nest.flatten(others, expand_composites=True)]
        results = tf.stack(leaves) if leaves else tf.zeros([0], tf.string)
        return state._replace(steps=state.steps + 1, metrics=[*outputs.metrics], results=results)


def _next_batch(iterator: Any, read: Any, made: Any, count: Any) -> _Batch:
    """Reads up to the next batch of a step. There is none if `examples` isn't positive.

    Args:
        iterator: Over the batches.
        read: How many batches of the call were read before.
        made: How many of them had their steps before the worker was lost that made these.
        count: How many the call has.
    """

    def read_one(batch: _Batch) -> tuple[_Batch]:
        data = iterator.get_next_as_optional()
        examples = tf.cond(data.has_value(), lambda: row_count(data.get_value()), lambda: tf.constant(_END))
        examples = tf.where(batch.read < made, tf.minimum(examples, 0), examples)
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
