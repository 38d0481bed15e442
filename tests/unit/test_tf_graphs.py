"""What traced functions have captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import tf_graphs


def digest_of(function: Any) -> str:
    return tf_graphs.map_digest(tf.data.Dataset.range(4).map(function))


CONSTANTS = np.asarray([1, 2, 3]), tf.constant([1.5, 2.5]), "a", tf.constant(["a", "b"])
OTHERS = np.asarray([1, 2, 4]), tf.constant([1.5, 2.0]), "b", tf.constant(["a", "c"])


@pytest.mark.parametrize(("constant", "other"), list(zip(CONSTANTS, OTHERS, strict=True)))
def test_maps_are_equal_if_they_do_the_same_with_the_same_constants(constant: Any, other: Any) -> None:
    first, again, second = (digest_of(lambda x, value=value: (x, value)) for value in (constant, constant, other))
    assert first == again
    assert first != second


def test_a_function_in_a_map_is_a_part_of_it() -> None:
    def outer(scale: float) -> Any:
        inner = tf.function(lambda x: tf.cast(x, tf.float32) * scale)
        return lambda x: inner(x) + tf.cond(x > 1, lambda: scale, lambda: 0.0)

    digests = [digest_of(outer(scale)) for scale in (2.0, 2.0, 3.0)]
    assert digests[0] == digests[1] != digests[2]


def constants(function: Any) -> dict[str, str]:
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([4])).graph
    return {kind: value for _, kind, value in tf_graphs.constants_of(graph)}


def test_constants_are_floats_strings_and_arrays_of_integers() -> None:
    captured, seed = tf.constant([1.0, 2.0]), tf.constant([1, 2])

    def step(x: Any, scale: float = 2.0) -> Any:
        kept = tf.gather(x, np.arange(8) % 4), tf.constant("text"), tf.random.stateless_normal([2], seed)
        return tf.reshape(x, [2, 2]) * captured * scale, kept

    found = constants(step)
    assert {"float32(2,)", "float32()", "int64(8,)", "string()"} <= set(found)
    assert not [kind for kind in found if kind.startswith("int32")]
    assert constants(lambda x: step(x, 3.0))["float32()"] != found["float32()"]


def test_a_constant_that_a_function_inside_a_function_has_captured() -> None:
    captured = tf.constant([5.0, 6.0, 7.0])
    seen = []

    def body(x: Any) -> Any:
        result = x + tf.reduce_sum(captured)
        seen.extend(kind for _, kind, _ in tf_graphs.constants_of(tf.compat.v1.get_default_graph()))
        return result

    tf.function(lambda x: tf.cond(x[0] > 0, lambda: body(x), lambda: x)).get_concrete_function(tf.TensorSpec([4]))
    assert "float32(3,)" in seen
