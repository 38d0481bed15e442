"""Fails when a private name of TensorFlow changes or is no longer needed."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from keras_dist.backends.local.replicas import Mirrored
from keras_dist.compat import tf_compat, tf_graphs
from keras_dist.errors import NotSupportedError
from keras_dist.training import loop
from tests.forks import ForkServer

Dataset = tf.data.Dataset


def test_collectives_over_processes_have_no_public_way_but_the_strategy() -> None:
    """Once a process can publicly join others and abort pending collectives, the private way can go."""
    public = {name for module in (tf.distribute, tf.config, tf.config.experimental) for name in dir(module)}
    assert not {name for name in public if "collective_ops" in name or "abort" in name}
    assert isinstance(tf_compat.tensorflow_has_started(), bool)
    for name in ("configure_collective_ops", "enable_collective_ops", "ensure_initialized", "abort_collective_ops"):
        assert callable(getattr(tf_compat.context.context(), name))
    tf.zeros([1])
    assert tf_compat.tensorflow_has_started()


def test_autograph_rewrites_the_script_only_and_has_no_public_list_of_packages() -> None:
    assert {name for name in dir(tf.autograph.experimental) if name[0] != "_"} == {
        "Feature", "do_not_convert", "set_loop_options",
    }  # fmt: skip
    files: list[str] = []

    def step(x: Any) -> Any:
        files.extend(frame.filename for frame in inspect.stack(0))
        if x > 1:  # a tensor
            x = 2 * x
        return x

    @tf.function
    def train_step(x: Any) -> Any:
        return loop.Loop().reduce("sum", loop.Loop().run(step, (x,)))

    assert (train_step(tf.constant(3)), train_step(tf.constant(1))) == (6, 1)
    assert loop.__file__ in files  # as it is written
    assert __file__ not in files[: files.index(loop.__file__)]


def test_autograph_has_no_public_list_of_errors_that_it_raises_again() -> None:
    """Once it raises the first error as what it is, `keep_types` can go."""

    class Own(Exception):
        def __init__(self, problem: str, remedy: str = "") -> None:
            super().__init__(f"{problem} {remedy}")

    def raised(error: Exception) -> type[BaseException]:
        @tf.function
        def step() -> None:
            raise error

        with pytest.raises(Exception, match="broken") as caught:
            step()
        return caught.type

    assert raised(Own("broken")).__name__ == "StagingError"
    assert raised(NotSupportedError("broken", "x", "y")) is NotSupportedError


# --- Replicas of one process. Logical devices are created before TensorFlow starts, so they need a new process. ---

REPLICAS = """
import tensorflow as tf
from keras_dist.comm.devices import find_devices
from keras_dist.compat import tf_compat
found = find_devices(["CPU:0", "CPU:1"])
strategy = tf.distribute.MirroredStrategy(found, cross_device_ops=tf.distribute.ReductionToOneDevice())
import keras
loss = keras.losses.MeanSquaredError()
y = tf.constant([[1.0], [3.0]])
"""


@pytest.fixture
def in_two_replicas(forks: ForkServer, tmp_path: Path) -> Callable[[str], str]:
    def run(body: str) -> str:
        done = forks.run(REPLICAS + textwrap.dedent(body), tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_a_replica_sees_no_strategy_which_keras_would_divide_its_loss_for(in_two_replicas: Any) -> None:
    """Once the first line is 5.0, the strategy need not be hidden."""
    out = in_two_replicas("""
        visible = strategy.experimental_local_results(strategy.run(lambda: loss(tf.zeros_like(y), y)))
        print(float(visible[0]))
        hidden = [None, None]
        def replica(index, merge):
            hidden[index] = float(loss(tf.zeros_like(y), y)), tf.distribute.has_strategy(), index
        tf_compat.call_for_each_replica(strategy, replica)
        print(hidden)
    """)
    assert out.splitlines() == ["2.5", "[(5.0, False, 0), (5.0, False, 1)]"]


@pytest.mark.parametrize("again", [False, True])
def test_a_function_of_the_script_is_traced_for_each_replica(in_two_replicas: Any, again: bool) -> None:
    """Once the first one says that it is, `_functions_traced_for_each_device` can go."""
    out = in_two_replicas(f"""
        import contextlib
        if not {again}:
            tf_compat._functions_traced_for_each_device = contextlib.nullcontext
        values, read = [tf.Variable(1.0), tf.Variable(2.0)], [None, None]
        current = []
        @tf.function
        def inner():
            return values[current[-1]].read_value()
        def replica(index, merge):
            current.append(index)
            read[index] = inner()
        @tf.function(autograph=False)
        def outer():
            tf_compat.call_for_each_replica(strategy, replica)
            return list(read)
        print([float(value) for value in outer()])
    """)
    assert out == ("[1.0, 2.0]\n" if again else "[1.0, 1.0]\n")


def test_a_task_of_a_cluster_has_no_public_way_to_be_left_out() -> None:
    """Once a dead worker can publicly be removed from a cluster and added again, the private way can go."""
    public = {name for module in (tf.config, tf.config.experimental, tf.distribute) for name in dir(module)}
    assert not {name for name in public if "update_server" in name or "disconnect" in name or "alive" in name}
    assert callable(tf_compat.context.context().update_server_def)
    for name in ("get_server_def", "check_alive"):
        assert callable(getattr(tf_compat.context, name))


def test_a_thread_has_no_public_executor_of_its_own() -> None:
    assert not {name for name in dir(tf.config.experimental) if "executor" in name}
    before = tf_compat.context.context().executor
    with tf_compat.separate_executor():
        assert tf_compat.context.context().executor is not before
        assert float(tf.constant(2.0) + 1) == 3.0


def test_a_variable_cannot_be_made_in_each_call() -> None:
    """Once it can, `temporary_variable` can go."""

    @tf.function
    def made() -> tf.Tensor:
        return tf.Variable(1.0).read_value()

    with pytest.raises(ValueError, match="tf.function only supports singleton tf.Variables"):
        made()


@pytest.mark.parametrize("again", [False, True])
def test_a_function_does_not_see_variables_that_no_creator_of_its_own_made(again: bool) -> None:
    """Once it does, and traces again by itself, `trace_again` can go."""
    made: list[tf.Variable] = []
    seen = []

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        seen.append(len(made))
        if not made:
            with tf.init_scope(), tf_compat.variables_made_by():
                made.append(tf.Variable(2.0))
            if again:
                tf_compat.trace_again()
        return value * (made[0] if len(seen) > 1 else 1.0)

    assert [float(step(tf.constant(3.0))) for _ in range(2)] == ([6.0, 6.0] if again else [3.0, 3.0])
    assert seen == ([0, 1] if again else [0])


def test_a_strategy_outlives_the_default_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once TensorFlow itself keeps it, `set_strategy` can go."""
    from tensorflow.python.framework import ops

    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    monkeypatch.setattr(ops._default_graph_stack, "reset", ops._default_graph_stack.reset)
    try:
        tf.distribute.experimental_set_strategy(strategy)
        keras.utils.clear_session()
        assert not tf.distribute.has_strategy()
        tf_compat.set_strategy(strategy)
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is strategy
    finally:
        tf.distribute.experimental_set_strategy(None)


def test_the_variables_of_a_strategy_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once TensorFlow's own variables are, `add_number_conversions` can go."""
    from tensorflow.python.distribute import values

    for name in ("__float__", "__int__"):
        monkeypatch.delattr(values.DistributedVariable, name, raising=False)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        variable = keras.Variable(2.5)
    with pytest.raises(TypeError, match="MirroredVariable"):
        float(variable)
    tf_compat.add_number_conversions()
    assert (float(variable), int(variable)) == (2.5, 2)
    for name in ("__float__", "__int__"):
        delattr(values.DistributedVariable, name)


def test_devices_of_several_processes_have_no_public_strategy() -> None:
    """Once the constructor takes them, `mirrored_strategy` can go."""
    remote = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]
    with pytest.raises(RuntimeError, match="In-graph multi-worker training"):
        tf.distribute.MirroredStrategy(remote)
    # Nothing is made on them, so a worker that is lost at this moment does no harm: these workers aren't even there.
    strategy = tf_compat.mirrored_strategy(remote, tf.distribute.ReductionToOneDevice())
    assert strategy.num_replicas_in_sync == 2


@pytest.mark.parametrize("reduces", [True, False])
def test_every_condition_around_a_reduction_is_seen(reduces: bool) -> None:
    seen: list[Any] = []

    def branch() -> Any:
        if reduces:
            tf_graphs.note_reduction()
        return tf.constant(1.0)

    @tf.function(autograph=False)
    def by_hand(x: Any) -> Any:
        return tf.cond(x > 0, branch, lambda: tf.constant(0.0))

    @tf.function
    def translated(x: Any) -> Any:
        result = tf.constant(0.0)
        if x > 0:
            result = tf.autograph.experimental.do_not_convert(branch)()
        return result

    plain = tf.cond
    with tf_graphs.checked_conditions(lambda condition: seen.append(condition) or condition):
        for function in (by_hand, translated):
            assert [float(function(tf.constant(x))) for x in (1.0, -1.0)] == [1.0, 0.0]
        assert tf.cond(tf.constant(True), lambda: [1], lambda: [2]) == [1]  # `tf.cond` keeps a list of one
    assert tf.cond is plain
    assert len(seen) == (2 if reduces else 0)


def test_tensorflow_warns_of_what_is_traced_often(caplog: pytest.LogCaptureFixture) -> None:
    """Once it has a public way to say that this is meant, `often_traced` is not needed."""
    tf.get_logger().propagate = True
    try:
        for make, warned in ((tf.function, True), (tf_compat.often_traced, False)):
            caplog.clear()
            function = make(lambda x, name: x)
            for number in range(12):
                function(tf.constant(1), f"name_{number}")
            assert ("retracing" in caplog.text) == warned
    finally:
        tf.get_logger().propagate = False


CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
INDEX = tf.constant([[1]])


def rows(*values: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.range(len(values)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign([5.0, 6.0]),
    "assign_add": lambda v: v.assign_add([1.0, 1.0]),
    "assign_sub": lambda v: v.assign_sub([1.0, 1.0]),
    "batch_scatter_update": lambda v: v.batch_scatter_update(rows(7.0)),
    **{
        f"scatter_{op}": lambda v, op=op: getattr(v, f"scatter_{op}")(rows(-7.0 if op == "min" else 7.0))
        for op in ("add", "div", "max", "min", "mul", "sub", "update")
    },
    **{
        f"scatter_nd_{op}": lambda v, op=op: getattr(v, f"scatter_nd_{op}")(INDEX, [-7.0 if op == "min" else 7.0])
        for op in ("add", "max", "min", "sub", "update")
    },
    "_strided_slice_assign": lambda v: v[1].assign(7.0),
    "_restore_from_tensors": lambda v: v._restore_from_tensors({"VARIABLE_VALUE": tf.constant([8.0, 9.0])}),
}


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_copy_is_changed_with_its_variable(change: str, in_graph: bool) -> None:
    variable = tf.Variable([3.0, 4.0])
    copy = tf_compat.copy_on(variable, CPU)
    assert copy is not variable
    assert tf_compat.copy_on(variable, CPU) is copy
    write = tf.function(CHANGES[change]) if in_graph and change != "_restore_from_tensors" else CHANGES[change]
    write(variable)
    assert variable.numpy().tolist() != [3.0, 4.0]
    assert copy.numpy().tolist() == variable.numpy().tolist()


def test_no_method_that_changes_a_variable_is_missed() -> None:
    """Fails when TensorFlow has another one."""
    reading = {"_assign_dependencies", "_name_based_attribute_restore", "_name_based_restores"}
    words = ("assign", "scatter", "restore", "count_up")
    found = {name for name in dir(type(tf.Variable(1.0))) if any(word in name for word in words)}
    assert found - reading == set(tf_compat.WRITES)
    assert set(tf_compat.WRITES) == {*CHANGES, "count_up_to"}


def test_whoever_uses_the_sum_of_one_device_runs_the_sums_of_all() -> None:
    """In the traced graph, without GPUs: NCCL would wait for ever for a device whose sum TensorFlow has dropped."""
    backend = Mirrored()
    gpus = [f"/job:localhost/replica:0/task:0/device:GPU:{index}" for index in range(4)]
    backend._use(gpus, gpus[0], tf.distribute.NcclAllReduce(), mirrors=True)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        def replica(index: int) -> Any:
            sums, _ = backend.all_reduce([x * (index + 1.0), x + 1.0], tf.zeros([1]), "sums")
            return sums

        return backend.run(replica, [tf.constant(1)] * 4)[1][0]  # all that is used

    graph = step.get_concrete_function(tf.TensorSpec([3])).graph
    found, waiting = set(), [graph.outputs[0].op]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [*(tensor.op for tensor in current.inputs), *current.control_inputs]
    devices = sorted(op.device[-5:] for op in found if op.type == "NcclAllReduce")
    assert devices == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    assert graph.outputs[0].op.inputs[0].op.device == gpus[1]  # where it is used
