"""What decides the order of a dataset, which tf.data does not expose. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_orders.py` fails when one of these names changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    filter_op,
    map_op,
    prefetch_op,
    random_op,
    shuffle_op,
    skip_op,
    take_op,
)

Seed = tuple[int, int]
# They draw an order when an iterator over them is made. Random functions begin anew in each iteration.
_DRAWING = (shuffle_op._ShuffleDataset, random_op._RandomDataset)
# They make one iterator over their input, at once.
_ITERATING_ONCE = (
    batch_op._BatchDataset, batch_op._ParallelBatchDataset, dataset_ops._OptionsDataset, filter_op._FilterDataset,
    map_op._MapDataset, map_op._ParallelMapDataset, prefetch_op._PrefetchDataset, skip_op._SkipDataset,
    take_op._TakeDataset,
)  # fmt: skip


def seeds_of(dataset: tf.data.Dataset) -> list[Seed]:
    """Returns the seeds of the stages and functions of a dataset, in a fixed order. (0, 0): drawn from the clock."""
    seeds: list[Seed] = []
    for stage in _stages(dataset):
        if isinstance(stage, _DRAWING):
            seeds.append((int(stage._seed), int(stage._seed2)))
        for function in stage._functions():
            graph = function.function.graph.as_graph_def()
            for nodes in ([*graph.node], *([*inner.node_def] for inner in graph.library.function)):
                seeds += _seeds_of_nodes(nodes)
    return seeds


def _seeds_of_nodes(nodes: list[Any]) -> list[Seed]:
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    seeds = [(node.attr["seed"].i, node.attr["seed2"].i) for node in nodes if "seed2" in node.attr]
    for node in nodes:
        if node.op.startswith(("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")):
            inputs = [constants.get(name.split(":")[0]) for name in node.input if "seed" in name.rsplit("/", 1)[-1]]
            first, second = (0 if value is None else int(tf.make_ndarray(value)) for value in inputs[:2])
            seeds.append((first, second))
    return seeds


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
