"""A hash of a global batch, to detect ranks that read different data.

Random augmentation differs on purpose: `map(augment, num_parallel_calls=...)` draws its random numbers in another order
in each process. So elements are compared as they are before such a map.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_data
from keras_dist.logging import logger

# A fingerprint travels as float32, which holds integers below 2**24 exactly.
FINGERPRINT_BITS = 24
# About this many numbers of a tensor are hashed at most: enough to include every example of a usual batch.
_SAMPLED_NUMBERS = 4096
_SAME_SIZE_INTEGER = {2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprint_of(batch: Any, sampled: int = _SAMPLED_NUMBERS) -> Any:
    """Returns a hash of the values of a batch and their order: float32 scalar, an integer in `[0, 2**24)`."""
    total = tf.constant(0, tf.int64)
    for index, leaf in enumerate(tf.nest.flatten(batch, expand_composites=True)):
        if tf.is_tensor(leaf) and leaf.dtype not in (tf.variant, tf.resource):
            total = total * 31 + _hash(leaf, sampled) + index
    total = tf.bitwise.bitwise_xor(total, tf.bitwise.right_shift(total, 29))
    total = tf.bitwise.bitwise_and(total, 2**FINGERPRINT_BITS - 1)
    return tf.cast(total, tf.float32)


def fold(variable: tf.Variable, fingerprint: Any) -> None:
    """Folds the fingerprint of a batch into the one of all batches before it, an int64 scalar."""
    folded = variable * 31 + tf.cast(fingerprint, tf.int64)
    variable.assign(tf.bitwise.bitwise_and(folded, 2**FINGERPRINT_BITS - 1))


def _hash(tensor: Any, sampled: int) -> Any:
    numbers = tf.reshape(tensor, [-1])
    # With an odd stride, the sample of a table of even width includes all columns.
    stride = tf.bitwise.bitwise_or(tf.maximum(tf.size(numbers, tf.int64) // sampled, 1), 1)
    bits, dtype = numbers[::stride], numbers.dtype
    if dtype == tf.string:
        bits = tf.strings.to_hash_bucket_fast(bits, 2**31 - 1)
    elif dtype.is_complex:
        bits = tf.bitcast(bits, tf.int64)
    elif dtype.is_floating and dtype.size in _SAME_SIZE_INTEGER:
        bits = tf.bitcast(bits, _SAME_SIZE_INTEGER[dtype.size])
    bits = tf.reshape(tf.cast(bits, tf.int64), [-1])
    # Odd factors, a different one at each position (multiplication wraps around).
    factors = (2 * tf.range(tf.size(bits, tf.int64)) + 1) * 0x9E3779B97F4A7C1
    products = bits * factors
    products = tf.bitwise.bitwise_xor(products, tf.bitwise.right_shift(products, 32))
    return tf.reduce_sum(products) + tf.size(numbers, tf.int64) * 0x85EBCA6B


def with_fingerprints(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns a dataset of pairs: a batch, and a fingerprint of what it was made of, which is the same on all ranks.

    Returns `None` if the batches themselves are the same on all ranks. Where the part before the maps can't be
    compared, a fingerprint is the one of nothing.
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
    if stage.kind == "batch":
        return stage.again(before).map(lambda batch, fingerprints: (batch, fingerprint_of(fingerprints)))
    if stage.kind != "map":
        return stage.again(before)
    function = tf_data.map_function(dataset)

    @tf.autograph.experimental.do_not_convert
    def mapped(element: Any, fingerprint: Any) -> Any:
        return function(element), fingerprint

    if not tf_data.is_parallel(dataset):
        return before.map(mapped)
    return before.map(mapped, tf.data.AUTOTUNE, deterministic=True)  # else their order would be open, too


def _map_elements(dataset: tf.data.Dataset, function: Any) -> tf.data.Dataset:
    return dataset.map(tf_data.one_argument(function, dataset), tf.data.AUTOTUNE, deterministic=True)
