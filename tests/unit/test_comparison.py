"""Ranks compare what a random map gets, and not what it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from keras_dist.data import pipeline

Dataset = tf.data.Dataset


def noise(number: Any) -> Any:
    return tf.cast(number, tf.float32) + tf.random.uniform([])


PIPELINES: dict[str, Callable[[Dataset], Dataset]] = {
    "examples": lambda data: data.map(noise, 2).batch(4).prefetch(1),
    "batches": lambda data: data.batch(4).map(lambda batch: tf.map_fn(noise, batch, tf.float32), 2).repeat(2),
    "pairs": lambda data: data.map(lambda i: (noise(i), i), 2).batch(4, drop_remainder=True),
    "dicts": lambda data: data.map(lambda i: {"x": noise(i)}, 2).batch(4).map(lambda batch: batch["x"]),
    "then a shuffle": lambda data: data.map(noise, 2).shuffle(9, seed=3).batch(4),
    "then a cache": lambda data: data.map(noise, 2).cache().shuffle(9, seed=3).take(9).batch(4),
}


def compared(dataset: Dataset) -> tuple[list[Any], list[float]]:
    """Returns the batches, and their fingerprints."""
    pairs = pipeline.with_fingerprints(dataset)
    assert pairs is not None
    batches, fingerprints = zip(*pairs, strict=True)
    return [tf.nest.flatten(batch)[0].numpy().tolist() for batch in batches], [*map(float, fingerprints)]


@pytest.fixture(autouse=True)
def no_seed() -> None:
    """With a global seed, which another test of this process may have set, equal pipelines draw the same noise."""
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", PIPELINES)
def test_noise_is_not_compared_and_data_are(name: str) -> None:
    (first, own), (second, others) = (compared(PIPELINES[name](Dataset.range(10))) for _ in range(2))
    assert first != second
    assert own == others
    assert len({*own}) > 1
    _, different = compared(PIPELINES[name](Dataset.range(1, 11)))
    assert not {*own} & {*different}


def test_where_data_cannot_be_compared() -> None:
    _, fingerprints = compared(Dataset.range(8).map(noise, 2).filter(lambda number: number >= 0).batch(4))
    assert fingerprints == [0.0, 0.0]


def test_what_is_the_same_on_all_ranks_is_compared_itself() -> None:
    assert pipeline.with_fingerprints(Dataset.range(8).map(lambda number: 2 * number, 2).batch(4)) is None
