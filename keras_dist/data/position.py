"""The place in the training data: how often the dataset was iterated over, and how many batches were read since.

TensorFlow cannot save iterators with Python functions or random maps (tensorflow/tensorflow#59398). So a run that goes
on makes its data anew, begins as many iterations, since each draws another order, and skips the batches that were read.
"""

from __future__ import annotations

import collections

import tensorflow as tf

from keras_dist.compat import tf_compat, tf_orders
from keras_dist.data.pipeline import batching, one_argument


def seeds_of_order(dataset: tf.data.Dataset) -> list[tuple[int, int]] | None:
    """Returns the seeds that decide the order of a dataset, `None` if it can't be made again: one has no seed."""
    seeds = tf_orders.seeds_of(dataset)
    return None if (0, 0) in seeds else seeds


def advance(dataset: tf.data.Dataset, iterations: int) -> None:
    """Begins iterations over a dataset, so that the next one has the order that it had in the run before.

    They are read only if a later part of the dataset draws its order when the part before has ended.
    """
    if not tf_orders.redraws(dataset):
        return
    reads = not tf_orders.draws_at_once(dataset)
    for _ in range(iterations):
        iterator = iter(dataset)
        if reads:
            collections.deque(iterator, maxlen=0)


def after(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    """Returns a dataset without its first batches, and does not compute what stateless maps would make of these."""
    stage = tf_compat.last_stage(dataset)
    if stage.input is not None:
        if stage.kind == "prefetch":
            return after(stage.input, batches).prefetch(tf.data.AUTOTUNE)
        if stage.kind == "options":
            return after(stage.input, batches).with_options(dataset.options())
        if stage.kind == "batch":
            size = int(tf.get_static_value(stage.arguments["batch_size"]))
            return batching(**stage.arguments)(after(stage.input, batches * size))
        if stage.kind == "map" and tf_compat.is_stateless(dataset):
            function = tf_compat.map_function(dataset)
            return after(stage.input, batches).map(one_argument(function, stage.input), tf.data.AUTOTUNE)
    return dataset.skip(batches)
