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


def _to_bytes(tensor: Any) -> Any:
    flat = tf.reshape(tensor, [-1])
    if flat.dtype == tf.string:
        lengths = tf.cast(tf.strings.length(flat), tf.int64)
        return tf.concat([_to_bytes(lengths), tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)], 0)
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _from_bytes(payload: Any, shape: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """Returns the first tensor of a payload, and the rest."""
    count = tf.reduce_prod(shape)
    if dtype == tf.string:
        lengths, payload = _from_bytes(payload, count[None], tf.int64)
        length = tf.reduce_sum(lengths)
        characters = tf.gather(_CHARACTERS, tf.cast(payload[:length], tf.int32))
        strings = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(characters, lengths), axis=-1)
        return tf.reshape(strings, shape), payload[length:]
    length = count * dtype.size
    content = payload[:length]
    if dtype == tf.bool:
        values = tf.cast(content, tf.bool)
    elif dtype.size == 1:
        values = tf.bitcast(content, dtype)
    else:
        values = tf.bitcast(tf.reshape(content, [-1, dtype.size]), dtype)
    return tf.reshape(values, shape), payload[length:]
