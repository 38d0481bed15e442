"""Fails when a private name of tf.data changes or is no longer needed."""

from __future__ import annotations

import pytest
import tensorflow as tf

from keras_dist.compat import tf_data

Dataset = tf.data.Dataset


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


def test_a_map_is_applied_to_an_element() -> None:
    dataset = Dataset.from_tensors((tf.constant(2), {"a": tf.constant(3)})).map(lambda x, y: {"sum": x + y["a"]})
    outputs = tf_data.map_function(dataset)((tf.constant(5), {"a": tf.constant(7)}))
    assert {key: value.numpy() for key, value in outputs.items()} == {"sum": 12}


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
