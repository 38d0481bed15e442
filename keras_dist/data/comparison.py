"""What ranks compare of data that differ on purpose: random augmentation, in an order that nobody knows.

`map(augment, num_parallel_calls=...)` draws its random numbers in another order in each process, and without a seed
they are others. So the elements are compared as they are before such a map. They come in the order of one process, also
with `deterministic=False`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_data
from keras_dist.data.fingerprint import fingerprint_of
from keras_dist.logging import logger

_no_autograph = tf.autograph.experimental.do_not_convert


def with_fingerprints(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns a dataset of pairs: a batch, and a fingerprint of what it was made of, which is that of all ranks.

    Returns:
        `None` if the batches themselves are those of all ranks. Where the part before the maps can't be compared, a
        fingerprint is that of nothing.
    """
    if not tf_data.may_differ(dataset):
        return None
    if (pairs := _pairs(dataset)) is not None:
        return pairs
    logger().debug("input: the ranks don't compare their data, which random maps change before a stage of another kind")
    return _map_elements(dataset, lambda element: (element, tf.constant(0.0)))


def _pairs(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    stage = tf_data.last_stage(dataset)
    if stage.input is None:
        return None
    if tf_data.may_differ(stage.input):
        before = _pairs(stage.input)
    else:
        before = _map_elements(stage.input, lambda element: (element, fingerprint_of(element)))
    if before is None:
        return None
    if stage.kind == "map":
        return _map_first(before, dataset)
    if stage.kind == "batch":
        return stage.again(before).map(lambda batch, fingerprints: (batch, fingerprint_of(fingerprints)))
    return stage.again(before)


def _map_elements(dataset: tf.data.Dataset, function: Any) -> tf.data.Dataset:
    return dataset.map(tf_data.one_argument(function, dataset), tf.data.AUTOTUNE, deterministic=True)


def _map_first(pairs: tf.data.Dataset, as_in: tf.data.Dataset) -> tf.data.Dataset:
    """Applies the map that is the last stage of a dataset to the first part of each pair."""
    function = tf_data.map_function(as_in)

    @_no_autograph
    def mapped(element: Any, fingerprint: Any) -> Any:
        return function(element), fingerprint

    if not tf_data.is_parallel(as_in):
        return pairs.map(mapped)
    return pairs.map(mapped, tf.data.AUTOTUNE, deterministic=True)  # else their order would be open, too
