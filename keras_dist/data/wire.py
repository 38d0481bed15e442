"""Converts tensors of any dtype and shape to bytes and back, for `Backend.scatter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_CHARACTERS = [bytes([byte]) for byte in range(256)]


def pack(tensors: Sequence[Any]) -> Any:
    """Returns tensors as one uint8 tensor of shape `(n,)`: their shapes as int64, then their contents."""
    shapes = [tf.shape(tensor, out_type=tf.int64) for tensor in tensors]
    parts = [_to_bytes(part) for pair in zip(shapes, tensors, strict=True) for part in pair]
    return tf.concat(parts, 0)


def unpack(payload: Any, specs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Returns the tensors that `pack` converted.

    Args:
        payload: uint8 tensor of shape `(n,)`.
        specs: The specification of each tensor, with a known rank.
    """
    tensors = []
    for spec in specs:
        shape, payload = _from_bytes(payload, tf.constant([spec.shape.rank], tf.int64), tf.int64)
        tensor, payload = _from_bytes(payload, shape, spec.dtype)
        tensor.set_shape(spec.shape)
        tensors.append(tensor)
    return tensors


def characters_of(strings: Any) -> tuple[Any, Any]:
    """Returns the lengths of strings, int64, and their bytes, uint8, both of rank 1."""
    lengths = tf.cast(tf.strings.length(strings), tf.int64)
    return lengths, tf.io.decode_raw(tf.strings.reduce_join(strings), tf.uint8)


def strings_of(lengths: Any, characters: Any) -> Any:
    """Returns the strings with these lengths and bytes, the inverse of `characters_of`."""
    by_string = tf.RaggedTensor.from_row_lengths(tf.gather(_CHARACTERS, tf.cast(characters, tf.int32)), lengths)
    return tf.strings.reduce_join(by_string, axis=-1)


def _to_bytes(tensor: Any) -> Any:
    flat = tf.reshape(tensor, [-1])
    if flat.dtype == tf.string:
        lengths, characters = characters_of(flat)
        return tf.concat([_to_bytes(lengths), characters], 0)
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _from_bytes(payload: Any, shape: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """Returns the first tensor of a payload, and the rest."""
    count = tf.reduce_prod(shape)
    if dtype == tf.string:
        lengths, payload = _from_bytes(payload, count[None], tf.int64)
        length = tf.reduce_sum(lengths)
        return tf.reshape(strings_of(lengths, payload[:length]), shape), payload[length:]
    length = count * dtype.size
    content = payload[:length]
    if dtype == tf.bool:
        values = tf.cast(content, tf.bool)
    elif dtype.size == 1:
        values = tf.bitcast(content, dtype)
    else:
        values = tf.bitcast(tf.reshape(content, [-1, dtype.size]), dtype)
    return tf.reshape(values, shape), payload[length:]
