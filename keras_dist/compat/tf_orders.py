"""What decides the order of a dataset, which tf.data does not expose. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_orders.py` fails when one of these names changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    filter_op,
    flat_map_op,
    interleave_op,
    map_op,
    prefetch_op,
    random_op,
    shuffle_op,
    skip_op,
    take_op,
)

from keras_dist.compat.tf_seeds import DRAWN_ORDER
from keras_dist.compat.tf_stages import is_map, is_parallel, is_stateless, is_unordered, stateful_operations

Seed = tuple[int, int]
# How operations begin that draw numbers, and no order. (Keras shuffles arrays by `RandomShuffle` in a map.)
_VALUES = ("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomGamma", "RandomPoisson", "Multinomial")
# They draw an order when an iterator over them is made. Random functions begin anew in each iteration.
_DRAWING = (shuffle_op._ShuffleDataset, random_op._RandomDataset)
# Their functions make datasets.
_NESTING = (
    flat_map_op._FlatMapDataset, interleave_op._InterleaveDataset, interleave_op._ParallelInterleaveDataset
)  # fmt: skip
# They make one iterator over their input, at once.
_ITERATING_ONCE = (
    batch_op._BatchDataset, batch_op._ParallelBatchDataset, dataset_ops._OptionsDataset, filter_op._FilterDataset,
    map_op._MapDataset, map_op._ParallelMapDataset, prefetch_op._PrefetchDataset, skip_op._SkipDataset,
    take_op._TakeDataset,
)  # fmt: skip


@dataclasses.dataclass
class Seeds:
    """The seeds in a dataset, in a fixed order. (0, 0): drawn from the clock.

    Args:
        orders: Those that decide which elements come, and in which order.
        values: Those that only decide values: of random numbers in the functions of maps.
    """

    orders: list[Seed] = dataclasses.field(default_factory=list)
    values: list[Seed] = dataclasses.field(default_factory=list)


def seeds_of(dataset: tf.data.Dataset) -> Seeds:
    """Returns the seeds of the stages and functions of a dataset."""
    seeds = Seeds()
    for stage in _stages(dataset):
        if isinstance(stage, _DRAWING):
            seeds.orders.append(_seed_of(stage))
        for op, seed in _seeds_of_functions(stage):
            only_values = is_map(stage) and op.startswith(_VALUES)
            (seeds.values if only_values else seeds.orders).append(seed)
    return seeds


def _seed_of(stage: Any) -> Seed:
    return int(stage._seed), int(stage._seed2)


def _seeds_of_functions(stage: Any) -> list[tuple[str, Seed]]:
    found: list[tuple[str, Seed]] = []
    for function in stage._functions():
        graph = function.function.graph.as_graph_def()
        for nodes in ([*graph.node], *([*inner.node_def] for inner in graph.library.function)):
            found += _seeds_of_nodes(nodes)
    return found


def _seeds_of_nodes(nodes: list[Any]) -> Iterator[tuple[str, Seed]]:
    """Yields the operations that have seeds, and these."""
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
    seeds = _seeds_of_functions(stage)
    return stateful_operations(stage) == {op for op, _ in seeds} and {seed for _, seed in seeds} == {(0, 0)}


def may_differ(dataset: tf.data.Dataset) -> bool:
    """True if another process that reads the same dataset may get other values from the functions of its maps.

    They draw random numbers without a seed; or their order is open, since several elements are mapped at a time; or the
    order of the elements is, by `deterministic=False`.
    """
    return any(_values_may_differ(stage) for stage in _stages(dataset))


def _values_may_differ(stage: tf.data.Dataset) -> bool:
    if isinstance(stage, _NESTING):  # several of the datasets that it makes may be read at a time
        return any(op.startswith(_VALUES) for op, _ in _seeds_of_functions(stage))
    if not is_map(stage):
        return False
    if is_unordered(stage):
        return True
    if is_stateless(stage):
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
