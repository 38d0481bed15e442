"""`batch="per_replica"`: which batches form a step, and which rank gets which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data import sources
from keras_dist.environment import Topology


class Rank:
    """The part of a backend that grouping uses."""

    def __init__(self, rank: int, size: int) -> None:
        self.topology = Topology(rank, size, rank, size)


def shares(dataset: tf.data.Dataset, size: int, per_epoch: int | None = None) -> list[list[Any]]:
    """Returns the share of each rank in each step."""
    ranks = [sources.group_batches(dataset, "split", Rank(rank, size), per_epoch) for rank in range(size)]  # type: ignore[arg-type]
    return [list(rank) for rank in ranks]


def that_counts(share: Any) -> list[int]:
    return share.data.numpy()[: int(share.count)].tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("per_epoch", [None, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("batches", [1, 5, 6, 21])
def test_the_number_of_steps(size: int, per_epoch: int | None, batches: int) -> None:
    length = per_epoch or batches
    epochs = [min(length, batches - start) for start in range(0, batches, length)]
    assert sources.number_of_steps(batches, size, per_epoch) == sum(-(-epoch // size) for epoch in epochs)


@pytest.mark.parametrize(
    ("size", "per_epoch", "count"), [(2, None, 1), (3, None, 13), (2, None, 8), (2, 5, 21), (3, 2, 13), (3, 1, 5)]
)
def test_every_example_is_in_one_step_in_order(size: int, per_epoch: int | None, count: int) -> None:
    dataset = tf.data.Dataset.range(count).batch(2)
    by_rank = shares(dataset, size, per_epoch)
    steps = [[that_counts(share) for share in step] for step in zip(*by_rank, strict=True)]
    assert sum((part for step in steps for part in step), []) == list(range(count))
    assert len(steps) == sources.number_of_steps(len(dataset), size, per_epoch)
    for step, parts in zip(zip(*by_rank, strict=True), steps, strict=True):
        assert {int(share.total) for share in step} == {sum(len(part) for part in parts)}
        assert len({float(share.fingerprint) for share in step}) == 1


def test_no_step_has_batches_of_two_epochs() -> None:
    """5 batches per epoch, 2 ranks: 2, 2, 1."""
    (first, second) = shares(tf.data.Dataset.range(10).batch(1), 2, 5)
    counts = [[int(share.count) for share in rank] for rank in (first, second)]
    assert counts == [[1, 1, 0, 1, 1, 0], [1] * 6]


def test_each_rank_hashes_the_batches_of_all() -> None:
    batches = np.arange(12.0)
    changed = np.where(batches == 1, 7.0, batches)  # in the chief's first batch
    ((_, second), (_, other)) = (shares(tf.data.Dataset.from_tensor_slices(x).batch(3), 2) for x in (batches, changed))
    assert second[0].data.numpy().tolist() == other[0].data.numpy().tolist()
    assert float(second[0].fingerprint) != float(other[0].fingerprint)
    assert float(second[1].fingerprint) == float(other[1].fingerprint)


def test_structures_ragged_sparse_and_strings() -> None:
    rows = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense(tf.reshape(tf.range(10), [5, 2]))
    parts = {"ragged": rows, "sparse": sparse, "text": tf.constant(["a", "b", "c", "d", "e"])}
    first, second = shares(tf.data.Dataset.from_tensor_slices(parts).batch(2), 2)
    assert [share.data["ragged"].to_list() for share in first] == [[[1], [2, 3]], [[7]]]
    assert tf.sparse.to_dense(second[0].data["sparse"]).numpy().tolist() == [[4, 5], [6, 7]]
    assert first[1].data["text"].numpy().tolist() == [b"e"]
    assert int(second[1].count) == 0


def test_a_stream_without_end() -> None:
    dataset = sources.group_batches(tf.data.Dataset.range(4).batch(1).repeat(), "split", Rank(1, 3), None)  # type: ignore[arg-type]
    assert [int(share.data[0]) for share in dataset.take(5)] == [1, 0, 3, 2, 1]
