"""The arithmetic of shares, fingerprints of batches; a batch that is cut before its examples are mapped."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers import data_adapters

from keras_dist.data import pipeline
from keras_dist.data.pipeline import FINGERPRINT_BITS, Arrays, Pipeline, decompose, fingerprint_of
from keras_dist.data.shares import Share, may_be_empty, shard_dataset, share_bounds, take_share
from keras_dist.data.sources import explain_cache
from tests.limits import examples

counts, sizes = st.integers(0, 10_000), st.integers(1, 64)


@given(counts, sizes)
def test_shares_cover_a_batch_once_in_the_order_of_rank_and_differ_by_at_most_one(count: int, size: int) -> None:
    bounds = [share_bounds(count, rank, size) for rank in range(size)]
    assert (bounds[0][0], bounds[-1][1]) == (0, count)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


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


@settings(max_examples=examples(16), deadline=None)
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


LEFT = {
    "no map": lambda: Dataset.range(8).batch(4),
    "random": lambda: Dataset.range(8).map(lambda i: i + tf.random.uniform([], 0, 9, tf.int64)).batch(4),
    "Python": lambda: Dataset.range(8).map(lambda i: tf.numpy_function(lambda v: v, [i], tf.int64)).batch(4),
    "table": lambda: Dataset.range(8).map(table()).batch(4),
    "random in a branch": lambda: (
        Dataset.range(8).map(lambda i: tf.cond(i > 3, lambda: tf.random.uniform([]), lambda: 0.0)).batch(4)
    ),
    "map of batches": lambda: Dataset.range(8).batch(4).map(lambda i: i * 2),
    "shuffled after": lambda: Dataset.range(8).map(made).shuffle(8).batch(4),
    "ragged": lambda: Dataset.range(8).map(lambda i: tf.ragged.range(i)).batch(4),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_before_it(name: str) -> None:
    tf.random.set_seed(1)  # without one, random numbers may be any
    assert decompose(LEFT[name]()) is None


def test_the_fingerprint_is_that_of_what_goes_into_the_maps() -> None:
    batches = Dataset.range(8).batch(4)
    expected = [fingerprint_of(batch).numpy() for batch in batches]
    ours = [share.fingerprint.numpy() for share in shard_dataset(Dataset.range(8).map(made).batch(4), 1, 2)]
    assert ours == expected


def batches_of(x: Any, y: Any = None, **options: Any) -> Dataset:
    return data_adapters.get_data_adapter(x, y, **options).get_tf_dataset()


def table_of(rows: int, *width: int) -> np.ndarray:
    return np.arange(rows * int(np.prod(width)), dtype="float32").reshape(rows, *width)


@settings(max_examples=examples(16), deadline=None)
@given(
    count=st.integers(1, 20),
    batch=st.integers(1, 9),
    size=st.integers(1, 4),
    shuffle=st.sampled_from([True, False, "batch"]),
    weighted=st.booleans(),
)
def test_shares_of_arrays_are_those_of_the_finished_batches(
    count: int, batch: int, size: int, shuffle: bool | str, weighted: bool
) -> None:
    x, weight = {"a": table_of(count, 2, 3), "b": table_of(count)}, table_of(count, 1) if weighted else None

    def dataset() -> Dataset:
        tf.random.set_seed(3)  # each reader draws the same order
        return batches_of(x, table_of(count, 4), sample_weight=weight, batch_size=batch, shuffle=shuffle)

    assert isinstance(decompose(dataset()), Arrays)
    for rank in range(size):
        ours = shard_dataset(dataset(), rank, size)
        assert ours.cardinality() == dataset().cardinality()
        tf.random.set_seed(3)
        assert_same(ours, cut_afterwards(dataset(), rank, size))


GATHERED = {
    "integers": lambda: batches_of(np.arange(7), batch_size=3),
    "text": lambda: batches_of(tf.constant(["a", "b", "c", "d", "e"]), batch_size=2),
    "tensors": lambda: batches_of(tf.range(7), tf.range(7), batch_size=3),
    "nested": lambda: batches_of([np.zeros((6, 2)), {"a": np.ones(6), "b": (np.ones(6),)}], np.ones(6), batch_size=4),
    "empty rows": lambda: batches_of(np.zeros((6, 0)), np.ones(6), batch_size=4),
    "class weights": lambda: batches_of(np.arange(6), np.ones(6), batch_size=2, class_weight={0: 1.0, 1: 2.0}),
    "large batches": lambda: batches_of(np.ones((2, 3)), batch_size=32),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_after_the_cut(name: str) -> None:
    """If this fails for all, Keras makes batches of arrays in another way: see `tf_data.gather_of`."""
    dataset = GATHERED[name]()
    assert isinstance(decompose(dataset), Arrays)
    ours = shard_dataset(dataset, 1, 2)
    tf.nest.assert_same_structure(ours.element_spec.data, dataset.element_spec)
    assert_same(ours, cut_afterwards(dataset, 1, 2))


def sparse() -> Any:
    return tf.sparse.from_dense(np.eye(6))


ROWS = tf.constant([[1, 2, 3], [4, 5, 6]])


def gathered(function: Callable[[Any, Any], Any]) -> Dataset:
    return Dataset.zip((Dataset.from_tensors([0, 1]), Dataset.from_tensors(ROWS).repeat())).map(function)


FINISHED = {
    "nothing in between": lambda: batches_of({"a": np.ones(6), "b": None}, np.ones(6), batch_size=4),
    "sparse": lambda: batches_of(sparse(), np.ones(6), batch_size=2),
    "mapped": lambda: batches_of(np.arange(6), batch_size=2).map(lambda x: 2 * x),
    "columns": lambda: gathered(lambda i, rows: tf.gather(rows, i, axis=1)),
    "a product": lambda: gathered(lambda i, rows: 2 * tf.gather(rows, i)),
    "the indices": lambda: gathered(lambda i, rows: i),
    "other arrays each time": lambda: Dataset.zip((Dataset.from_tensors([0, 1]), Dataset.from_tensors(ROWS))).map(
        lambda i, rows: tf.gather(rows, i)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINISHED)
def test_what_is_cut_as_finished_batches(name: str) -> None:
    dataset = FINISHED[name]()
    assert not isinstance(decompose(dataset), Arrays)
    assert len([*shard_dataset(dataset, 1, 2)]) == len([*dataset])


def digest(x: Any, **options: Any) -> str:
    pipeline = decompose(batches_of(x, batch_size=2, **options))
    return pipeline.digest


def test_other_maps_have_another_digest() -> None:
    """Those of a map that was traced again are equal, whatever its nodes and functions are called."""

    def digest_of(factor: Any) -> str:
        @tf.function
        def product(number: Any) -> Any:
            return number * factor

        pipeline = decompose(Dataset.range(8).map(product).batch(4))
        assert isinstance(pipeline, Pipeline)
        return pipeline.digest

    assert digest_of(2) == digest_of(2) != digest_of(3)
    captured, other = (tf.constant(number, tf.int64) for number in (2, 3))
    assert digest_of(captured) == digest_of(tf.identity(captured)) != digest_of(other)


def test_other_arrays_have_another_digest() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
    other = x.copy()
    other[17, 2] += 1e-3
    assert digest(x) == digest(x.copy())
    assert len({digest(x), digest(other), digest(x[:, ::-1]), digest(x.astype("int32")), digest([x, x])}) == 5


@given(rows=st.integers(1, 40), width=st.integers(1, 40), row=st.integers(0, 39))
@settings(max_examples=20, deadline=None)
def test_each_row_of_a_large_array_counts(rows: int, width: int, row: int) -> None:
    """An array of more numbers than are looked at: one in each of two places of a row."""
    x = np.zeros((rows, width), "float32")
    other = x.copy()
    other[row % rows] = 1.0
    one, two = (int(fingerprint_of(tf.constant(each), 1)) for each in (x, other))
    assert one != two


@pytest.mark.parametrize("shape", [(4, 100), (None, 100), (None, None)])
def test_all_numbers_of_the_first_row_count(shape: Any) -> None:
    """So other noise in one column is noticed."""
    batches = np.zeros((3, 4, 100), "float32")
    batches[1, :, 70], batches[2, 1:, 70] = 1.0, 1.0
    find = tf.function(fingerprint_of, input_signature=[tf.TensorSpec(shape)])
    ours = [int(find(tf.constant(batch))) for batch in batches]
    assert ours[0] != ours[1]
    assert ours[0] == ours[2]  # of the others some are enough
    assert ours == [int(fingerprint_of(tf.constant(batch))) for batch in batches]


def test_a_cache_of_several_ranks_in_one_file_is_explained(tmp_path: Path) -> None:
    data = Dataset.range(4).cache(str(tmp_path / "train"))
    first = iter(data)
    next(first)
    with pytest.raises(tf.errors.AlreadyExistsError) as info:
        next(iter(data))
    text = str(explain_cache(info.value))
    assert f"Received: dataset.cache('{tmp_path}/train')" in text
    assert f'a file of its own, dataset.cache(f"{tmp_path}/train-{{kd.rank()}}")' in text
    other = tf.errors.AlreadyExistsError(None, None, "a table")
    assert explain_cache(other) is other


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
    pairs = pipeline.with_fingerprints(dataset)
    batches, fingerprints = zip(*pairs, strict=True)
    return [tf.nest.flatten(batch)[0].numpy().tolist() for batch in batches], [*map(float, fingerprints)]


@pytest.fixture
def no_seed() -> None:
    """With a global seed, which another test of this process may have set, equal pipelines draw the same noise."""
    tf.random.set_seed(None)


@pytest.mark.usefixtures("no_seed")
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


def test_a_share_is_no_part_of_the_array_that_a_generator_yields() -> None:
    """TensorFlow computes in place in rows of an array whose memory it shares, if that is aligned."""
    memory = np.ones(128 + 8)
    start = -memory.ctypes.data % 64 // 8
    array = memory[start : start + 128].reshape(16, 8)
    spec = tf.TensorSpec([None, 8], tf.float64)
    batches = tf.data.Dataset.from_generator(lambda: iter([array]), output_signature=spec)
    for rank in range(2):
        doubled = shard_dataset(batches, rank, 2).map(lambda share: share.data * 2.0 + 1.0)
        np.testing.assert_array_equal([*doubled.as_numpy_iterator()], np.full([1, 8, 8], 3.0))
    np.testing.assert_array_equal(array, np.ones([16, 8]))
