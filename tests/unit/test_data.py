"""The arithmetic of shares, and fingerprints of batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.data.pipeline import FINGERPRINT_BITS, fingerprint_of
from keras_dist.data.shares import may_be_empty, shard_dataset, share_bounds, take_share

counts, sizes = st.integers(0, 10_000), st.integers(1, 64)


@given(counts, sizes)
def test_shares_cover_a_batch_once_in_the_order_of_rank_and_differ_by_at_most_one(count: int, size: int) -> None:
    bounds = [share_bounds(count, rank, size) for rank in range(size)]
    assert (bounds[0][0], bounds[-1][1]) == (0, count)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 300), st.integers(1, 8))
@settings(deadline=None)
def test_bounds_of_tensors_are_those_of_integers(count: int, size: int) -> None:
    for rank in range(size):
        tensors = share_bounds(tf.constant(count), rank, size)
        assert tuple(int(bound) for bound in tensors) == share_bounds(count, rank, size)


@given(st.integers(1, 40), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_the_shares_of_all_ranks_are_the_batch(count: int, size: int) -> None:
    batch = {"x": tf.reshape(tf.range(count * 2), [count, 2]), "y": tf.range(count)}, tf.ones([count])
    shares = [take_share(batch, rank, size) for rank in range(size)]
    assert [int(share.total) for share in shares] == [count] * size
    assert sum(int(share.count) for share in shares) == count
    assert len({float(share.fingerprint) for share in shares}) == 1
    parts_of_leaves = zip(*[counted(share) for share in shares], strict=True)
    for leaf, parts in zip(tf.nest.flatten(batch), parts_of_leaves, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), leaf)


def counted(share: Any) -> list[np.ndarray]:
    assert all(len(leaf) == max(int(share.count), 1) for leaf in tf.nest.flatten(share.data))
    return [leaf.numpy()[: int(share.count)] for leaf in tf.nest.flatten(share.data)]


def test_scalars_go_to_every_rank() -> None:
    share = take_share((tf.range(4), tf.constant(3.0)), 1, 2)
    np.testing.assert_array_equal(share.data[0], [2, 3])
    assert share.data[1] == 3.0


def test_static_shapes_stay_static() -> None:
    data = tf.data.Dataset.range(24).batch(8, drop_remainder=True)
    assert shard_dataset(data, 0, 2).element_spec.data.shape == [4]
    assert [shard_dataset(data, rank, 3).element_spec.data.shape[0] for rank in range(3)] == [2, 3, 3]
    assert shard_dataset(data.unbatch().batch(8), 0, 2).element_spec.data.shape[0] is None


@pytest.mark.parametrize(("total", "rank", "expected"), [(2, 0, False), (1, 0, True), (None, 1, True)])
def test_may_be_empty(total: int | None, rank: int, expected: bool) -> None:
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([total])], autograph=False)
    def trace(x: Any) -> Any:
        seen.append(may_be_empty(take_share(x, rank, 2)))
        return x

    trace.get_concrete_function()
    assert seen == [expected]


LENGTHS = [(6, 2), (2, 6), (1, 6)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("is_static", [True, False])
def test_a_batch_of_tensors_of_different_lengths_is_the_share_of_the_first_rank(
    lengths: tuple[int, int], is_static: bool
) -> None:
    def shares(*batch: Any) -> Any:
        return [take_share(batch, rank, 3) for rank in range(3)]

    arrays = [tf.range(length) for length in lengths]
    if not is_static:
        shares = tf.function(shares, input_signature=[tf.TensorSpec([None], tf.int32)] * 2)
    for rank, share in enumerate(shares(*arrays)):
        assert (int(share.count), int(share.total), bool(share.is_whole)) == (
            0 if rank else lengths[0], lengths[0], True,
        )  # fmt: skip
        for leaf, array in zip(share.data, arrays, strict=True):
            np.testing.assert_array_equal(leaf, array)


BATCHES = {
    **{name: np.arange(-6, 6).reshape(6, 2).astype(name) for name in ("float64", "float32", "float16", "complex64")},
    **{name: np.arange(12).reshape(6, 2).astype(name) for name in ("int32", "uint8")},
    "bool": np.asarray([[True, False], [False, False], [True, True], [False, True], [True, False], [True, True]]),
    "string": np.asarray([*"abcdefghijkl"], "S").reshape(6, 2),
}


@pytest.mark.parametrize("dtype", BATCHES)
def test_a_fingerprint_depends_on_values_and_their_order(dtype: str) -> None:
    batch = BATCHES[dtype]
    changed = batch.copy()
    changed[3, 1] = changed[0, 0] if dtype != "bool" else not changed[3, 1]
    own, again, *others = (
        float(fingerprint_of(tf.constant(each))) for each in (batch, batch.copy(), changed, batch[[1, 0, 2, 3, 4, 5]])
    )
    assert own == again == int(own)
    assert own not in others
    assert 0 <= own < 2**FINGERPRINT_BITS


def test_a_fingerprint_knows_which_tensor_is_which() -> None:
    x, y = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    assert fingerprint_of((x, y)) != fingerprint_of((y, x))
    assert fingerprint_of({"a": x}) == fingerprint_of({"a": tf.identity(x)})


def test_a_large_batch_is_sampled_in_every_example() -> None:
    batch = np.random.RandomState(0).uniform(size=(64, 32, 32, 3)).astype("float32")
    own = float(fingerprint_of(tf.constant(batch)))
    for row in (0, 31, 63):
        changed = batch.copy()
        changed[row] = changed[row][::-1]
        assert float(fingerprint_of(tf.constant(changed))) != own
