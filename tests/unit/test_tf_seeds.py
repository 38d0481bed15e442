"""Operations without a seed draw alike on ranks; those with a seed draw what they draw in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from keras_dist.compat import keras_random

Dataset = tf.data.Dataset


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(context.context(), "_seed", None)
    yield
    keras_random.draw_alike(None)


def drawn() -> list[float]:
    context.context().clear_kernel_cache()  # an eager operation with the same seed goes on, as in one process
    in_function = tf.function(lambda: tf.random.normal([2]) + tf.random.uniform([2]))
    kept = Dataset.range(40).filter(lambda i: tf.random.uniform([]) < 0.5)
    shuffled = Dataset.range(20).shuffle(20)
    parts: list[Any] = [tf.random.uniform([2]), tf.random.shuffle(tf.range(20)), in_function(), [*kept], [*shuffled]]
    return [float(number) for part in parts for number in np.ravel(part)]


def test_the_same_seed_draws_alike() -> None:
    found = []
    for seed in (5, 5, 6):
        keras_random.draw_alike(seed)
        found.append(drawn())
    assert found[0] == found[1] != found[2]


def test_what_has_a_seed_is_as_before() -> None:
    def seeded() -> list[int]:
        return [*map(int, Dataset.range(20).shuffle(20, seed=3))]

    plain = seeded()
    keras_random.draw_alike(5)
    assert seeded() == plain
    tf.random.set_seed(4)
    with_global = drawn()
    keras_random.draw_alike(None)
    tf.random.set_seed(4)
    assert drawn() == with_global


def test_a_shuffle_in_a_map_draws_another_order_each_time() -> None:
    """By this Keras shuffles arrays. With TensorFlow's own seed each epoch has the same order."""

    def epochs() -> list[list[int]]:
        order = Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(30)))
        return [np.ravel([*order]).tolist() for _ in range(3)]

    keras_random.draw_alike(5)
    first = epochs()
    assert all(sorted(epoch) == [*range(30)] for epoch in first)
    assert first[0] != first[1] != first[2] != first[0]
    keras_random.draw_alike(5)
    assert epochs() == first
    keras_random.draw_alike(None)
    tf.random.set_seed(4)
    same = epochs()
    assert same[0] == same[1]  # once they differ, plain seeds will do


def test_tensorflow_asks_this_function_for_seeds() -> None:
    """Once a process can publicly seed only what has no seed, this can go."""
    asked = []

    def get_seed(op_seed: Any) -> Any:
        asked.append(op_seed)
        return keras_random._plain_seeds(op_seed)

    random_seed.get_seed = get_seed
    tf.random.uniform([], seed=3)
    Dataset.range(2).shuffle(2)
    assert asked == [3, None]
