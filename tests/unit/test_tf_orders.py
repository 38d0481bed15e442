"""What decides the order of a dataset, and what is skipped when a run resumes: the private names still fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import tf_data
from keras_dist.data import pipeline

Dataset = tf.data.Dataset
EPOCHS, READ = 4, 3  # the run before has ended in its fourth epoch, after some batches


def numbers(count: int = 24) -> tf.data.Dataset:
    return Dataset.range(count)


def plus_noise(number: Any) -> Any:
    return tf.cast(number, tf.float32) + tf.random.uniform([])


DATASETS: dict[str, Callable[[], tf.data.Dataset]] = {
    "plain": lambda: numbers().batch(4),
    "shuffle": lambda: numbers().shuffle(24, seed=1).batch(4),
    "small buffer": lambda: numbers().shuffle(5, seed=1).batch(4),
    "twice": lambda: numbers().shuffle(5, seed=1).shuffle(9, seed=2).batch(4),
    "map": lambda: numbers().shuffle(9, seed=1).map(lambda x: 2 * x, 2).batch(4).prefetch(2),
    "map of batches": lambda: numbers().shuffle(9, seed=1).batch(4, drop_remainder=True).map(lambda x: 2 * x),
    "random map": lambda: numbers().shuffle(9, seed=1).map(plus_noise).batch(4),
    "pairs": lambda: Dataset.zip((numbers(), numbers().shuffle(9, seed=1))).map(lambda x, y: (y, x)).batch(4),
    "repeat": lambda: numbers(12).shuffle(12, seed=1).repeat(2).batch(4),
    "concatenate": lambda: numbers(12).shuffle(12, seed=1).concatenate(numbers(12).shuffle(12, seed=1)).batch(4),
    "cache": lambda: numbers().shuffle(12, seed=1).cache().batch(4),
    "cache before": lambda: numbers().cache().shuffle(12, seed=1).batch(4),
    "flat map": lambda: numbers(4).flat_map(lambda i: Dataset.range(i, i + 6).shuffle(6, seed=3)).batch(4),
    "interleave": lambda: (
        numbers(4).shuffle(4, seed=1).interleave(lambda i: Dataset.range(6 * i, 6 * i + 6), cycle_length=2).batch(4)
    ),
    "sample": lambda: Dataset.sample_from_datasets([numbers(12), numbers(12)], seed=4).batch(4),
    "filter": lambda: numbers().shuffle(24, seed=1).filter(lambda x: x % 3 > 0).batch(4),
    "options": lambda: numbers().shuffle(24, seed=1).batch(4).with_options(tf.data.Options()),
}


def read(dataset: Any) -> list[Any]:
    return [np.asarray(tf.nest.flatten(batch)[0]).tolist() for batch in dataset]


def epochs(name: str, count: int) -> list[list[Any]]:
    """Returns the batches of each epoch of the run before."""
    tf.random.set_seed(7)
    dataset = DATASETS[name]()
    return [read(dataset) for _ in range(count)]


def made_anew(name: str) -> tf.data.Dataset:
    tf.random.set_seed(7)
    dataset = DATASETS[name]()
    pipeline.advance(dataset, EPOCHS - 1)
    return dataset


@pytest.mark.parametrize("name", DATASETS)
def test_the_rest_of_an_epoch_is_that_of_the_run_before(name: str) -> None:
    expected = epochs(name, EPOCHS)[-1]
    assert read(pipeline.after(made_anew(name), READ)) == expected[READ:]


@pytest.mark.parametrize("name", ["shuffle", "twice", "random map", "repeat", "cache"])
def test_the_next_epoch_too(name: str) -> None:
    expected = epochs(name, EPOCHS + 1)[-1]
    dataset = made_anew(name)
    read(pipeline.after(dataset, READ))
    assert read(dataset) == expected


def test_a_stateless_map_does_not_compute_what_is_skipped() -> None:
    dataset = numbers().map(lambda x: 2 * x, 2).batch(4).prefetch(1)
    skipped = pipeline.after(dataset, READ)
    assert read(skipped) == read(dataset)[READ:]
    assert type(skipped._input_dataset._input_dataset).__name__ == "_ParallelMapDataset"


SEEDS: dict[str, tuple[Callable[[], tf.data.Dataset], int]] = {
    "none": (lambda: numbers().batch(4), 0),
    "shuffle": (lambda: numbers().shuffle(4), 1),
    "random map": (lambda: numbers().map(plus_noise), 1),
    "in a function": (lambda: numbers().flat_map(lambda i: Dataset.range(i).shuffle(4)), 1),
    "sample": (lambda: Dataset.sample_from_datasets([numbers(), numbers()]), 1),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_of_the_order(name: str) -> None:
    make, count = SEEDS[name]
    tf.random.set_seed(7)
    seeds = pipeline.seeds_of_order(make(), None)
    assert seeds is not None
    assert [seed for seed, _ in seeds] == [7] * count


@pytest.fixture
def _unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.eager import context

    monkeypatch.setattr(context.context(), "_seed", None)


@pytest.mark.usefixtures("_unseeded")
@pytest.mark.parametrize("name", ["shuffle", "in a function", "sample"])
def test_an_order_without_a_seed_cannot_be_made_again(name: str) -> None:
    assert pipeline.seeds_of_order(SEEDS[name][0](), None) is None


@pytest.mark.parametrize("name", ["shuffle", "in a function", "sample"])
def test_an_order_with_a_drawn_seed_cannot_be_made_again(name: str) -> None:
    tf.random.set_seed(7)
    assert pipeline.seeds_of_order(SEEDS[name][0](), 7) is None


@pytest.mark.usefixtures("_unseeded")
def test_values_without_a_seed_are_no_order() -> None:
    assert pipeline.seeds_of_order(numbers().shuffle(4, seed=3).map(plus_noise), None) == [(87654321, 3), (0, 0)]


UNSEEDED: dict[str, Callable[[], tf.data.Dataset]] = {
    "shuffle": lambda: numbers().shuffle(24).batch(4).prefetch(2),
    "twice": lambda: numbers().shuffle(5).map(lambda x: x, 2).shuffle(9).batch(4, drop_remainder=True),
    "one of two": lambda: numbers().shuffle(5, seed=1).shuffle(9).batch(4).with_options(tf.data.Options()),
    "taken": lambda: numbers().shuffle(24).skip(0).take(24).batch(4),
    "cached before": lambda: numbers().map(lambda x: x).cache().shuffle(24).repeat(2).batch(4),
}


@pytest.mark.usefixtures("_unseeded")
@pytest.mark.parametrize("name", UNSEEDED)
def test_a_shuffle_without_a_seed_gets_one(name: str) -> None:
    seeded = [pipeline.with_seed(UNSEEDED[name](), seed, None) for seed in (5, 5, 6)]
    assert all(pipeline.seeds_of_order(dataset, None) for dataset in seeded)
    epochs_of = [[read(dataset) for _ in range(2)] for dataset in seeded]
    assert epochs_of[0] == epochs_of[1]
    assert epochs_of[0][0] != epochs_of[0][1] != epochs_of[2][1]
    expected = np.sort(np.concatenate(read(UNSEEDED[name]())))
    assert all(np.array_equal(np.sort(np.concatenate(epoch)), expected) for epoch in epochs_of[0])


@pytest.mark.usefixtures("_unseeded")
@pytest.mark.parametrize(
    "dataset",
    [
        numbers().shuffle(24, seed=1).batch(4),
        numbers().shuffle(24).filter(lambda i: i > 3),
        numbers().shuffle(24, reshuffle_each_iteration=False).batch(4),
        numbers().flat_map(lambda i: Dataset.range(i).shuffle(4)).batch(2),
    ],
    ids=["seeded", "another stage", "one order for all", "in a function"],
)
def test_what_gets_no_seed(dataset: tf.data.Dataset) -> None:
    assert pipeline.with_seed(dataset, 5, None) is dataset


@pytest.mark.usefixtures("_unseeded")
@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (lambda: numbers().map(lambda x: 2 * x, 2), False),
        (lambda: numbers().map(lambda x: 2 * x, 2, deterministic=False), True),
        (lambda: numbers().map(plus_noise), True),
        (lambda: numbers().map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64, seed=4)), False),
        (lambda: numbers().map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64, seed=4), 2), True),
        (lambda: numbers().map(lambda x: tf.py_function(lambda y: y, [x], tf.int64), 2).batch(2).repeat(), True),
        (lambda: numbers().map(plus_noise).take(2).batch(2), True),
        (lambda: numbers().interleave(lambda i: Dataset.range(i).map(plus_noise, 2), 2, num_parallel_calls=2), True),
        (lambda: numbers().interleave(lambda i: Dataset.range(i).shuffle(3), 2, num_parallel_calls=2), False),
    ],
)
def test_which_values_may_differ(make: Callable[[], tf.data.Dataset], differs: bool) -> None:
    assert tf_data.may_differ(make()) is differs


@pytest.mark.parametrize(
    ("name", "at_once"),
    [("shuffle", True), ("map", True), ("options", True), ("filter", True), ("twice", False), ("repeat", False)],
)
def test_where_an_order_is_drawn(name: str, at_once: bool) -> None:
    dataset = DATASETS[name]()
    assert tf_data.redraws(dataset)
    assert tf_data.draws_at_once(dataset) is at_once
