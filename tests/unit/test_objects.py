"""Objects that ranks send each other arrive as they were, and can't run code."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.comm.processes import decode, encode
from keras_dist.errors import ConfigurationError
from keras_dist.step.step import Seen
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


def test_sets() -> None:
    received = decode(encode([{3, 1, 2}, frozenset("ab")]))
    assert received == [{1, 2, 3}, frozenset("ab")]
    assert [type(item) for item in received] == [set, frozenset]


def test_scalars_and_tensors() -> None:
    scalar, tensor = decode(encode([np.float32(1.5), tf.constant([1, 2], tf.bfloat16)]))
    assert (type(scalar), float(scalar)) == (np.float32, 1.5)
    assert tensor.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(tensor, tf.int32), [1, 2])


def test_a_named_tuple_arrives_as_a_tuple() -> None:
    assert decode(encode(Seen(3, [("name", "kind", "hash")]))) == (3, [("name", "kind", "hash")])


def test_not_a_number() -> None:
    assert math.isnan(decode(encode(float("nan"))))


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
