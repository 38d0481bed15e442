"""Objects and tensors that ranks send each other arrive as they were, and can't run code."""

from __future__ import annotations

import pickle
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_dist.comm.processes import decode, encode
from keras_dist.data import sources
from keras_dist.errors import ConfigurationError
from tests.limits import examples

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
objects = st.recursive(
    plain,
    lambda items: st.lists(items) | st.dictionaries(keys, items) | st.tuples(items, items),
    max_leaves=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(objects)
def test_round_trip(value: Any) -> None:
    received = decode(encode(value))
    assert received == value
    assert repr(received) == repr(value)  # True is not 1, a tuple no list


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros([0, 3]), np.asarray(3), np.asarray(["a", "ü"]),
        np.asarray([b"a"]), np.asarray([1 + 2j]), np.asarray([True]), np.asarray([np.nan, np.inf]),
        np.asarray([1.5, 2.5], ml_dtypes.bfloat16), np.arange(6).reshape(2, 3).T, np.asarray([1, 2], ">i4"),
        np.asarray(["2026-11-23"], "datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)  # fmt: skip
def test_arrays(array: np.ndarray) -> None:
    received = decode(encode({"array": array, "after": 1}))
    np.testing.assert_array_equal(received["array"], array)
    assert (received["array"].dtype, received["array"].shape, received["after"]) == (array.dtype, array.shape, 1)
    received["array"][...] = array  # it can be written to


@pytest.mark.parametrize(
    ("value", "received"),
    [
        (random.Random(), "Random object"),
        ([lambda: None], "function object"),
        (np.asarray([None]), "an array of object"),
        (tf.RaggedTensor.from_row_lengths([1], [1]), "RaggedTensor object"),
    ],
)
def test_what_is_not_sent(value: Any, received: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Only numbers, texts(?s:.*)Received: {received}"):
        encode(value)


def test_a_pickle_is_not_read() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it depends on the bytes which one
        decode(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="OBJECT"):
        decode(encode(np.zeros(2)).replace(b'"<f8"', b'"|O" '))


DTYPES = [
    "float16", "float32", "float64", "int8", "uint8", "int16", "uint16",
    "int32", "uint32", "int64", "uint64", "bool",
]  # fmt: skip


def through_the_wire(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    payload = sources.pack(tensors)
    assert (payload.dtype, payload.shape.rank) == (tf.uint8, 1)
    return sources.unpack(payload, [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
def test_numbers_come_back_bit_for_bit(data: st.DataObject, dtypes: list[str]) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    sent = [data.draw(arrays.arrays(np.dtype(dtype), shapes)) for dtype in dtypes]
    sent.append(np.array([[1.5, -2.25], [np.inf, 0.0]], ml_dtypes.bfloat16))
    received = [tensor.numpy() for tensor in through_the_wire([tf.constant(array) for array in sent])]
    assert [(one.dtype, one.shape, one.tobytes()) for one in received] == [
        (one.dtype, one.shape, one.tobytes()) for one in sent
    ]
