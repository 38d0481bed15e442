"""Checks the private names of Keras for replicas of one process, and that they are still needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.compat import keras_strategy
from keras_dist.compat.keras_strategy import ReplicaScope

COUNT = tf.constant(3)


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_keras_keeps_its_state_for_each_thread() -> None:
    """Once this fails, the state need not be copied to a replica's thread."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        state = keras_strategy.thread_state()

        def given() -> str:
            keras_strategy.set_thread_state(state)
            return str(keras.config.dtype_policy().name)

        assert in_a_thread(lambda: keras.config.dtype_policy().name) == "float32"
        assert in_a_thread(given) == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_open_scopes_of_a_thread_are_its_own() -> None:
    with keras.name_scope("outer"):
        state = keras_strategy.thread_state()
        stacks = [value for value in state.values() if isinstance(value, list) and value]
    assert stacks, "name scopes are no longer kept in a list"
    keras_strategy.set_thread_state(state)
    with keras.name_scope("inner"):
        assert all(len(stack) == 1 for stack in stacks)
    keras.backend.clear_session()


def test_variables_made_inside_have_their_value_at_once() -> None:
    """Once this fails, Keras no longer keeps a list of them, which `initialized_at_once` replaces."""

    def made() -> Any:
        with ReplicaScope(COUNT, ()), keras_strategy.initialized_at_once("CPU:0"):
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            dense.build([None, 2])
            assert isinstance(dense.kernel.value, tf.Variable)
        return np.asarray(dense.kernel)

    np.testing.assert_array_equal(in_a_thread(made), [[1], [1]])


class AddsLoss(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_sum(x))
        return x


def losses_of_two(layer: keras.layers.Layer) -> list[list[float]]:
    scopes = [ReplicaScope(COUNT, ()) for _ in range(2)]
    for number, scope in enumerate(scopes, start=1):
        with scope:
            layer(tf.constant([float(number)]))
    found = []
    for scope in scopes:
        with scope:
            found.append([float(loss) for loss in layer.losses])
    return found


def test_a_layer_keeps_the_losses_that_it_adds_for_each_replica() -> None:
    """Once the first line fails, `losses_of_each_replica` can go."""
    assert losses_of_two(AddsLoss()) == [[], [2.0]]
    with keras_strategy.losses_of_each_replica():
        assert losses_of_two(AddsLoss()) == [[1.0], [2.0]]
    layer = AddsLoss()
    layer(tf.constant([3.0]))
    assert [float(loss) for loss in layer.losses] == [3.0]
