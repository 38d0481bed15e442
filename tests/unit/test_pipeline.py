"""Cutting a global batch before its examples are mapped gives the same result as afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.data.fingerprint import fingerprint_of
from keras_dist.data.pipeline import decompose
from keras_dist.data.shares import Share, shard_dataset, take_share

Dataset = tf.data.Dataset


def made(index: Any) -> dict[str, Any]:
    return {"x": tf.cast(index, tf.float32) * [1.0, 2.0], "name": tf.strings.as_string(index)}


def doubled(parts: Any) -> tuple[Any, Any]:
    return 2 * parts["x"], parts["name"]


def cut_afterwards(dataset: Dataset, rank: int, size: int) -> list[Share]:
    return [take_share(batch, rank, size) for batch in dataset]


def values(shares: Any) -> list[Any]:
    return [[leaf.numpy() for leaf in tf.nest.flatten((s.data, s.count, s.total))] for s in shares]


def assert_same(ours: Any, expected: Any) -> None:
    ours, expected = values(ours), values(expected)
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(1, 20),
    batch=st.integers(1, 9),
    size=st.integers(1, 4),
    drop=st.booleans(),
    epochs=st.integers(1, 2),
    parallel=st.sampled_from([None, 2]),
)
def test_shares_are_those_of_the_finished_batches(
    count: int, batch: int, size: int, drop: bool, epochs: int, parallel: int | None
) -> None:
    dataset = Dataset.range(count).map(made, parallel).map(doubled).batch(batch, drop).repeat(epochs).prefetch(1)
    assert decompose(dataset) is not None
    for rank in range(size):
        shares = shard_dataset(dataset, rank, size)
        assert shares.cardinality() == dataset.cardinality()
        assert_same(shares, cut_afterwards(dataset, rank, size))


def test_known_shapes_stay_known() -> None:
    shares = shard_dataset(Dataset.range(8).map(made).batch(4, drop_remainder=True), 0, 2)
    assert shares.element_spec.data["x"].shape == [2, 2]


def test_the_next_epoch_is_shuffled_anew() -> None:
    tf.random.set_seed(1)
    shares = shard_dataset(Dataset.range(64).shuffle(64).map(made).batch(8), 0, 2)
    first, second = ([name for share in shares for name in share.data["name"].numpy()] for _ in range(2))
    assert len(set(first)) == len(set(second)) == 32
    assert first != second


def test_a_function_is_not_traced_anew() -> None:
    """A number that Python drew while tracing stays the same."""
    traces: list[int] = []

    def offset(index: Any) -> Any:
        traces.append(1)
        return index + 100 * len(traces)

    dataset = Dataset.range(4).map(offset).batch(4)
    (expected,) = dataset
    (share,) = shard_dataset(dataset, 1, 2)
    assert share.data.numpy().tolist() == expected.numpy().tolist()[2:]


def table() -> Callable[[Any], Any]:
    keys = tf.constant([1, 2], tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys), 0).lookup


def conditional(index: Any) -> Any:
    return tf.cond(index > 3, lambda: index, lambda: index * 2)


MOVED = {
    "conditional": lambda: Dataset.range(8).map(conditional).batch(4),
    "while": lambda: Dataset.range(8).map(lambda i: tf.while_loop(lambda n: n < 9, lambda n: n + 1, [i])[0]).batch(4),
    "files": lambda: Dataset.from_tensor_slices(["a", "b"]).map(lambda name: tf.io.read_file(name)).batch(2),
    "stateless random": lambda: Dataset.range(8).map(lambda i: tf.random.stateless_uniform([], [1, i])).batch(4),
    "with a random map before": lambda: Dataset.range(8).map(lambda i: i + tf.random.uniform([], 0, 9, tf.int64))
    .map(made).batch(4),
}  # fmt: skip
LEFT = {
    "no map": lambda: Dataset.range(8).batch(4),
    "random": lambda: Dataset.range(8).map(lambda i: i + tf.random.uniform([], 0, 9, tf.int64)).batch(4),
    "Python": lambda: Dataset.range(8).map(lambda i: tf.numpy_function(lambda v: v, [i], tf.int64)).batch(4),
    "table": lambda: Dataset.range(8).map(table()).batch(4),
    "random in a branch": lambda: Dataset.range(8).map(
        lambda i: tf.cond(i > 3, lambda: tf.random.uniform([]), lambda: 0.0)
    ).batch(4),
    "map of batches": lambda: Dataset.range(8).batch(4).map(lambda i: i * 2),
    "shuffled after": lambda: Dataset.range(8).map(made).shuffle(8).batch(4),
    "ragged": lambda: Dataset.range(8).map(lambda i: tf.ragged.range(i)).batch(4),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_behind_the_cut(name: str) -> None:
    assert decompose(MOVED[name]()) is not None


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_before_it(name: str) -> None:
    assert decompose(LEFT[name]()) is None


def test_what_has_many_shapes_is_made_after_the_cut() -> None:
    """Both maps are moved: elements can be batched before the first map, but not between the two."""
    pipeline = decompose(Dataset.range(8).map(tf.range).map(tf.size).batch(4))
    assert pipeline is not None
    assert len(pipeline.maps) == 2


def test_options_are_kept() -> None:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    shares = shard_dataset(Dataset.range(8).map(made).batch(4).with_options(options), 0, 2)
    assert shares.options().threading.private_threadpool_size == 3


def test_the_fingerprint_is_that_of_what_goes_into_the_maps() -> None:
    batches = Dataset.range(8).batch(4)
    expected = [fingerprint_of(batch).numpy() for batch in batches]
    ours = [share.fingerprint.numpy() for share in shard_dataset(Dataset.range(8).map(made).batch(4), 1, 2)]
    assert ours == expected
