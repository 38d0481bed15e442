"""Functions that are part of a traced graph. TensorFlow 2.20 to 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when one of its assumptions no longer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


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
    nodes: dict[str, Any] = {}
    used: dict[str, int] = {}
    pending = [output]
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if tensor.name in indices:
            used[tensor.name] = indices[tensor.name]
        elif operation.name not in nodes:
            if not _is_pure(operation):
                return None
            nodes[operation.name] = _node(operation)
            pending.extend(operation.inputs)
    if not used:
        return None
    graph = tf.compat.v1.GraphDef(node=nodes.values(), versions=output.graph.graph_def_versions)

    def compute(*values: Any) -> Any:
        (result,) = tf.import_graph_def(graph, dict(zip(used, values, strict=True)), [output.name], name="")
        return result

    specs = [tf.TensorSpec(inputs[index].shape, inputs[index].dtype) for index in used.values()]
    return tf.function(compute, autograph=False).get_concrete_function(*specs), [*used.values()]


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
