"""The stages and the order of a dataset, which tf.data does not expose. TensorFlow 2.21, 2026-11."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    dataset_ops,
    filter_op,
    flat_map_op,
    from_tensors_op,
    interleave_op,
    map_op,
    prefetch_op,
    random_op,
    repeat_op,
    shuffle_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry, random_seed

from keras_dist.compat.keras_random import DRAWN_ORDER
from keras_dist.compat.tf_compat import nodes_of, patched


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without TensorFlow's autotuning, unless the script has asked for it.

    An iterator that is dropped before its end, as Keras does after each epoch, may wait until its tuner wakes up. That
    sleeps twice as long each time, up to a minute, and all ranks wait for the slowest (TensorFlow 2.21). Without the
    tuner, a stage with `tf.data.AUTOTUNE` uses all threads from the start.
    """
    with warnings.catch_warnings():  # in a trace only the options that were set there are known: those of the script
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options", UserWarning)
        is_set = dataset.options().autotune.enabled is not None
    if is_set:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    options.autotune.initial_parallelism = os.cpu_count() or 1  # by default at most 16
    return dataset.with_options(options)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The last stage of a dataset, which tf.data does not expose.

    `again` applies the same stage to another input, a shuffle with the same seeds. `"other"` returns the dataset.
    """

    kind: str  # of `_KINDS`; "cache" is one in memory; or "other"
    input: tf.data.Dataset | None  # the dataset before this stage; `None` for "other"
    arguments: dict[str, Any]  # tensors if they are not known yet
    again: Callable[[tf.data.Dataset], tf.data.Dataset]


_BATCH = {"batch_size": "_batch_size", "drop_remainder": "_drop_remainder"}
_KINDS: dict[type, tuple[str, dict[str, str]]] = {
    batch_op._BatchDataset: ("batch", _BATCH),
    batch_op._ParallelBatchDataset: ("batch", _BATCH),
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

    def known(argument: Any) -> Any:
        value = tf.get_static_value(argument)
        return argument if value is None else value.item()

    arguments = {name: known(getattr(dataset, private)) for name, private in names.items()}

    def again(other: tf.data.Dataset) -> tf.data.Dataset:
        if kind == "map":
            calls = tf.data.AUTOTUNE if is_parallel(dataset) else None
            return other.map(one_argument(map_function(dataset), other), calls)
        if kind == "options":
            return other.with_options(dataset.options())
        if kind == "shuffle":
            seeds, reshuffle = (int(dataset._seed), int(dataset._seed2)), dataset._reshuffle_each_iteration
            with patched(random_seed, get_seed=lambda op_seed: seeds):
                return other.shuffle(arguments["buffer_size"], reshuffle_each_iteration=reshuffle)
        return getattr(other, kind)(**arguments)

    return Stage(kind, dataset._input_dataset, arguments, again)


def one_argument(function: Callable[[Any], Any], dataset: tf.data.Dataset) -> Callable[..., Any]:
    """Lets a function of one element follow `Dataset.map`, which unpacks tuples."""
    unpacks = type(dataset.element_spec) is tuple
    return lambda *parts: function(parts if unpacks else parts[0])


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


def map_digest(dataset: tf.data.Dataset) -> str:
    """Returns a text for the operations, constants and captured tensors of a map, the last stage of a dataset.

    It is the same in each process. Where a dataset function is traced, nobody compares, and the text is empty.
    """
    if not tf.executing_eagerly():
        return ""
    # With any other input, or the data would be hashed too.
    other = tf.data.experimental.to_variant(tf.data.Dataset.range(0))
    mapped = last_stage(dataset).again(tf.data.experimental.from_variant(other, dataset._input_dataset.element_spec))
    ignored = tf.data.experimental.ExternalStatePolicy.IGNORE
    graph = graph_pb2.GraphDef.FromString(mapped._as_serialized_graph(external_state_policy=ignored).numpy())
    for node in nodes_of(graph):  # a call of a function has the settings of its process: of multi_worker its own task
        node.attr.pop("config_proto", None)
    plain = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    return str(tf.raw_ops.DatasetFingerprint(input_dataset=plain).numpy())


def is_stateless(dataset: tf.data.Dataset) -> bool:
    """True if the last stage, a map, uses no random numbers, Python functions, tables, counters or prints."""
    return not stateful_operations(dataset)


def gather_of(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.data.Dataset, Sequence[Any]] | None:
    """Returns the arrays and the rows that make up a dataset, `None` if its last stage, a map, does anything else.

    Keras makes batches of arrays by `zip(indices, arrays).map(gather)`. These are the dataset of indices, the endless
    one of all arrays, and the arrays.
    """
    zipped = dataset._input_dataset
    parts = zipped._datasets if isinstance(zipped, zip_op._ZipDataset) else ()
    if not (isinstance(parts, tuple) and len(parts) == 2 and isinstance(parts[1], repeat_op._RepeatDataset)):
        return None
    indices, arrays = parts
    source = arrays._input_dataset
    if not isinstance(source, from_tensors_op._TensorDataset) or not _gathers_rows(dataset._map_func.function.graph):
        return None
    return indices, arrays, tuple(source._tensors)


def _gathers_rows(graph: Any) -> bool:
    """True if each output of a graph has the rows of another input that the first input names."""

    def gathers(output: Any, array: Any) -> bool:
        while output.op.type == "Identity":
            output = output.op.inputs[0]
        if output.op.type != "GatherV2" or output.op.get_attr("batch_dims"):
            return False
        source, rows, axis = output.op.inputs
        return source is array and rows is indices and tf.get_static_value(axis) == 0

    indices, *arrays = graph.inputs
    return len(graph.outputs) == len(arrays) and all(map(gathers, graph.outputs, arrays))


def stateful_operations(dataset: tf.data.Dataset) -> set[str]:
    """Returns the types of the operations with a state in the function of a map, the last stage of a dataset."""

    def is_stateful(op: str) -> bool:
        definition = op_def_registry.get(op)
        return definition is None or definition.is_stateful

    graph = dataset._map_func.function.graph.as_graph_def()
    # Most of the operations that are left out only call functions, whose operations are checked separately.
    harmless = {"StatefulPartitionedCall", "If", "While", "Case", "Assert", "Placeholder"}
    harmless |= {function.signature.name for function in graph.library.function}
    return {op for op in {node.op for node in nodes_of(graph)} - harmless if is_stateful(op)}


def is_map(dataset: tf.data.Dataset) -> bool:
    return isinstance(dataset, map_op._MapDataset | map_op._ParallelMapDataset)


def is_parallel(dataset: tf.data.Dataset) -> bool:
    """True if a map, the last stage of a dataset, is of several elements at a time, in any order."""
    return isinstance(dataset, map_op._ParallelMapDataset)


Seed = tuple[int, int]
# How operations begin that draw numbers, and no order. (Keras shuffles arrays by `RandomShuffle` in a map.)
_VALUES = ("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomGamma", "RandomPoisson", "Multinomial")
# They draw an order when an iterator over them is made. Random functions begin again in each iteration.
_DRAWING = (shuffle_op._ShuffleDataset, random_op._RandomDataset)
# They make one iterator over their input, at once.
_ITERATING_ONCE = (filter_op._FilterDataset, *(
    cls for cls, (kind, _) in _KINDS.items() if kind not in ("repeat", "shuffle", "cache")
))  # fmt: skip


def seeds_of(dataset: tf.data.Dataset) -> tuple[list[Seed], list[Seed]]:
    """Returns the seeds that decide which elements come in which order, and those of random numbers in maps only.

    They are in a fixed order. (0, 0) is drawn from the clock.
    """
    orders, values = list[Seed](), list[Seed]()
    for stage in _stages(dataset):
        if isinstance(stage, _DRAWING):
            orders.append((int(stage._seed), int(stage._seed2)))
        for op, seed in _seeds_of_functions(stage):
            (values if is_map(stage) and op.startswith(_VALUES) else orders).append(seed)
    return orders, values


def _seeds_of_functions(stage: Any) -> Iterator[tuple[str, Seed]]:
    """Yields the operations in the functions of a stage that have seeds, and these."""
    graphs = [function.function.graph.as_graph_def() for function in stage._functions()]
    for nodes in [body for graph in graphs for body in (graph.node, *(f.node_def for f in graph.library.function))]:
        constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        for node in nodes:
            if "seed2" in node.attr:
                yield node.op, (node.attr["seed"].i, node.attr["seed2"].i)
            elif node.op == "StatelessShuffle" and DRAWN_ORDER in node.name:
                yield node.op, (0, 0)
            elif node.op.startswith(("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")):
                inputs = [constants.get(name.split(":")[0]) for name in node.input if "seed" in name.rsplit("/", 1)[-1]]
                first, second = (0 if value is None else int(tf.make_ndarray(value)) for value in inputs[:2])
                yield node.op, (first, second)


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """True if the last stage of a dataset is a shuffle that draws another order in each iteration."""
    return isinstance(dataset, shuffle_op._ShuffleDataset) and _is_drawing(dataset)


def is_unseeded(stage: tf.data.Dataset) -> bool:
    """True if a map, the last stage of a dataset, has no state but random numbers that are others in each run."""
    seeds = [*_seeds_of_functions(stage)]
    return stateful_operations(stage) == {op for op, _ in seeds} and {seed for _, seed in seeds} == {(0, 0)}


def may_differ(dataset: tf.data.Dataset) -> bool:
    """True if another process that reads the same dataset may get other values from the functions of its maps.

    They draw random numbers without a seed; or their order is open, since several elements are mapped at a time; or the
    order of the elements is, by `deterministic=False`.
    """
    return any(_values_may_differ(stage) for stage in _stages(dataset))


def _values_may_differ(stage: tf.data.Dataset) -> bool:
    nesting = (flat_map_op._FlatMapDataset, interleave_op._InterleaveDataset, interleave_op._ParallelInterleaveDataset)
    if isinstance(stage, nesting):  # several of the datasets that its functions make may be read at a time
        return any(op.startswith(_VALUES) for op, _ in _seeds_of_functions(stage))
    if is_parallel(stage) and stage._deterministic == "false":
        return True
    if not is_map(stage) or is_stateless(stage):
        return False
    return is_parallel(stage) or any(seed == (0, 0) for _, seed in _seeds_of_functions(stage))


def redraws(dataset: tf.data.Dataset) -> bool:
    """True if a dataset has another order in each iteration."""
    return any(_is_drawing(stage) for stage in _stages(dataset))


def draws_at_once(dataset: tf.data.Dataset) -> bool:
    """True if each iterator over a dataset draws its order when it is made, not while it is read."""
    while not _is_drawing(dataset):
        if not isinstance(dataset, _ITERATING_ONCE):
            return not redraws(dataset)
        (dataset,) = dataset._inputs()
    return not any(redraws(part) for part in dataset._inputs())


def _is_drawing(stage: tf.data.Dataset) -> bool:
    return isinstance(stage, _DRAWING) and bool(getattr(stage, "_reshuffle_each_iteration", True))


def _stages(dataset: tf.data.Dataset) -> Iterator[dataset_ops.DatasetV2]:
    yield dataset
    for part in dataset._inputs():
        yield from _stages(part)
