"""Private names for TPUStrategy without a TPU: its own code, with cores that do not exist.

TensorFlow 2.21, 2026-11. `tests/unit/test_tpu_training.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.distribute import values
from tensorflow.python.framework import ops
from tensorflow.python.tpu import tpu, tpu_function, tpu_replication, tpu_system_metadata
from tensorflow.python.tpu.ops import tpu_ops
from tensorflow.python.util import nest


class _NoTPU(tf.distribute.cluster_resolver.TPUClusterResolver):
    """A resolver that describes cores that do not exist."""

    def __init__(self, cores: int) -> None:
        super().__init__("local")
        self._cores = cores

    def get_tpu_system_metadata(self) -> Any:
        host = "/job:localhost/replica:0/task:0/device:"
        devices = [session._DeviceAttributes(f"{host}CPU:0", "CPU", 0, 0)]
        devices += [session._DeviceAttributes(f"{host}TPU:{core}", "TPU", 0, 0) for core in range(self._cores)]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._cores, num_hosts=1, num_of_cores_per_host=self._cores, topology=None, devices=tuple(devices)
        )


class _OneReplica(tpu_replication.TPUReplicateContext):
    """Uses one replica's copy of a distributed variable, instead of an input of the replicated computation."""

    def __init__(self, cores: int, core: int) -> None:
        super().__init__("one_replica", cores, tf.raw_ops.NoOp())
        self._core = core

    def AddOp(self, op: Any) -> None:
        pass

    def AddValue(self, value: Any) -> Any:
        return value

    def get_replicated_var_handle(self, name: Any, handle_id: Any, vars_: Any, *_: Any, **__: Any) -> Any:
        return vars_[self._core].handle


def emulated_strategy(cores: int) -> tf.distribute.Strategy:
    """Returns a real TPUStrategy over this number of cores, with its variables on the CPU."""
    strategy = tf.distribute.TPUStrategy(_NoTPU(cores))
    strategy._enable_packed_variable_in_eager_mode = False  # packed variables need a TPU
    if cores > 1:
        strategy.distribute_datasets_from_function = functools.partial(_elements_of_all, cores)
    return strategy


def _elements_of_all(cores: int, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns a dataset whose elements are those of all replicas.

    TPUStrategy has an iterator for each core. To delete one, TensorFlow 2.21 waits for the thread that tunes it, for up
    to a minute.
    """

    @tf.autograph.experimental.do_not_convert
    def of_all(element: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: values.PerReplica(tuple(tf.unstack(leaf, cores))), element)

    return make(tf.distribute.InputContext(num_replicas_in_sync=cores)).batch(cores, drop_remainder=True).map(of_all)


@contextlib.contextmanager
def one_replica(cores: int, core: int = 0) -> Iterator[None]:
    """Traces the work of one of `cores` replicas, in this context and inside a graph."""
    graph = ops.get_default_graph()
    outer = graph._get_control_flow_context()
    graph._set_control_flow_context(_OneReplica(cores, core))
    try:
        with tpu_function.tpu_shard_context(cores):
            yield
    finally:
        graph._set_control_flow_context(outer)


@contextlib.contextmanager
def collectives(reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the TPU's collectives, for which plain TensorFlow has no kernels."""
    plain = tpu_ops.cross_replica_sum, tpu_ops.all_to_all
    tpu_ops.cross_replica_sum = lambda x, group_assignment=None, name=None: reduce(x)
    tpu_ops.all_to_all = lambda x, *args, **kwargs: tf.identity(x)  # of seeds and counters only
    try:
        yield
    finally:
        tpu_ops.cross_replica_sum, tpu_ops.all_to_all = plain


class _Sums:
    """Sums over replicas that are traced one after another into the same graph.

    Each sum is first an `Identity` of the replica's own value. Once all replicas are traced, it gets the sum as input.

    Args:
        cores: Number of replicas.
    """

    def __init__(self, cores: int) -> None:
        self._graph = ops.get_default_graph()
        self._summands: list[list[Any]] = [[] for _ in range(cores)]

    def of(self, core: int) -> Callable[[Any], Any]:
        """Returns the all-reduce of a replica."""

        def reduce(value: Any) -> Any:
            if ops.get_default_graph() is not self._graph:
                raise NotImplementedError("a sum over emulated cores inside a tf.function, tf.cond or tf.while_loop")
            identity = tf.identity(tf.convert_to_tensor(value))  # sparse rows become dense, as on a TPU
            self._summands[core].append(identity)
            return identity

        return reduce

    def connect(self) -> None:
        """Computes the sums."""
        for identities in zip(*self._summands, strict=True):
            total = tf.add_n([identity.op.inputs[0] for identity in identities])
            for identity in identities:
                identity.op._update_input(0, total)


@contextlib.contextmanager
def runs_on_cpu() -> Iterator[None]:
    """Makes an emulated strategy run its steps on the CPU, in this context."""

    def replicate(computation: Any, inputs: Any = None, **_: Any) -> Any:
        sums, outputs = _Sums(len(inputs)), []
        for core, (replica_id, *arguments) in enumerate(inputs):
            unknown = tf.raw_ops.PlaceholderWithDefault(input=replica_id, shape=[])  # a TPU traces once for all cores
            with one_replica(len(inputs), core), collectives(sums.of(core)):
                outputs.append(nest.flatten(computation(unknown, *arguments)))
        sums.connect()
        return outputs

    plain, tpu.replicate = tpu.replicate, replicate
    try:
        yield
    finally:
        tpu.replicate = plain
