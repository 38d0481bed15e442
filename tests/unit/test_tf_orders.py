"""What decides the order of a dataset, and what is skipped when a run resumes: private names of tf.data."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.local.serial import Serial
from keras_dist.compat import tf_data
from keras_dist.data import pipeline, sources

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
    assert [seed for seed, _ in seeds] == [7] * count


@pytest.fixture
def _unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.eager import context

    monkeypatch.setattr(context.context(), "_seed", None)


@pytest.mark.usefixtures("_unseeded")
@pytest.mark.parametrize("name", ["shuffle", "in a function", "sample"])
def test_an_order_without_a_seed_or_with_a_drawn_one_cannot_be_made_again(name: str) -> None:
    assert pipeline.seeds_of_order(SEEDS[name][0](), None) is None
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


def test_tf_data_has_no_public_way_into_a_pipeline() -> None:
    """Once a dataset exposes its input and functions, `last_stage` and `map_function` can go."""
    public = {name for name in dir(Dataset) if not name.startswith("_")}
    assert not {name for name in public if "input" in name or "function" in name or "upstream" in name}


@pytest.mark.parametrize(
    ("dataset", "kind", "arguments"),
    [
        (Dataset.range(4).batch(2), "batch", {"batch_size": 2, "drop_remainder": False}),
        (Dataset.range(4).batch(3, True, 2), "batch", {"batch_size": 3, "drop_remainder": True}),
        (Dataset.range(4).map(lambda i: i), "map", {}),
        (Dataset.range(4).map(lambda i: i, 2), "map", {}),
        (Dataset.range(4).repeat(5), "repeat", {"count": 5}),
        (Dataset.range(4).prefetch(1), "prefetch", {"buffer_size": 1}),
        (Dataset.range(4).with_options(tf.data.Options()), "options", {}),
        (Dataset.range(4).shuffle(2), "shuffle", {"buffer_size": 2}),
        (Dataset.range(4).take(2), "take", {"count": 2}),
        (Dataset.range(4).skip(2), "skip", {"count": 2}),
        (Dataset.range(4).cache(), "cache", {}),
        (Dataset.range(4).cache("a_file"), "other", {}),
        (Dataset.range(4).filter(lambda i: i > 2), "other", {}),
    ],
)
def test_the_last_stage(dataset: Dataset, kind: str, arguments: dict[str, int]) -> None:
    stage = tf_data.last_stage(dataset)
    assert stage.kind == kind
    assert stage.arguments == arguments
    assert (stage.input is None) == (kind == "other")


def test_a_stage_is_applied_to_another_input() -> None:
    def stages(dataset: Dataset) -> Dataset:
        pairs = dataset.map(lambda i: (2 * i, i)).map(lambda i, j: i + j, 2).batch(4, True, 2)
        return pairs.prefetch(2).cache().take(9).skip(0).with_options(tf.data.Options()).repeat(2)

    dataset, again = stages(Dataset.range(4)), Dataset.range(10)
    kinds = []
    while (stage := tf_data.last_stage(dataset)).input is not None:
        kinds.append(stage)
        dataset = stage.input
    for stage in reversed(kinds):
        again = stage.again(again)
    assert [batch.numpy().tolist() for batch in again] == 2 * [[0, 3, 6, 9], [12, 15, 18, 21]]


def test_a_shuffle_has_the_same_order_again() -> None:
    tf.random.set_seed(3)
    dataset = Dataset.range(30).shuffle(30)
    again = tf_data.last_stage(dataset).again(Dataset.range(30))
    epochs = [[[*map(int, shuffled)] for _ in range(2)] for shuffled in (dataset, again)]
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]


def test_statelessness_looks_into_functions() -> None:
    drawn = tf.function(lambda i: i + tf.random.uniform([], 0, 9, tf.int64))
    doubled = tf.function(lambda i: 2 * i)
    assert not tf_data.is_stateless(Dataset.range(4).map(lambda i: drawn(i)))
    assert tf_data.is_stateless(Dataset.range(4).map(lambda i: doubled(i)))


def test_a_dataset_that_python_makes() -> None:
    """Keras reads a PyDataset and a generator by `from_generator`, and may prefetch."""
    made = Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([]))
    numbers = Dataset.range(3)
    assert tf_data.is_made_by_python(made.prefetch(1).with_options(tf.data.Options()))
    assert not tf_data.is_made_by_python(made.batch(2))
    assert not tf_data.is_made_by_python(numbers.flat_map(lambda n: Dataset.from_tensors(n)))


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_tuner_is_off_unless_the_script_asks_for_it(asked: bool | None) -> None:
    dataset, options = tf.data.Dataset.range(8).batch(4), tf.data.Options()
    if asked is not None:
        options.autotune.enabled = asked
        dataset = dataset.with_options(options)
    for untuned in (tf_data.untuned(dataset), sources.group_batches(dataset, "split", Serial(), None)):
        tuning = untuned.options().autotune
        assert tuning.enabled is bool(asked)
        assert tuning.initial_parallelism == (os.cpu_count() if asked is None else None)
