"""Tensors of every dtype and shape are the same after packing and unpacking."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_dist.data import sources

DTYPES = [
    "float16", "float32", "float64", "int8", "uint8", "int16", "uint16",
    "int32", "uint32", "int64", "uint64", "bool",
]  # fmt: skip


def through_the_wire(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    specs = [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors]
    payload = sources.pack(tensors)
    assert payload.dtype == tf.uint8
    assert payload.shape.rank == 1
    return sources.unpack(payload, specs)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
def test_numbers_come_back_bit_for_bit(data: st.DataObject, dtypes: list[str]) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    sent = [data.draw(arrays.arrays(np.dtype(dtype), shapes)) for dtype in dtypes]
    received = through_the_wire([tf.constant(array) for array in sent])
    for array, tensor in zip(sent, received, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.numpy().shape == array.shape
        assert tensor.numpy().tobytes() == array.tobytes()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=6), min_size=2, max_size=2), max_size=4))
def test_strings_come_back(words: list[list[bytes]]) -> None:
    sent = tf.reshape(tf.constant([word for row in words for word in row], tf.string), [len(words), 2])
    (received,) = through_the_wire([sent])
    assert received.numpy().tolist() == sent.numpy().tolist()


def test_bfloat16_comes_back() -> None:
    sent = tf.constant([[1.5, -2.25], [np.inf, 0.0]], tf.bfloat16)
    (received,) = through_the_wire([sent])
    assert received.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(received, tf.float32), tf.cast(sent, tf.float32))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_known_shapes_stay_known(rank: int) -> None:
    sent = tf.ones([3] * rank)
    (received,) = sources.unpack(sources.pack([sent]), [tf.TensorSpec([None] * rank if rank else [], tf.float32)])
    assert received.shape.rank == rank
