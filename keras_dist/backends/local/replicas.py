"""Several replicas in one process: each runs the whole step on a device of its own, on a share of the batch.

Variables are plain ones, and there is one of each. `MirroredStrategy` provides threads and devices, and the place where
the threads meet; its variables and its data sets, under which Keras 3 is wrong in many ways, are not used. Keras sees
no strategy at all inside a replica.

What a step assigns is put together by the variable's own `aggregation`:

- `"sum"`, and every state of a metric: replica after replica, as if the shares were batches that follow each other.
- Others wait until the replicas meet. Floats are averaged, by the number of examples (BatchNormalization's moving
  averages); of the rest the first replica's value is kept.
- Random streams differ from replica to replica; the first one has that of one process.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import SEED_OFFSET
from keras_dist.comm.one_process import OneProcess
from keras_dist.compat import keras_replicas, tf_compat
from keras_dist.compat.keras_replicas import ReplicaScope
from keras_dist.errors import NotSupportedError


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a thread is: which replica, of which step."""

    meeting: _Meeting
    index: int
    meet: tf_compat.Meet


_PLACE: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("keras_dist_place", default=None)


class ReplicaBackend(OneProcess):
    """A backend with several replicas in one process. `start` calls `_use`."""

    _strategy: tf.distribute.MirroredStrategy
    _parameter_device: str

    def _use(self, devices: Sequence[str], parameter_device: str, all_reduce: tf.distribute.CrossDeviceOps) -> None:
        self._strategy = tf.distribute.MirroredStrategy(list(devices), cross_device_ops=all_reduce)
        self._parameter_device = parameter_device
        self._all_reduce = all_reduce

    @property
    def replicas(self) -> int:
        return int(self._strategy.num_replicas_in_sync)

    def run(self, function: Callable[[int], Any], counts: Sequence[Any], metrics: Collection[Any] = ()) -> list[Any]:
        """Runs a step on every replica.

        Args:
            function: Called with the index of each replica, in a thread and on a device of its own.
            counts: int32 scalars, the number of examples in the share of each.
            metrics: Variables that count one share after the other, whatever their `aggregation`.

        Returns:
            What `function` returned, in the order of the replicas.
        """
        outputs: list[Any] = [None] * self.replicas
        scopes = [ReplicaScope(index * SEED_OFFSET, count, metrics) for index, count in enumerate(counts)]
        meeting = _Meeting(scopes, self._parameter_device)
        state = keras_replicas.thread_state()

        def replica(index: int, meet: tf_compat.Meet) -> None:
            keras_replicas.set_thread_state(state)
            _PLACE.set(_Place(meeting, index, meet))
            with scopes[index]:
                outputs[index] = function(index)
            _refuse_new_variables(keras_replicas.uninitialized_variables())

        tf_compat.call_for_each_replica(self._strategy, replica)
        meeting.settle()
        return outputs

    # --- What a replica calls ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        place = _PLACE.get()
        if place is None:
            return super().all_reduce(gradients, row, name)
        return place.meeting.call(place, self._sum_each, list(gradients)), row[None, :]

    def _sum_each(self, replicas: list[list[Any]]) -> list[Any]:
        values = [tf_compat.per_replica(parts) for parts in zip(*replicas, strict=True)]
        to_one = isinstance(self._all_reduce, tf.distribute.ReductionToOneDevice)
        targets = [self._parameter_device if to_one else value for value in values]
        sums = self._all_reduce.batch_reduce(tf.distribute.ReduceOp.SUM, list(zip(values, targets, strict=True)))
        return [self._strategy.experimental_local_results(total)[0] for total in sums]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        place = _PLACE.get()
        return numbers if place is None else place.meeting.call(place, tf.add_n, numbers)

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = _PLACE.get()
        if place is None:
            return function(*args, **kwargs)

        def first(_: Any) -> Any:
            place.meeting.settle()
            return function(*args, **kwargs)

        return place.meeting.call(place, first)


class _Meeting:
    """Where the replicas of one step meet, in the main thread.

    Args:
        scopes: What each replica has assigned.
        device: Where what is computed once is computed.
    """

    def __init__(self, scopes: Sequence[ReplicaScope], device: str) -> None:
        self._scopes = scopes
        self._device = device
        self._brought: list[Any] = [None] * len(scopes)
        self._result: Any = None

    def call(self, place: _Place, function: Callable[[list[Any]], Any], brought: Any = None) -> Any:
        """Calls a function once, with what each replica has brought. All of them get the result."""
        self._brought[place.index] = brought

        def merged() -> None:
            token = _PLACE.set(None)  # run eagerly by a replica's thread, TensorFlow stays in it
            try:
                with tf.device(self._device):
                    self._result = function(list(self._brought))
            finally:
                _PLACE.reset(token)

        try:
            place.meet(merged)
        except tf_compat.OtherGraphError as error:
            raise NotSupportedError(
                "The replicas of one process meet in the step itself, not in a tf.function, tf.cond or tf.while_loop "
                "inside of it.",
                str(error),
                "Take @tf.function off `train_step` and what it calls: `fit` compiles the whole step anyway.",
            ) from error
        return self._result

    def settle(self) -> None:
        """Puts together what the replicas have assigned until now, and assigns it."""
        for variable in self._scopes[0].assigned():
            values = [scope.take(variable) for scope in self._scopes]
            keras_replicas.assign(variable, self._combined(variable, values))
        for scope in self._scopes:
            scope.clear()

    def _combined(self, variable: Any, values: Sequence[Any]) -> Any:
        if not keras_replicas.is_float(variable) or variable.aggregation == "only_first_replica":
            return values[0]
        counts = [tf.cast(scope.count, values[0].dtype) for scope in self._scopes]
        weights = [tf.math.divide_no_nan(count, tf.add_n(counts)) for count in counts]
        # Not 0 × NaN: a replica without examples has seen nothing, whatever its layers made of it.
        return tf.add_n([tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)])


def _refuse_new_variables(variables: Sequence[Any]) -> None:
    if variables:
        raise NotSupportedError(
            "Variables can't be made inside of a step that several replicas run.",
            ", ".join(variable.path for variable in variables[:5]),
            "Build the model before `fit`: give it an Input, call it once on a batch, or model.build(input_shape).",
        )
