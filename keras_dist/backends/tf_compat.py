"""Every private name of TensorFlow that the library uses, each with the reason. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when one of them moves, or when it is no longer needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import batch_op, dataset_ops, map_op, prefetch_op, repeat_op
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry


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
