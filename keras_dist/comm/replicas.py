"""Several replicas that one process leads: each runs the whole step on its own device, on its share of the batch.

The devices are those of this process, or the workers of a cluster that it is connected to. How they share variables,
and how what they assign is combined: docs/how_it_works.md. `MirroredStrategy` only provides threads, devices and
`merge_call`: Keras 3 computes wrong results with its variables and datasets.

There may be other ranks, each with as many replicas. What the replicas of a rank have reduced then goes once through
the collective of the ranks: whatever this class inherits from besides.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.comm.devices import describe_devices, find_devices
from keras_dist.compat import keras_model, keras_strategy, tf_compat
from keras_dist.compat.keras_strategy import ReplicaScope, UpdateScope
from keras_dist.errors import NotSupportedError
from keras_dist.logging import without_notes_of_tensorflow


@dataclasses.dataclass(frozen=True)
class _Replica:
    """The replica that a thread runs."""

    group: _ReplicaGroup
    index: int
    merge: tf_compat.Merge


_REPLICA: contextvars.ContextVar[_Replica | None] = contextvars.ContextVar("keras_dist_replica", default=None)


class ReplicaBackend(Backend):
    """A backend whose processes each lead several replicas, once `start` has called `_use`.

    If there are several processes, put it before `ProcessBackend`, which has the collectives between them.
    """

    _strategy: tf.distribute.MirroredStrategy | None = None
    _parameter_device: str

    def _use(
        self, devices: Sequence[str], parameter_device: str, all_reduce: tf.distribute.CrossDeviceOps, *,
        mirrors: bool = False,
    ) -> None:  # fmt: skip
        """Sets the devices that compute, and the one that stores variables and computes what is merged."""
        with without_notes_of_tensorflow():
            self._strategy = tf_compat.mirrored_strategy(devices, all_reduce)
        self._parameter_device, self._all_reduce = parameter_device, all_reduce
        self.mirrors = mirrors and len(devices) > 1

    def _mirror(self, devices: Sequence[str], all_reduce: tf.distribute.CrossDeviceOps | None = None) -> None:
        """Gives each of these devices of this machine a copy of every variable."""
        self._use(devices, devices[0], all_reduce or tf.distribute.ReductionToOneDevice(), mirrors=True)
        if devices[0] != find_devices(None)[0]:
            # From now on this thread creates variables there, and not on a device that is not used.
            tf.device(devices[0]).__enter__()

    @property
    def devices(self) -> list[str]:
        return [] if self._strategy is None else list(self._strategy.extended.worker_devices)

    def describe_devices(self) -> str:
        if self._strategy is None:
            return super().describe_devices()  # type: ignore[safe-super]
        return describe_devices(self.devices) + (" each" if self.topology.size > 1 else "")

    def _own(self, index: int) -> Callable[[Any], Any]:
        """Returns a function that returns what a replica reads in place of a Keras variable."""
        if not self.mirrors or index == 0:
            return keras_model.backing
        return functools.partial(keras_strategy.copy_on, device=self.devices[index])

    def _assigns_own(self, index: int) -> Callable[[Any, Any], None] | None:
        """Returns a function that assigns a value to a replica's copy of a Keras variable, `None` without copies."""

        def assign(variable: Any, value: Any) -> None:
            copies = [self._own(each)(variable) for each in range(self.replicas)]  # all, before one of them changes
            keras_model.announce_assignments([variable])
            copies[index].assign(value)

        return assign if self.mirrors else None

    @property
    def replicas(self) -> int:
        return 1 if self._strategy is None else int(self._strategy.num_replicas_in_sync)

    def run(self, function: Callable[[int], Any], counts: Sequence[Any], metrics: Collection[Any] = ()) -> list[Any]:
        """Runs the step of each replica in its own thread and on its own device."""
        if self._strategy is None:
            return super().run(function, counts, metrics)
        outputs: list[Any] = [None] * self.replicas
        scopes = [
            ReplicaScope(count, metrics, self._own(index), self._assigns_own(index), _refuse_assignment)
            for index, count in enumerate(counts)
        ]
        group = _ReplicaGroup(scopes, self._parameter_device)

        def replica(index: int, merge: tf_compat.Merge) -> None:
            keras_strategy.set_thread_state(state)
            _REPLICA.set(_Replica(group, index, merge))
            at_once = keras_strategy.initialized_at_once(self._parameter_device)
            with scopes[index], tf_compat.following(False), at_once:
                outputs[index] = function(index)

        explained = explained_gradients(lambda: [v.path for v in scopes[0].assigned() if v.trainable])
        with keras_strategy.losses_of_each_replica(), explained, keras_strategy.thread_state() as state:
            tf_compat.call_for_each_replica(self._strategy, replica)
        if group.has_new_variables:
            tf_compat.trace_again()  # a step may do other things before its optimizer is built: scale a loss
        group.apply_assignments()
        return outputs

    # --- What a replica calls ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        replica, over_ranks = _REPLICA.get(), super().all_reduce
        if replica is None:
            return over_ranks(gradients, row, name)
        # Where a share's own operations are, for TensorFlow to see that each device has one summand.
        own = tf.nest.map_structure(tf.identity, list(gradients), expand_composites=True)

        def reduce(replicas: list[list[Any]]) -> tuple[list[Any], Any]:
            if self.topology.size == 1:
                return self._sum(replicas, self.mirrors), row[None, :]
            sums, rows = over_ranks([first for first, *_ in self._sum(replicas, to_all=False)], row, name)
            return [self._on_each_device([total] * self.replicas) for total in sums], rows

        sums, rows = replica.group.merge(replica, reduce, own)
        return [total[replica.index] for total in sums], rows

    def _sum(self, replicas: list[list[Any]], to_all: bool) -> list[Any]:
        """Returns for each gradient its sum, one tensor for each replica: on its own device, or on one device."""
        values = [tf_compat.per_replica(gradients) for gradients in zip(*replicas, strict=True)]
        targets = values if to_all else [self._parameter_device] * len(values)
        assert self._strategy is not None
        with without_notes_of_tensorflow():
            sums = self._all_reduce.batch_reduce(tf.distribute.ReduceOp.SUM, list(zip(values, targets, strict=True)))
        local = [self._strategy.experimental_local_results(total) for total in sums]
        if isinstance(self._all_reduce, tf.distribute.NcclAllReduce):
            local = [self._joined(total) for total in local]
        return [total if to_all else total * self.replicas for total in local]

    def _joined(self, parts: Sequence[Any]) -> list[Any]:
        """Lets whoever uses one of NCCL's sums run all: TensorFlow drops unused ones, for which NCCL waits forever."""
        with tf.control_dependencies(tf.nest.flatten(list(parts), expand_composites=True)):
            return self._on_each_device(parts)

    def _on_each_device(self, parts: Sequence[Any]) -> list[Any]:
        results = []
        for part, device in zip(parts, self.devices, strict=True):
            with tf.device(device):
                results.append(tf.nest.map_structure(tf.identity, part, expand_composites=True))
        return results

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        replica, over_ranks = _REPLICA.get(), super().all_reduce_exact
        if replica is None:
            return over_ranks(numbers, name)
        return replica.group.merge(replica, lambda parts: over_ranks(tf.add_n(parts), name), numbers)

    def all_gather(self, tensor: Any, name: str) -> Any:
        replica, over_ranks = _REPLICA.get(), super().all_gather
        if replica is None:
            return over_ranks(tensor, name)
        return replica.group.merge(replica, lambda parts: over_ranks(tf.concat(parts, 0), name), tensor)

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replica = _REPLICA.get()
        if replica is None:
            return function(*args, **kwargs)

        def update(calls: list[tuple[Any, Any]]) -> Any:
            replica.group.apply_assignments()
            if not self.mirrors:
                args, kwargs = calls[0]
                return function(*args, **kwargs)
            results = []
            for index, (args, kwargs) in enumerate(calls):
                scope = contextlib.nullcontext() if index == 0 else UpdateScope(self._own(index))
                with tf.device(self.devices[index]), tf_compat.following(False), scope:
                    results.append(function(*args, **kwargs))
            return results[0]

        return replica.group.merge(replica, update, (args, kwargs))

    def will_update(self, variables: Sequence[Any], *, are_new: bool) -> None:
        replica = _REPLICA.get()
        if replica is not None:
            replica.group.has_new_variables |= are_new
            for variable in variables:
                self._own(replica.index)(variable)

    def copies(self, variables: Sequence[Any]) -> dict[str, list[Any]]:
        if not self.mirrors:
            return {}
        values = [keras_model.backing(variable) for variable in variables]
        return {device: [tf_compat.existing_copy(value, device) for value in values] for device in self.devices}


class _ReplicaGroup:
    """The replicas of one step, which merge in the main thread, on a device."""

    def __init__(self, scopes: Sequence[ReplicaScope], device: str) -> None:
        self.has_new_variables = False  # True once the step has built an optimizer
        self._scopes, self._device = scopes, device
        self._values: list[Any] = [None] * len(scopes)
        self._result: Any = None

    def merge(self, replica: _Replica, function: Callable[[list[Any]], Any], value: Any) -> Any:
        """Waits for all replicas, calls a function once with their values, and returns its result to all of them."""
        self._values[replica.index] = value

        def merged() -> None:
            # In eager execution this runs in a replica's thread.
            with tf_compat.context_value(_REPLICA, None), tf.device(self._device):
                self._result = function(list(self._values))

        try:
            replica.merge(merged)
        except tf_compat.OtherGraphError as error:
            raise NotSupportedError(
                "The replicas of one process can only reduce in the step itself, not in a tf.function, tf.cond or "
                "tf.while_loop inside it.",
                str(error),
                "Remove @tf.function from `train_step` and the functions it calls: `fit` compiles the whole step. Take "
                "the update out of conditions; to accumulate gradients there is `gradient_accumulation_steps`.",
            ) from error
        return self._result

    def apply_assignments(self) -> None:
        """Combines the values that the replicas have assigned so far, and assigns them to the variables."""
        for variable in self._scopes[0].assigned():
            values = [scope.get_current_value(variable) for scope in self._scopes]
            if keras_strategy.is_float(variable) and variable.aggregation != "only_first_replica":
                values[0] = mean_of_shares(values, [scope.count for scope in self._scopes])
            keras_strategy.assign(variable, values[0])
        for scope in self._scopes:
            scope.clear()


def _refuse_assignment(variable: Any) -> None:
    raise NotSupportedError(
        "On this backend a step cannot assign a variable in a loop or condition of TensorFlow, or in a tf.function.",
        f"variable {variable.path!r}",
        "Where the cell of an RNN draws random numbers, as Dropout does, use RNN(..., unroll=True). Remove "
        "@tf.function from what the step calls. Or train with one process for each device: "
        "`keras-dist run -np 2 train.py`.",
    )


def mean_of_shares(values: Sequence[Any], counts: Sequence[Any]) -> Any:
    """Returns the mean of floats that replicas have computed, weighted by their examples (int32 scalars).

    If no replica of this rank has an example, it is the first one's value.
    """
    if len(values) == 1:
        return values[0]
    counts = [counts[0] + tf.cast(tf.add_n(counts) == 0, counts[0].dtype), *counts[1:]]
    dtype, total = values[0].dtype, tf.cast(tf.add_n(counts), tf.float64)
    weights = [tf.cast(tf.math.divide_no_nan(tf.cast(count, tf.float64), total), dtype) for count in counts]
    # Not 0 × NaN: a replica with an empty share may have computed NaN.
    return tf.add_n([tf.math.multiply_no_nan(value, weight) for value, weight in zip(values, weights, strict=True)])


@contextlib.contextmanager
def explained_gradients(weights: Callable[[], list[str]]) -> Iterator[None]:
    """Explains why a tape has no gradient of a weight: it is the value that the step has assigned, not a variable.

    `weights` returns the names of the weights that the step may have assigned.
    """
    try:
        yield
    except AttributeError as error:
        names = weights()  # or its own refusal: what the step has made itself has no value yet, for a regularizer
        if "'handle'" not in str(error) or not names:
            raise
        raise NotSupportedError(
            "On this backend a step cannot take the gradient of weights that it has assigned.",
            ", ".join(names[:5]),
            "Train with one process for each device: `keras-dist run -np 2 train.py`.",
        ) from error
