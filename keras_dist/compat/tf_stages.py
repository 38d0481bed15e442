"""The stages of a dataset, which tf.data does not expose. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_stages.py` fails when one of these names changes or is no longer needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    dataset_ops,
    flat_map_op,
    from_tensors_op,
    map_op,
    prefetch_op,
    repeat_op,
    shuffle_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry, random_seed


@dataclasses.dataclass(frozen=True)
class Stage:
    """The last stage of a dataset, which tf.data does not expose.

    Args:
        kind: `"batch"`, `"map"`, `"repeat"`, `"prefetch"`, `"shuffle"`, `"take"`, `"skip"`, `"options"`, `"cache"` in
            memory, or `"other"`.
        input: The dataset before this stage; `None` for `"other"`.
        arguments: `batch_size` and `drop_remainder` of a `"batch"`, `count` of a `"repeat"`, `"take"` or `"skip"`,
            `buffer_size` of a `"prefetch"` or `"shuffle"`; tensors if they are not known yet.
        again: Applies the same stage to another input, a shuffle with the same seeds. `"other"` returns the dataset.
    """

    kind: str
    input: tf.data.Dataset | None
    arguments: dict[str, Any]
    again: Callable[[tf.data.Dataset], tf.data.Dataset]


_BATCH = ("batch", {"batch_size": "_batch_size", "drop_remainder": "_drop_remainder"})
_KINDS: dict[type, tuple[str, dict[str, str]]] = {
    batch_op._BatchDataset: _BATCH,
    batch_op._ParallelBatchDataset: _BATCH,
    map_op._MapDataset: ("map", {}),
    map_op._ParallelMapDataset: ("map", {}),
    repeat_op._RepeatDataset: ("repeat", {"count": "_count"}),
    prefetch_op._PrefetchDataset: ("prefetch", {"buffer_size": "_buffer_size"}),
    shuffle_op._ShuffleDataset: ("shuffle", {"buffer_size": "_buffer_size"}),
    dataset_ops._OptionsDataset: ("options", {}),
    cache_op.CacheDataset: ("cache", {}),
    take_op._TakeDataset: ("take", {"count": "_count"}),
    skip_op._SkipDataset: ("skip", {"count": "_count"}),
}


def last_stage(dataset: tf.data.Dataset) -> Stage:
    kind, names = _KINDS.get(type(dataset), ("other", {}))
    if kind == "other" or (kind == "cache" and tf.get_static_value(dataset._filename)):
        return Stage("other", None, {}, lambda other: dataset)
    arguments = {name: _known(getattr(dataset, private)) for name, private in names.items()}
    methods: dict[str, Callable[[tf.data.Dataset], tf.data.Dataset]] = {
        "map": lambda other: _mapped_again(dataset, other),
        "options": lambda other: other.with_options(dataset.options()),
        "shuffle": lambda other: _shuffled_again(dataset, other),
    }
    again = methods.get(kind, lambda other: getattr(other, kind)(**arguments))
    return Stage(kind, dataset._input_dataset, arguments, again)


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """True if a map, the last stage of a dataset, was given `deterministic=False`."""
    return is_parallel(dataset) and dataset._deterministic == "false"


def _known(argument: Any) -> Any:
    value = tf.get_static_value(argument)
    return argument if value is None else value.item()


def _mapped_again(dataset: tf.data.Dataset, other: tf.data.Dataset) -> tf.data.Dataset:
    calls = tf.data.AUTOTUNE if is_parallel(dataset) else None
    return other.map(one_argument(map_function(dataset), other), calls)


def _shuffled_again(dataset: tf.data.Dataset, other: tf.data.Dataset) -> tf.data.Dataset:
    seeds, get_seed = (int(dataset._seed), int(dataset._seed2)), random_seed.get_seed
    random_seed.get_seed = lambda op_seed: seeds
    try:
        again = dataset._reshuffle_each_iteration
        return other.shuffle(_known(dataset._buffer_size), reshuffle_each_iteration=again)
    finally:
        random_seed.get_seed = get_seed


def one_argument(function: Callable[[Any], Any], dataset: tf.data.Dataset) -> Callable[..., Any]:
    """Lets a function of one element follow `Dataset.map`, which unpacks tuples."""
    unpacks = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def mapped(*parts: Any) -> Any:
        return function(parts if unpacks else parts[0])

    return mapped


def is_made_by_python(dataset: tf.data.Dataset) -> bool:
    """True for `from_generator`, also with `prefetch` after it, as Keras reads a `PyDataset` or a generator."""
    while (stage := last_stage(dataset)).kind in ("prefetch", "options"):
        dataset = stage.input
    if not isinstance(dataset, flat_map_op._FlatMapDataset):
        return False
    return any(operation.type == "GeneratorDataset" for operation in dataset._map_func.function.graph.get_operations())


def map_function(dataset: tf.data.Dataset) -> Callable[[Any], Any]:
    """Returns the traced function of a map, the last stage of a dataset, for one element.

    If it were traced again, a function with Python's random numbers would change.
    """
    wrapper = dataset._map_func

    def mapped(element: Any) -> Any:
        outputs = wrapper.function(*structure.to_tensor_list(wrapper._input_structure, element))
        return structure.from_compatible_tensor_list(wrapper.output_structure, outputs)

    return mapped


def is_stateless(dataset: tf.data.Dataset) -> bool:
    """True if a map, the last stage of a dataset, always returns the same for the same element.

    False if it uses random numbers, Python functions, tables, counters or prints.
    """
    return not stateful_operations(dataset)


@dataclasses.dataclass(frozen=True)
class Gather:
    """The way Keras makes batches of arrays: `zip(indices, arrays).map(gather)`.

    Args:
        indices: Dataset of int64 tensors of shape `(batch,)`.
        arrays: Endless dataset of the arrays, each time all of them.
        tensors: The arrays as tensors.
        element_spec: The specification of a batch.
    """

    indices: tf.data.Dataset
    arrays: tf.data.Dataset
    tensors: Sequence[Any]
    element_spec: Any


def gather_of(dataset: tf.data.Dataset) -> Gather | None:
    """Returns how a dataset gathers rows of arrays if its last stage does nothing else, `None` otherwise."""
    zipped = dataset._input_dataset
    parts = zipped._datasets if isinstance(zipped, zip_op._ZipDataset) else ()
    if not (isinstance(parts, tuple) and len(parts) == 2 and isinstance(parts[1], repeat_op._RepeatDataset)):
        return None
    indices, arrays = parts
    source = arrays._input_dataset
    if not isinstance(source, from_tensors_op._TensorDataset) or not _gathers_rows(dataset._map_func.function.graph):
        return None
    return Gather(indices, arrays, tuple(source._tensors), dataset.element_spec)


def _gathers_rows(graph: Any) -> bool:
    """True if each output of a graph has the rows of another input that the first input names."""
    indices, *arrays = graph.inputs
    return len(graph.outputs) == len(arrays) and all(
        (gather := _behind_identities(output)).op.type == "GatherV2"
        and not gather.op.get_attr("batch_dims")
        and gather.op.inputs[0] is array
        and gather.op.inputs[1] is indices
        and tf.get_static_value(gather.op.inputs[2]) == 0
        for output, array in zip(graph.outputs, arrays, strict=True)
    )


def _behind_identities(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def stateful_operations(dataset: tf.data.Dataset) -> set[str]:
    """Returns the types of the operations with a state in the function of a map, the last stage of a dataset."""
    graph = dataset._map_func.function.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    functions = {function.signature.name for function in graph.library.function}
    return {node.op for node in nodes if node.op not in functions and _is_stateful(node.op)}


def is_map(dataset: tf.data.Dataset) -> bool:
    """True if the last stage of a dataset is a map."""
    return isinstance(dataset, map_op._MapDataset | map_op._ParallelMapDataset)


def is_parallel(dataset: tf.data.Dataset) -> bool:
    """True if a map, the last stage of a dataset, is of several elements at a time, in any order."""
    return isinstance(dataset, map_op._ParallelMapDataset)


# Most of these only call functions, whose operations are checked separately.
_HARMLESS = {"StatefulPartitionedCall", "If", "While", "Case", "Assert"}


def _is_stateful(op: str) -> bool:
    definition = op_def_registry.get(op)
    return op not in _HARMLESS and (definition is None or definition.is_stateful) and op != "Placeholder"
