"""Every private name of TensorFlow that the library uses, each with the reason. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when one of them moves, or when it is no longer needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops import batch_op, dataset_ops, map_op, prefetch_op, repeat_op
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import context, executor
from tensorflow.python.framework import errors, op_def_registry, ops
from tensorflow.python.ops import resource_variable_ops


@dataclasses.dataclass(frozen=True)
class Stage:
    """The last stage of a data set's pipeline. tf.data has no public way to look into one.

    Args:
        kind: `"batch"`, `"map"`, `"repeat"`, `"prefetch"`, `"options"`, or `"other"`.
        input: The data set before this stage; `None` for `"other"`.
        arguments: Of a `"batch"` `batch_size` and `drop_remainder`, of a `"repeat"` `count`, as tensors.
    """

    kind: str
    input: tf.data.Dataset | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


_KINDS = {
    batch_op._BatchDataset: ("batch", {"batch_size": "_batch_size", "drop_remainder": "_drop_remainder"}),
    batch_op._ParallelBatchDataset: ("batch", {"batch_size": "_batch_size", "drop_remainder": "_drop_remainder"}),
    map_op._MapDataset: ("map", {}),
    map_op._ParallelMapDataset: ("map", {}),
    repeat_op._RepeatDataset: ("repeat", {"count": "_count"}),
    prefetch_op._PrefetchDataset: ("prefetch", {}),
    dataset_ops._OptionsDataset: ("options", {}),
}


def last_stage(dataset: tf.data.Dataset) -> Stage:
    """Returns what a data set does last, and to what."""
    kind, names = _KINDS.get(type(dataset), ("other", {}))
    if kind == "other":
        return Stage(kind)
    return Stage(kind, dataset._input_dataset, {name: getattr(dataset, private) for name, private in names.items()})


def map_function(dataset: tf.data.Dataset) -> Callable[[Any], Any]:
    """Returns what the last stage of a data set, a map, does to one element, as it was traced.

    Traced anew, a function that draws from Python's random would do something else.
    """
    wrapper = dataset._map_func

    def mapped(element: Any) -> Any:
        outputs = wrapper.function(*structure.to_tensor_list(wrapper._input_structure, element))
        return structure.from_compatible_tensor_list(wrapper.output_structure, outputs)

    return mapped


def is_stateless(dataset: tf.data.Dataset) -> bool:
    """True if the last stage of a data set, a map, gives the same for the same element, however often it is called.

    False for random numbers, Python functions, tables, counters, prints.
    """
    graph = dataset._map_func.function.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    functions = {function.signature.name for function in graph.library.function}
    return not any(node.op not in functions and _is_stateful(node.op) for node in nodes)


# These only call functions, whose own operations are looked at.
_CALLS = {"StatefulPartitionedCall", "If", "While", "Case"}


def _is_stateful(op: str) -> bool:
    definition = op_def_registry.get(op)
    return op not in _CALLS and (definition is None or definition.is_stateful) and op != "Placeholder"


# --- Collectives ---

# TensorFlow's collective operations are public (`tf.raw_ops`), but how a process joins others is not: the only public
# way, `tf.distribute.MultiWorkerMirroredStrategy`, also starts a coordination service with ideas of its own about when
# a process has to end. Nor can pending ones be ended publicly.
_JOB = "worker"


def tensorflow_has_started() -> bool:
    """True if devices and threads are fixed, so that it is too late to join others."""
    return context.context()._initialized


def start_collectives(workers: Sequence[str], rank: int) -> None:
    """Starts the server through which collectives of this process reach those of others. It ends with the process.

    Args:
        workers: `"host:port"` of every rank.
        rank: Index of this process.

    Raises:
        tf.errors.OpError: If the port is taken.
    """
    ctx = context.context()
    ctx.configure_collective_ops(
        collective_leader=f"/job:{_JOB}/replica:0/task:0", device_filters=(f"/job:{_JOB}/task:{rank}",)
    )
    server = tf.train.ServerDef(
        cluster=tf.train.ClusterSpec({_JOB: list(workers)}).as_cluster_def(),
        job_name=_JOB,
        task_index=rank,
        default_session_config=ctx.config,
        protocol="grpc",
    )
    ctx.enable_collective_ops(server)
    ctx.ensure_initialized()


def abort_collectives(reason: str) -> None:
    """Ends all pending and later collectives of this process with an error. Those of others go on waiting for it."""
    context.context().abort_collective_ops(errors.ABORTED, reason)


# --- Replicas of one process ---

# `MirroredStrategy.run` is public, but inside it Keras 3 takes the strategy for the owner of its variables, divides
# losses by the number of replicas, and more. So the thread's strategy is hidden from what runs in a replica.


class OtherGraphError(RuntimeError):
    """Replicas can't meet while one of them builds another graph than that of the step."""


Meet = Callable[[Callable[[], None]], None]


def call_for_each_replica(strategy: tf.distribute.MirroredStrategy, function: Callable[[int, Meet], None]) -> None:
    """Calls a function in a thread and on a device for each replica, one after the other up to where they meet.

    Args:
        strategy: Whose replicas.
        function: Gets the index of the replica, and `meet`: it waits for all replicas, then calls the first one's
            argument in the main thread. No strategy is to be seen in either. `meet` raises `OtherGraphError` if this
            replica is inside of a `tf.function` or branch of its own.
    """
    creators = ops.get_default_graph()._variable_creator_stack[:]

    @tf.autograph.experimental.do_not_convert
    def replica() -> None:
        context = tf.distribute.get_replica_context()
        meet = functools.partial(_merge_call, context, creators)
        with _strategy_hidden():
            function(int(tf.get_static_value(context.replica_id_in_sync_group)), meet)

    strategy.run(replica)


def _merge_call(context: tf.distribute.ReplicaContext, creators: list[Any], function: Callable[[], None]) -> None:
    if threading.current_thread().graph is not ops.get_default_graph():  # type: ignore[attr-defined]
        raise OtherGraphError(f"a reduction inside of {ops.get_default_graph().name!r}")

    def merged(strategy: tf.distribute.Strategy) -> None:
        with _strategy_hidden(), _variables_made_by(creators):
            function()

    distribute_lib._pop_per_thread_mode()
    try:
        context.merge_call(merged)
    finally:
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())


@contextlib.contextmanager
def _strategy_hidden() -> Iterator[None]:
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def _variables_made_by(creators: list[Any]) -> Iterator[None]:
    """Lets variables be ordinary ones, where a strategy would make them its own: those of an optimizer."""
    graph = ops.get_default_graph()
    others = graph._variable_creator_stack
    graph._variable_creator_stack = creators
    try:
        yield
    finally:
        graph._variable_creator_stack = others


def per_replica(parts: Sequence[Any]) -> Any:
    """Returns the values of all replicas as what `tf.distribute.CrossDeviceOps` takes."""
    return values.PerReplica(tuple(parts))


def parts_of(value: Any) -> tuple[Any, ...]:
    """Returns the values of all replicas."""
    parts: tuple[Any, ...] = value.values
    return parts


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that AutoGraph treats, in any thread, as it would where this is called."""
    wrapped: Callable[..., Any] = autograph.tf_convert(function, ag_ctx.control_status_ctx(), convert_by_default=False)
    return wrapped


# --- Parameter servers ---

# Connecting to a cluster is public (`tf.config.experimental_connect_to_cluster`), but taking a task out of it that has
# died, and in again when it is back, is not: the public `ClusterCoordinator` does the latter only, once all are back.


def cluster_definition() -> Any:
    """Returns the definition of the cluster that this process is connected to."""
    return context.get_server_def()


def update_cluster(definition: Any, without: Sequence[tuple[str, int]] = ()) -> None:
    """Connects anew to the tasks of a cluster that were restarted, and forgets those that are left out.

    Args:
        definition: What `cluster_definition` has returned.
        without: Job and index of the tasks to leave out.

    Raises:
        tf.errors.OpError: If a task doesn't answer.
    """
    reduced = type(definition)()
    reduced.CopyFrom(definition)
    for job in reduced.cluster.job:
        for name, index in without:
            if job.name == name:
                job.tasks.pop(index, None)
    context.context().update_server_def(reduced)


def knows_this_process(task: str) -> bool:
    """True if a task of the cluster answers, and has not been restarted since it was connected to."""
    return bool(context.check_alive(task))


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """Lets this thread's operations wait for and fail with each other only, while this is entered.

    The executor that threads share is held up by one call that hangs, and remembers an error of one.
    """
    own = executor.new_executor(enable_async=False)
    with context.executor_scope(own):
        try:
            yield
        finally:
            own.clear_error()


def take_identity(variable: tf.Variable, of: tf.Variable) -> None:
    """Lets a variable stand in for another one, by whose identity Keras's optimizers find their slots."""
    variable._unique_id = of._unique_id


# What TensorFlow's runtime takes for "a resource of its own each time", of `ResourceHandle::ANONYMOUS_NAME`.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


def temporary_variable(value: Any, trainable: bool) -> Any:
    """Returns a variable that lives for one call of the function that is being traced, where that runs.

    Gradients can be taken with respect to it. A `tf.Variable` can't be made in a `tf.function` that is called twice.
    """
    if not tf.inside_function():
        return tf.Variable(value, trainable=trainable)
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=_ANONYMOUS)
    variable = resource_variable_ops.BaseResourceVariable(
        trainable=trainable, shape=value.shape, dtype=value.dtype, handle=handle, name="temporary",
        handle_name="temporary:0", unique_id="temporary",
    )  # fmt: skip
    variable.assign(value, read_value=False)
    return variable


def let_variables_be_numbers() -> None:
    """Lets `float` and `int` take the variables of a strategy, and so Keras's, like any others."""
    variable = values.DistributedVariable
    for name, kind in (("__float__", float), ("__int__", int)):
        if not hasattr(variable, name):
            setattr(variable, name, lambda self, kind=kind: kind(self.numpy()))


def set_strategy(strategy: tf.distribute.Strategy) -> None:
    """Lets this thread make everything under a strategy from now on, also after `keras.utils.clear_session()`.

    That drops the default graph, and a strategy that was set with it.
    """
    stack = ops._default_graph_stack
    plain = stack.reset

    def reset() -> None:
        plain()
        tf.distribute.experimental_set_strategy(strategy)

    tf.distribute.experimental_set_strategy(strategy)
    stack.reset = reset  # an attribute of this thread
