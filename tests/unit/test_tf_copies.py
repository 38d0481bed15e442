"""Copies of variables: whatever changes the variable changes them, and NCCL never waits for a sum that was dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.local.replicas import Mirrored
from keras_dist.compat import tf_compat

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
INDEX = tf.constant([[1]])


def rows(*values: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.range(len(values)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign([5.0, 6.0]),
    "assign_add": lambda v: v.assign_add([1.0, 1.0]),
    "assign_sub": lambda v: v.assign_sub([1.0, 1.0]),
    "batch_scatter_update": lambda v: v.batch_scatter_update(rows(7.0)),
    "scatter_add": lambda v: v.scatter_add(rows(7.0)),
    "scatter_div": lambda v: v.scatter_div(rows(7.0)),
    "scatter_max": lambda v: v.scatter_max(rows(7.0)),
    "scatter_min": lambda v: v.scatter_min(rows(-7.0)),
    "scatter_mul": lambda v: v.scatter_mul(rows(7.0)),
    "scatter_sub": lambda v: v.scatter_sub(rows(7.0)),
    "scatter_update": lambda v: v.scatter_update(rows(7.0)),
    "scatter_nd_add": lambda v: v.scatter_nd_add(INDEX, [7.0]),
    "scatter_nd_max": lambda v: v.scatter_nd_max(INDEX, [7.0]),
    "scatter_nd_min": lambda v: v.scatter_nd_min(INDEX, [-7.0]),
    "scatter_nd_sub": lambda v: v.scatter_nd_sub(INDEX, [7.0]),
    "scatter_nd_update": lambda v: v.scatter_nd_update(INDEX, [7.0]),
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


def test_an_integer_counts_up_with_its_copy() -> None:
    variable = tf.Variable(3)
    copy = tf_compat.copy_on(variable, CPU)
    variable.count_up_to(5)
    assert (int(variable), int(copy)) == (4, 4)


def test_no_method_that_changes_a_variable_is_missed() -> None:
    """Fails when TensorFlow has another one."""
    reading = {"_assign_dependencies", "_name_based_attribute_restore", "_name_based_restores"}
    words = ("assign", "scatter", "restore", "count_up")
    found = {name for name in dir(type(tf.Variable(1.0))) if any(word in name for word in words)}
    assert found - reading == set(tf_compat.WRITES)
    assert set(tf_compat.WRITES) == {*CHANGES, "count_up_to"}


def test_a_device_updates_its_own() -> None:
    variable = tf.Variable([3.0, 4.0])
    copy = tf_compat.copy_on(variable, CPU)
    with tf_compat.following(False):
        variable.assign([1.0, 2.0])
    assert copy.numpy().tolist() == [3.0, 4.0]


def test_a_restored_checkpoint_reaches_the_copies(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")])
    variable = model.layers[0].kernel
    path = tf.train.Checkpoint(model=model).save(tmp_path / "at")
    copy = tf_compat.copy_on(variable.value, CPU)
    variable.assign([[5.0], [6.0]])
    assert copy.numpy().tolist() == [[5.0], [6.0]]
    tf.train.Checkpoint(model=model).restore(path).assert_consumed()
    assert copy.numpy().tolist() == np.asarray(variable).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("all_reduce", "operation"),
    [(tf.distribute.NcclAllReduce, "NcclAllReduce"), (tf.distribute.HierarchicalCopyAllReduce, "AddN")],
)
def test_whoever_uses_the_sum_of_one_device_runs_the_sums_of_all(all_reduce: Any, operation: str) -> None:
    """In the traced graph, without GPUs: NCCL would wait for ever for a device whose sum TensorFlow has dropped."""
    backend = Mirrored()
    gpus = [f"/job:localhost/replica:0/task:0/device:GPU:{index}" for index in range(4)]
    backend._use(gpus, gpus[0], all_reduce(), mirrors=True)

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
    devices = sorted(op.device[-5:] for op in found if op.type == operation)
    if operation == "NcclAllReduce":
        assert devices == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
        assert graph.outputs[0].op.inputs[0].op.device == gpus[1]  # where it is used
    else:  # nothing waits for another device: what is not used may go
        assert devices
        assert set(devices) <= {"GPU:0", "GPU:1", "GPU:2", "GPU:3"}
