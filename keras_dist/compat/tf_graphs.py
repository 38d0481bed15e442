"""Captures, conditions and functions of traced graphs. TensorFlow 2.20 to 2.21, 2026-11."""

import contextlib
import contextvars
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from keras_dist.compat import keras_model
from keras_dist.compat.tf_compat import context_value, nodes_of, often_traced, patched


def constants_of(graph: tf.Graph) -> list[tuple[str, str, str]]:
    """Returns name, type and hash of each constant in a graph, and of each captured tensor that is no resource."""
    found = []
    for node in nodes_of(graph.as_graph_def()):
        if node.op == "Const":
            proto = node.attr["value"].tensor
            found.append((node.name, tf.as_dtype(proto.dtype), tf.TensorShape(proto.tensor_shape), proto))
    for outer, inner in getattr(graph, "captures", ()):
        value = _eager(outer)
        if value is not None and value.dtype not in (tf.resource, tf.variant):
            found.append((inner.op.name, value.dtype, value.shape, tf.make_tensor_proto(value.numpy())))
    constants = []
    for name, dtype, shape, proto in found:
        # Fewer integers are shapes, axes and seeds, which may differ between ranks.
        if dtype.is_floating or dtype == tf.string or shape.num_elements() >= 8:
            digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
            constants.append((name, f"{dtype.name}{tuple(shape)}", digest[:16]))
    return constants


def _eager(tensor: Any) -> Any:
    """Returns the value that a graph has captured through the graphs around it, `None` if it is computed there."""
    while not hasattr(tensor, "numpy"):
        outer = [value for value, inner in getattr(tensor.graph, "captures", ()) if inner is tensor]
        if not outer:
            return None
        tensor = outer[0]
    return tensor


def inside_call(tensor: Any) -> tuple[Any, list[tuple[Any, Any]]] | None:
    """Returns the tensor of a function's graph that is an output of its call, `None` if a tensor is no such output.

    With it come pairs of a placeholder in that graph and the argument that it stands for.
    """
    operation = tensor.op
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    graph = getattr(operation.graph._get_function(operation.get_attr("f").name), "graph", None)
    if graph is None:  # of a graph that was loaded
        return None
    return graph.outputs[tensor.value_index], list(zip(graph.inputs, operation.inputs, strict=True))


def is_of_outer_graph(placeholder: Any) -> bool:
    """True if a placeholder stands for what another function computes: no variable, no eager tensor."""
    outer = [external for external, internal in getattr(placeholder.graph, "captures", ()) if internal is placeholder]
    return any(tf.is_symbolic_tensor(each) and each.dtype not in (tf.resource, tf.variant) for each in outer)


def concatenated(length: Any, of_each: int | None) -> int:
    """Returns how many batches were concatenated along the first axis to a tensor with this length, 1 if none were.

    Those of a tensor from which the length comes; if it is a number, of any tensor with so many rows. `of_each` is the
    static length of a batch.
    """
    if isinstance(length, int):
        waiting = [output for each in tf.compat.v1.get_default_graph().get_operations() for output in each.outputs]
        waiting = [output for output in waiting if output.shape.rank and output.shape[0] == length]
    else:
        waiting = [length]
    found = set[str]()
    while waiting:
        operation = waiting.pop().op
        if operation.name in found:
            continue
        found.add(operation.name)
        if operation.type == "ConcatV2" and tf.get_static_value(operation.inputs[-1]) == 0:
            parts = [part for part in operation.inputs[:-1] if part.shape.rank and part.shape[0] == of_each]
            if len(parts) > 1 and (of_each is None or parts[0].shape.rank > 1):
                return len(parts)
        waiting += [] if isinstance(length, int) else operation.inputs
    return 1


def current() -> Any:
    """Returns the graph that is being built, `None` where operations run at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outermost(graph: Any) -> Any:
    """Returns the graph of the function that is called eagerly: one that is traced is in no other one."""
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


def captured_variables(graph: Any) -> list[Any]:
    return [outer for outer, _ in graph.captures if outer.dtype == tf.resource and _data_of(outer) is not None]


def read_handle(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=_data_of(handle).dtype)


def _data_of(handle: Any) -> Any:
    """Returns shape and dtype of a variable's value, `None` for the handle of an iterator, a table ..."""
    data = get_eager_safe_handle_data(handle)
    return data.shape_and_type[0] if data is not None and data.is_set and data.shape_and_type else None


def script_operations(graph: Any, pattern: str) -> list[tuple[str, str]]:
    """Returns operations in a function's graph that the script has called itself, not by Keras.

    They are pairs of type and place, such as `"train.py:23"`. The pattern is for `"type name"` of an operation.
    """
    found = []
    for operation in operations_of(graph):
        if re.search(pattern, f"{operation.type} {operation.name}"):
            frames = [frame for frame in operation.traceback if "/tensorflow/" not in frame.filename]
            if frames and not re.search("/keras(_dist)?/", frames[-1].filename):
                found.append((operation.type, f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"))
    return found


def operations_of(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph and of all functions in it."""
    graphs = [graph]
    for current in graphs:  # grows meanwhile
        yield from current.get_operations()
        inner = [function.graph for function in current._functions.values() if hasattr(function, "graph")]
        graphs += [each for each in inner if not any(each is known for known in graphs)]


# What a reduction over the ranks raises here: in what XLA is to compile, or in a branch that only some ranks may take.
REFUSAL: contextvars.ContextVar[Exception | None] = contextvars.ContextVar("keras_dist_refusal", default=None)


class _Reduces(Exception):
    """Those who take this branch would wait for ever for the ranks that don't."""


def note_reduction() -> None:
    """Called before each reduction."""
    if (refusal := REFUSAL.get()) is not None:
        raise refusal


def checked_conditions(check: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Passes the predicate of each `tf.cond` that reduces in a branch through `check`, in this context.

    `check` takes a bool tensor and returns it, once it is known to be the same on all ranks.
    """
    plain = cond_module.cond

    def cond(pred: Any, *args: Any, **kwargs: Any) -> Any:
        is_kerass = keras_model.applying() is not None  # an optimizer's own are the same on all ranks
        if tf.executing_eagerly() or is_kerass or REFUSAL.get() is not None:
            return plain(pred, *args, **kwargs)
        with contextlib.suppress(_Reduces), context_value(REFUSAL, _Reduces()):
            return plain(pred, *args, **kwargs)
        pred = check(pred)
        with context_value(REFUSAL, None):
            return plain(pred, *args, **kwargs)

    return patched(cond_module, cond=cond)


def function_of(output: Any, inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[int]] | None:
    """Returns the function that computes one tensor from others of its graph, and the indices of its arguments in them.

    `None` if it needs anything else than `inputs` and constants, or none of them, and where there is no graph (eager).
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
        value = _traced(graph, [], output.name)()
    return value.numpy() if hasattr(value, "numpy") else None  # it has none in the scratch graph of a Keras trace


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
            # A pure operation depends on its inputs only, and calls no function.
            has_function = any(value.HasField("func") for value in operation.node_def.attr.values())
            if operation.op_def.is_stateful or has_function or operation.type.startswith("Placeholder"):
                return None, []
            # Without its place: its device, its core of a TPU, what it waits for.
            nodes[operation.name] = node = tf.compat.v1.NodeDef()
            node.CopyFrom(operation.node_def)
            node.device = ""
            for name in [name for name in node.attr if name.startswith("_")]:
                del node.attr[name]
            node.input[:] = [name for name in node.input if not name.startswith("^")]
            pending.extend(operation.inputs)
    return tf.compat.v1.GraphDef(node=nodes.values(), versions=output.graph.graph_def_versions), [*used]


def _traced(graph: Any, inputs: Sequence[str], output: str) -> Any:
    def compute(*values: Any) -> Any:
        (result,) = tf.import_graph_def(graph, dict(zip(inputs, values, strict=True)), [output], name="")
        return result

    return often_traced(compute)
