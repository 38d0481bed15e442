"""Private names of TensorFlow, each with the reason. TensorFlow 2.21, 2026-11."""

import atexit
import contextlib
import contextvars
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.autograph.pyct import error_utils
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import context, executor, record
from tensorflow.python.framework import errors, ops
from tensorflow.python.ops import array_ops, resource_variable_ops

# AutoGraph rewrites all that a `tf.function` of the script calls, except the packages on this list, such as Keras. To
# rewrite ours took four times as long as to trace the step. There is no public way onto the list. Functions of the
# script that we call are `converted`.
config.CONVERSION_RULES = (config.DoNotConvert("keras_dist"), *config.CONVERSION_RULES)


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of a module, a class or an object in this context, without Keras's attribute tracking."""
    change = type if isinstance(owner, type) else object
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        change.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name in values.keys() & vars(owner).keys():
            change.__delattr__(owner, name)
        for name, value in before.items():
            change.__setattr__(owner, name, value)


_LOWERED = 1000.0  # to what part gradients are clipped in a step that is tried out


@contextlib.contextmanager
def clipping_at_once() -> Iterator[None]:
    """Lowers what TensorFlow's functions clip to, in this context, so that a step that clips shows it.

    `clip_by_value` has many uses. Of gradients it clips from both sides alike, after the tape has ended.
    """

    def lowered(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def clip(values: Any, clip_norm: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(values, clip_norm / _LOWERED, *args, **kwargs)

        return clip

    plain_by_value = tf.clip_by_value

    @functools.wraps(plain_by_value)
    def by_value(t: Any, clip_value_min: Any, clip_value_max: Any, *args: Any, **kwargs: Any) -> Any:
        are_numbers = isinstance(clip_value_min, int | float) and isinstance(clip_value_max, int | float)
        if are_numbers and clip_value_min == -clip_value_max and not record.could_possibly_record():
            clip_value_min, clip_value_max = clip_value_min / _LOWERED, clip_value_max / _LOWERED
        return plain_by_value(t, clip_value_min, clip_value_max, *args, **kwargs)

    of_norm = {name: lowered(getattr(tf, name)) for name in ("clip_by_norm", "clip_by_global_norm")}
    with patched(tf, clip_by_value=by_value, **of_norm):
        yield


def observed_clipping(observe: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Calls `observe(arguments)` before TensorFlow's functions clip, in this context."""

    def observed(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def clip(*args: Any, **kwargs: Any) -> Any:
            observe((args, kwargs))
            return plain(*args, **kwargs)

        return clip

    names = "clip_by_value", "clip_by_norm", "clip_by_global_norm"
    return patched(tf, **{name: observed(getattr(tf, name)) for name in names})


@contextlib.contextmanager
def noted_lookups(note: Callable[[Any], object]) -> Iterator[None]:
    """Calls `note(ids)` with the distinct ids of each `tf.nn.embedding_lookup_sparse`, in this context."""
    plain = array_ops.unique

    def unique(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        note(found[0])
        return found

    with patched(array_ops, unique=unique):
        yield


_Value = TypeVar("_Value")


@contextlib.contextmanager
def context_value(variable: contextvars.ContextVar[_Value], value: _Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def nodes_of(graph: Any) -> list[Any]:
    """Returns the nodes of a `GraphDef` and of the functions in it."""
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


# --- Collectives ---

# TensorFlow's collective operations are public (`tf.raw_ops`), but joining other processes and aborting pending
# operations are not. `tf.distribute.MultiWorkerMirroredStrategy` joins them, but its coordination service also ends
# processes by rules of its own.
_JOB = "worker"


def tensorflow_has_started() -> bool:
    """True if devices and threads are fixed, so that it is too late to join other processes."""
    return context.context()._initialized


def start_collectives(workers: Sequence[str], rank: int) -> None:
    """Starts the server that connects this process's collectives to other processes. It ends with the process.

    `workers` are `"host:port"` of every rank. `tf.errors.OpError` says that the port is taken.
    """
    ctx = context.context()
    ctx.configure_collective_ops(
        collective_leader=f"/job:{_JOB}/replica:0/task:0", device_filters=(f"/job:{_JOB}/task:{rank}",)
    )
    cluster = tf.train.ClusterSpec({_JOB: list(workers)}).as_cluster_def()
    server = tf.train.ServerDef(
        cluster=cluster, job_name=_JOB, task_index=rank, default_session_config=ctx.config, protocol="grpc"
    )
    ctx.enable_collective_ops(server)
    ctx.ensure_initialized()


def abort_collectives(reason: str) -> None:
    """Ends all pending and later collectives of this process with an error. Other processes keep waiting for it."""
    context.context().abort_collective_ops(errors.ABORTED, reason)


# --- Replicas of one process ---

# `MirroredStrategy.run` is public. But inside it Keras 3 expects variables of the strategy, divides losses by the
# number of replicas, and more. So the strategy is hidden from the code of a replica.


def mirrored_strategy(devices: Sequence[str], all_reduce: tf.distribute.CrossDeviceOps) -> Any:
    """Returns a MirroredStrategy of any devices.

    Its constructor refuses those of several processes, though it can run on them. And it makes a variable on each, for
    collectives that are not used here: that fails if a worker is lost at that moment.
    """
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=all_reduce)
    strategy.extended._initialize_single_worker(list(devices))
    return strategy


class OtherGraphError(RuntimeError):
    """Replicas cannot merge while one of them builds a graph inside the step's graph."""


Merge = Callable[[Callable[[], None]], None]


def call_for_each_replica(strategy: tf.distribute.MirroredStrategy, function: Callable[[int, Merge], None]) -> None:
    """Calls a function for each replica, in its thread and on its device, one after the other until they merge.

    It takes the index of the replica, and `merge`, which waits for all replicas and then calls the first one's argument
    in the main thread. The strategy is hidden in both. In a `tf.function` or branch `merge` raises `OtherGraphError`.
    """
    creators = ops.get_default_graph()._variable_creator_stack[:]

    def replica() -> None:
        context = tf.distribute.get_replica_context()
        merge = functools.partial(_merge_call, context, creators)
        with tf.device(None):  # not on the replica's device, which may be gone
            index = int(tf.get_static_value(context.replica_id_in_sync_group))
        with strategy_hidden():
            function(index, merge)

    with _functions_traced_for_each_device():
        strategy.run(replica)


def _functions_traced_for_each_device() -> contextlib.AbstractContextManager[None]:
    """A `tf.function` of the script reads a device's copies of the variables, so no other device can use its trace.

    TensorFlow asks the current strategy, which is hidden, so the default one answers.
    """
    return patched(distribute_lib._get_default_strategy().extended, _retrace_functions_for_each_device=True)


def _merge_call(context: tf.distribute.ReplicaContext, creators: list[Any], function: Callable[[], None]) -> None:
    if threading.current_thread().graph is not ops.get_default_graph():  # type: ignore[attr-defined]
        raise OtherGraphError(f"a reduction inside {ops.get_default_graph().name!r}")

    def merged(strategy: tf.distribute.Strategy) -> None:
        with strategy_hidden(), variables_made_by(creators):
            function()

    distribute_lib._pop_per_thread_mode()
    try:
        context.merge_call(merged)
    finally:
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())


@contextlib.contextmanager
def strategy_hidden() -> Iterator[None]:
    """In this context code sees no strategy, as in a script of one process."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def variables_made_by(creators: Sequence[Any] = ()) -> Iterator[None]:
    """Creates ordinary variables, those of an optimizer, where the strategy would create its own kind."""
    graph = ops.get_default_graph()
    others, graph._variable_creator_stack = graph._variable_creator_stack, list(creators)
    try:
        yield
    finally:
        graph._variable_creator_stack = others


OWN_NAME = "keras_dist_"  # how names of this library's variables begin


def host_variable(value: Any, name: str, **options: Any) -> tf.Variable:
    """Returns an ordinary variable of this library in the host's memory, in any scope."""
    with tf.init_scope(), variables_made_by(), tf.device("CPU:0"):
        return tf.Variable(value, trainable=False, name=f"{OWN_NAME}{name}", **options)


def trace_again() -> None:
    """Makes the `tf.function` that is traced here trace once more, as it does after it has made variables.

    For those of `variables_made_by`, which it does not see. In eager execution nothing happens.
    """
    if not tf.executing_eagerly():
        tf.Variable(0, trainable=False, name="made")


def per_replica(parts: Sequence[Any]) -> Any:
    """Returns the values of all replicas in the form that `tf.distribute.CrossDeviceOps` takes."""
    return values.PerReplica(tuple(parts))


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the script that AutoGraph treats in any thread as if the script had called it here."""
    return autograph.tf_convert(function, ag_ctx.control_status_ctx(), convert_by_default=False)


def keep_types(*errors: type[Exception]) -> None:
    """Lets AutoGraph raise these errors as what they are, when it has added to their text where they come from."""
    error_utils.KNOWN_STRING_CONSTRUCTOR_ERRORS += errors


# --- Parameter servers ---

# Connecting to a cluster is public (`tf.config.experimental_connect_to_cluster`), but removing a dead task and adding
# it again is not. The public `ClusterCoordinator` only reconnects, once all tasks are back.


def cluster_definition() -> Any:
    return context.get_server_def()


def update_cluster(definition: Any, without: Sequence[tuple[str, int]] = ()) -> None:
    """Reconnects to restarted tasks of a cluster, and removes tasks, by job and index.

    `definition` is the result of `cluster_definition`. `tf.errors.OpError` says that a task does not answer.
    """
    reduced = type(definition)()
    reduced.CopyFrom(definition)
    for job in reduced.cluster.job:
        for name, index in without:
            if job.name == name:
                job.tasks.pop(index, None)
    context.context().update_server_def(reduced)


def keep_functions_while(hangs: Callable[[], bool]) -> None:
    """Lets TensorFlow keep traced functions that Python drops, at its end too, while a worker `hangs`.

    It tells every worker, and waits for each without a limit.
    """
    ctx = context.context()
    plain = ctx.remove_function
    ctx.remove_function = lambda name: None if hangs() else plain(name)


def is_connected(task: str) -> bool:
    """True if a task of the cluster answers, and has not restarted since this process connected to it."""
    return bool(context.check_alive(task))


@contextlib.contextmanager
def separate_executor() -> Iterator[None]:
    """Runs this thread's operations in an executor of their own, in this context.

    One hanging call blocks the executor that all threads share, and one error stays in it.
    """
    separate = executor.new_executor(enable_async=False)
    with context.executor_scope(separate):
        try:
            yield
        finally:
            separate.clear_error()


@contextlib.contextmanager
def functions_run_eagerly(eagerly: bool) -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(eagerly)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def often_traced(function: Callable[..., Any], *, keeps_shapes: bool = False) -> Callable[..., Any]:
    """Returns a function that may be traced often, for each name or model, without a warning.

    Unless it `keeps_shapes`, one trace takes tensors of several shapes.
    """
    traced = tf.function(function, autograph=False, reduce_retracing=not keeps_shapes)
    traced._omit_frequent_tracing_warning = True
    return traced


def copy_identity(variable: tf.Variable, of: tf.Variable) -> None:
    """Gives a variable the identity of another one, by which Keras's optimizers find their slots."""
    variable._unique_id = of._unique_id


def temporary_variable(value: Any, trainable: bool) -> Any:
    """Returns a variable that exists for one call of the traced function, where that function runs.

    It is differentiable. A `tf.Variable` cannot be created in a `tf.function` that is called twice.
    """
    if not tf.inside_function():
        return tf.Variable(value, trainable=trainable)
    # `ResourceHandle::ANONYMOUS_NAME` of TensorFlow's runtime: a new resource each time.
    name = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
    variable = resource_variable_ops.BaseResourceVariable(
        trainable=trainable, shape=value.shape, dtype=value.dtype, handle=handle, name="temporary",
        handle_name="temporary:0", unique_id="temporary",
    )  # fmt: skip
    variable.assign(value, read_value=False)
    return variable


def add_number_conversions() -> None:
    """Makes `float` and `int` accept the variables of a strategy, as Keras expects."""
    variable = values.DistributedVariable
    for name, kind in (("__float__", float), ("__int__", int)):
        if not hasattr(variable, name):
            setattr(variable, name, lambda self, kind=kind: kind(self.numpy()))


def set_strategy(strategy: tf.distribute.Strategy) -> None:
    """Sets the strategy of this thread, also after `keras.utils.clear_session()`, which would reset it."""
    stack = ops._default_graph_stack
    plain = stack.reset

    def reset() -> None:
        plain()
        tf.distribute.experimental_set_strategy(strategy)

    tf.distribute.experimental_set_strategy(strategy)
    stack.reset = reset  # an attribute of this thread


@functools.cache
def end_data_threads_before_python() -> None:
    """Deletes, before Python ends, the iterators that only the last error holds."""

    @atexit.register
    def forget_last_error() -> None:
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()


_COPIES = "_keras_dist_copies"
# All methods that change a variable. `tf.train.Checkpoint` calls the last one.
WRITES = (
    "assign", "assign_add", "assign_sub", "count_up_to", "batch_scatter_update", "scatter_add", "scatter_div",
    "scatter_max", "scatter_min", "scatter_mul", "scatter_sub", "scatter_update", "scatter_nd_add", "scatter_nd_max",
    "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update", "_strided_slice_assign", "_restore_from_tensors",
)  # fmt: skip

_FOLLOW: contextvars.ContextVar[bool] = contextvars.ContextVar("keras_dist_copies_follow", default=True)


def following(follow: bool) -> contextlib.AbstractContextManager[None]:
    """In this context copies are assigned with their variable, or not: each device then updates its own."""
    return context_value(_FOLLOW, follow)


def existing_copy(variable: tf.Variable, device: str) -> Any:
    """Returns the copy of a variable on a device, or the variable itself if it has none there."""
    return vars(variable).get(_COPIES, {}).get(device, variable)


def copy_on(variable: tf.Variable, device: str) -> Any:
    """Returns the copy of an ordinary variable on a device, given by its full name, which is made if there is none."""
    copies = vars(variable).setdefault(_COPIES, {})
    if not copies:  # this is the first one
        for name in WRITES:
            setattr(variable, name, _followed(variable, getattr(variable, name), copies))
    if device not in copies:
        with tf.init_scope(), variables_made_by(), tf.device(device):
            copy = tf.Variable(variable.read_value(), trainable=variable.trainable, name="copy")
        copy_identity(copy, of=variable)
        copies[device] = copy
    return copies[device]


def _followed(variable: tf.Variable, plain: Callable[..., Any], copies: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def write(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if _FOLLOW.get():
            for copy in copies.values():
                copy.assign(variable.read_value())
        return result

    return write
