"""The place in the training data: how often the dataset was iterated over, and how many batches were read since.

TensorFlow cannot save iterators with Python functions or random maps (tensorflow/tensorflow#59398). So a run that goes
on makes its data anew, begins as many iterations, since each draws another order, and skips the batches that were read.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import tensorflow as tf

from keras_dist.compat import tf_data


def seeds_of_order(dataset: tf.data.Dataset, drawn: int | None) -> list[tuple[int, int]] | None:
    """Returns the seeds that decide the order of a dataset, `None` if it can't be made again: one has no seed.

    Args:
        dataset: A dataset.
        drawn: The global seed, if another run has another one.
    """
    seeds = tf_data.seeds_of(dataset)
    # What no seed decides are values then, which the script wants to be others in each run.
    orders, values = ([(0, 0) if seed[0] == drawn else seed for seed in of] for of in (seeds.orders, seeds.values))
    return None if (0, 0) in orders else orders + values


def with_seed(dataset: tf.data.Dataset, seed: int, drawn: int | None) -> tf.data.Dataset:
    """Gives a seed to each shuffle that has none of its own.

    Args:
        dataset: A dataset.
        seed: The seed.
        drawn: The global seed, if another run has another one.

    Returns:
        A dataset that else is the same; the given one if all have seeds, or stages that can't be made again follow.
    """
    return _with_seed(dataset, itertools.count(seed), drawn) or dataset


def _with_seed(dataset: tf.data.Dataset, seeds: Iterator[int], drawn: int | None) -> tf.data.Dataset | None:
    if seeds_of_order(dataset, drawn) is not None:
        return dataset
    stage = tf_data.last_stage(dataset)
    if stage.input is None or (before := _with_seed(stage.input, seeds, drawn)) is None:
        return None
    if stage.kind != "shuffle":
        return stage.again(before)
    # Without a new order each time, all datasets that are made of this one share an order: a split relies on it.
    return before.shuffle(stage.arguments["buffer_size"], next(seeds)) if tf_data.reshuffles(dataset) else None


def advance(dataset: tf.data.Dataset, iterations: int) -> None:
    """Begins iterations over a dataset, so that the next one has the order that it had in the run before.

    They are read only if a later part of the dataset draws its order when the part before has ended.
    """
    if not tf_data.redraws(dataset):
        return
    reads = not tf_data.draws_at_once(dataset)
    for _ in range(iterations):
        iterator = iter(dataset)
        if reads:
            collections.deque(iterator, maxlen=0)


def after(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    """Returns a dataset without its first batches, and does not compute what stateless maps would make of these."""
    stage = tf_data.last_stage(dataset)
    if stage.kind == "batch":
        return stage.again(after(stage.input, batches * stage.arguments["batch_size"]))
    if stage.kind in ("prefetch", "options") or (stage.kind == "map" and tf_data.is_stateless(dataset)):
        return stage.again(after(stage.input, batches))
    return dataset.skip(batches)
