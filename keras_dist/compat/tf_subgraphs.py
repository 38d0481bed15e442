"""Functions that are part of a traced graph. TensorFlow 2.20 to 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when one of its assumptions no longer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import tensorflow as tf

from keras_dist.compat.tf_compat import often_traced


def function_of(output: Any, inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[int]] | None:
    """Returns the function that computes one tensor of a graph from others.

    Args:
        output: The tensor.
        inputs: Tensors of the same graph.

    Returns:
        The function, and the indices in `inputs` of its arguments. `None` if the tensor needs anything else than these
        and constants, or none of them; always `None` in eager execution, where there is no graph.
    """
    if not (tf.is_tensor(output) and tf.is_symbolic_tensor(output)):
        return None
    indices = {tensor.name: index for index, tensor in enumerate(inputs) if tf.is_symbolic_tensor(tensor)}
    graph, names = _subgraph(output, set(indices))
    if graph is None or not names:
        return None
    used = [indices[name] for name in names]
    specs = [tf.TensorSpec(inputs[index].shape, inputs[index].dtype) for index in used]
    return _traced(graph, names, output.name).get_concrete_function(*specs), used


def constant_of(output: Any) -> Any:
    """Returns the value of a tensor of a graph as an array, `None` if it is computed from more than constants.

    `tf.get_static_value` does not compute `tf.shape(tensor)[0]`.
    """
    graph, _ = _subgraph(output, set())
    if graph is None:
        return None
    with tf.init_scope():
        return _traced(graph, [], output.name)().numpy()


def _subgraph(output: Any, inputs: Set[str]) -> tuple[Any, list[str]]:
    """Returns the graph that computes a tensor, and those of the inputs that it needs; `None` if it is not pure."""
    nodes: dict[str, Any] = {}
    used: dict[str, None] = {}
    pending = [output]
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if tensor.name in inputs:
            used[tensor.name] = None
        elif operation.name not in nodes:
            if not _is_pure(operation):
                return None, []
            nodes[operation.name] = _node(operation)
            pending.extend(operation.inputs)
    return tf.compat.v1.GraphDef(node=nodes.values(), versions=output.graph.graph_def_versions), [*used]


def _traced(graph: Any, inputs: Sequence[str], output: str) -> Any:
    def compute(*values: Any) -> Any:
        (result,) = tf.import_graph_def(graph, dict(zip(inputs, values, strict=True)), [output], name="")
        return result

    return often_traced(compute)


def _is_pure(operation: Any) -> bool:
    """True if an operation depends on its inputs only, and calls no function."""
    has_function = any(value.HasField("func") for value in operation.node_def.attr.values())
    return not (operation.op_def.is_stateful or has_function or operation.type.startswith("Placeholder"))


def _node(operation: Any) -> Any:
    """Returns an operation without its place: its device, its core of a TPU, what it waits for."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    node.device = ""
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    waits_for = [name for name in node.input if name.startswith("^")]
    for name in waits_for:
        node.input.remove(name)
    return node
