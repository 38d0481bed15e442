"""Data read by the chief, sharded data, streams that differ between ranks, and which rank maps which examples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.data.shares import share_bounds
from tests.contract.harness import Numbers, asking, contract, same
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    compiled,
    examples,
    fitted,
    from_list,
    numbers,
    of_pipeline,
    of_words,
    predictions,
    some,
    stack,
    tfds_builder,
    used,
)
from tests.contract.test_api import refused
from tests.contract.test_sources import RowMeans, all_trained_as_the_chief_alone, parsed, ragged, written

# --- Read by the chief ---


# The last batch is smaller than any number of ranks.
contract("chief-numpy", covered_by=("chief-dict-of-strings", "data-generator"))(
    lambda distribute: used(
        compiled(asking(distribute, data="chief"), metrics=["mae"]), *numbers(), validation_data=numbers(11)
    )
)
contract("chief-tf", covered_by=("chief-dict-of-strings", "data-generator"))(
    lambda distribute: fitted(
        compiled(asking(distribute, data="chief")), batched(examples().shuffle(COUNT)).repeat(), epochs=3,
        steps_per_epoch=3,
    )
)  # fmt: skip


@contract("chief-dict-of-strings")
def test_chief_dict_of_strings(distribute: Any) -> Numbers:
    (x, y), words = numbers(), tf.constant(["a", "bb", "", "dddd", "\u00e9"] * 5)
    data = tf.data.Dataset.from_tensor_slices(({"word": words, "x": x}, y)).batch(BATCH)
    model = of_words(["a", "bb", "dddd", "\u00e9"])
    return used(compiled(asking(distribute, data="chief"), model=model), data)


contract("chief-ragged", covered_by=("chief-dict-of-strings", "data-generator", "data-ragged"))(
    lambda distribute: used(compiled(asking(distribute, data="chief"), model=RowMeans()), ragged().batch(BATCH))
)


# --- Sharded ---


def part(rank: int, is_equal: bool, count: int = 30, batch: int = 3) -> tf.data.Dataset:
    """A rank's own shard: batches of 3. Each rank has 2 of them, or one more than the rank before."""
    steps = [2 if is_equal else 1 + rank for rank in range(4)]
    start = sum(steps[:rank]) * batch
    x, y = numbers(count)
    rows = slice(start, start + steps[rank] * batch)
    return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(batch)


def together(size: int, is_equal: bool) -> tf.data.Dataset:
    """The batches of one process: the concatenated batches of the ranks."""
    parts = [list(part(rank, is_equal)) for rank in range(size)]
    steps = [[rows[step] for rows in parts if step < len(rows)] for step in range(max(len(rows) for rows in parts))]
    return from_list([tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True)) for step in steps])


def own_part(is_equal: bool) -> tf.data.Dataset:
    return part(kd.rank(), is_equal)


def trained_on(make: Callable[[bool], tf.data.Dataset], is_equal: bool, distribute: Any) -> Numbers:
    """Trains, validates and evaluates on equal or unequal numbers of steps. Validation has the other kind."""
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, make(is_equal), validation_data=make(not is_equal))
    return {**result, "evaluated": model.evaluate(make(is_equal), verbose=0)}


def reference(is_equal: bool) -> Callable[[int], Numbers]:
    return lambda size: trained_on(lambda equal: together(size, equal), is_equal, same)


contract("sharded-equal", reference=reference(True), of_ranks=True, covered_by=("sharded-unequal",))(
    lambda distribute: trained_on(own_part, True, asking(distribute, data="sharded"))
)
# Validation has shards of equal size, training and `evaluate` have not.
contract("sharded-unequal", reference=reference(False), of_ranks=True)(
    lambda distribute: trained_on(own_part, False, asking(distribute, data="sharded"))
)


@contract("sharded-by-auto-shard-policy", reference=reference(False), of_ranks=True, covered_by=("sharded-unequal",))
def test_sharded_by_auto_shard_policy(distribute: Any) -> Numbers:
    """The option of one dataset says so. The others are split."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return trained_on(lambda equal: own_part(equal).with_options(options), False, distribute)


def part_or_nothing(is_equal: bool) -> tf.data.Dataset:
    """There are too few files, so the last of several ranks has none."""
    has_some = kd.rank() < kd.size() - 1 or kd.size() == 1
    return own_part(True) if has_some else own_part(True).take(0)


contract(
    "sharded-without-data", of_ranks=True, covered_by=("sharded-unequal",),
    reference=lambda size: trained_on(lambda equal: together(max(size - 1, 1), True), True, same),
)(lambda distribute: trained_on(part_or_nothing, True, asking(distribute, data="sharded")))  # fmt: skip


def predicted(make: Callable[[bool], tf.data.Dataset], distribute: Any) -> Numbers:
    model = compiled(distribute)
    return {str(equal): model.predict(make(equal).map(lambda x, y: x), verbose=0) for equal in (True, False)}


# Every rank gets the predictions of all: batch by batch, in the order of rank.
contract(
    "sharded-predict", of_ranks=True, covered_by=("sharded-unequal", "predict"),
    reference=lambda size: predicted(lambda equal: together(size, equal), same),
)(lambda distribute: predicted(own_part, asking(distribute, data="sharded")))  # fmt: skip


@contract("data-function", covered_by=("loop-shard-function",))
def test_function(distribute: Any) -> Numbers:
    """The last batch comes from some ranks only. Or the function cuts whole batches by itself."""
    model = compiled(distribute, metrics=["mae"])
    words = "A function that returns a dataset needs kd.shard"
    refused(kd.ConfigurationError, words, lambda: model.fit(of_pipeline), kd.num_replicas)
    result = fitted(model, kd.shard(of_pipeline), validation_data=kd.shard(of_pipeline))
    evaluated, fed = model.evaluate(kd.shard(of_pipeline), verbose=0), model.evaluate(*numbers(), verbose=0)
    cut = model.fit(kd.shard(lambda context: kd.shard(examples().batch(BATCH))), verbose=0).history
    return {**result, "evaluated": evaluated, "fed": fed, "cut": cut}


# --- Streams that differ ---


def batched(data: tf.data.Dataset) -> tf.data.Dataset:
    return data.batch(BATCH)


def stopped_then_served(distribute: Any, make: Callable[[], Any], is_certain: bool = True) -> Numbers:
    """If the dataset differs, or may do so, `split` stops with rank and remedy, and `chief` works."""
    if kd.size() > 1:
        model = compiled(distribute)
        try:
            fitted(model, make())
            assert not is_certain
        except kd.MismatchError as error:
            text = str(error)
            assert "The ranks read different data" in text
            assert f"rank{'s' if kd.size() > 2 else ''} {', '.join(map(str, range(1, kd.size())))} of" in text
            assert "kd.distribute(model, data='chief')" in text
    return served(asking(distribute, data="chief"), make())


def differs(row: str, *covered_by: str, is_certain: bool = True) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Declares a row by its dataset."""

    def declare(make: Callable[[], Any]) -> Callable[[], Any]:
        case = lambda distribute: stopped_then_served(distribute, make, is_certain)  # noqa: E731
        contract(row, covered_by=covered_by, verify=all_trained_as_the_chief_alone)(case)
        return make

    return declare


def served(distribute: Any, data: tf.data.Dataset) -> Numbers:
    """Trains on the chief's data, and again in one process on what the chief has read."""
    given: list[tuple[np.ndarray, np.ndarray]] = []

    def note(x: Any, y: Any) -> None:
        given.append((x.numpy(), y.numpy()))

    def noted(x: Any, y: Any) -> Any:
        with tf.control_dependencies([tf.py_function(note, [x, y], [])]):
            return tf.identity(x), tf.identity(y)

    model, alone = compiled(distribute), compiled(same)
    alone.set_weights(model.get_weights())
    result = fitted(model, data.map(noted))
    for batch in given:
        alone.train_on_batch(*batch)
    assert len(given) in (0, 8)
    return {"own_weights": result["weights"], "own_alone": alone.get_weights()}


@contract("data-unordered-map")
def test_unordered_map(distribute: Any) -> Numbers:
    """With `deterministic=False`, examples may come in the order in which they are ready."""
    late = kd.rank()

    def wait(x: Any, y: Any) -> tuple[Any, Any]:
        time.sleep(0.05 if np.isclose(x[0], numbers()[0][late, 0]) else 0)
        return x, y

    def slow(x: Any, y: Any) -> tuple[Any, Any]:
        x, y = tf.numpy_function(wait, [x, y], [tf.float64, tf.float64])
        return tf.ensure_shape(x, [FEATURES]), tf.ensure_shape(y, [1])

    if distribute is same:
        return fitted(compiled(distribute), batched(examples().map(slow)))
    options = tf.data.Options()
    options.threading.private_threadpool_size = 4
    # Directly before `batch` it would be fused with it, which keeps the order. In one process nobody knows the order.
    data = batched(examples().map(slow, 4, deterministic=kd.size() == 1).prefetch(1)).with_options(options)
    return fitted(compiled(distribute), data)


@differs("differs-peeked-at", "differs-captured")
def peeked_at() -> tf.data.Dataset:
    """The chief reads the first batch of a dataset that is shuffled without a seed."""
    data = batched(examples().shuffle(COUNT))
    if kd.is_chief():
        next(iter(data))
    return data


@differs("differs-by-rank-and-time", "differs-captured")
def by_rank_and_time() -> tf.data.Dataset:
    """One number of one example differs from the other ranks."""
    x, y = numbers()
    x[3, 2] = time.time_ns() % 1e9 + kd.rank()
    return batched(tf.data.Dataset.from_tensor_slices((x / 1e9, y)))


@contract("data-list-files", covered_by=("together-data", "differs-captured"))
def test_list_files(distribute: Any) -> Numbers:
    """Shuffled without a seed, but equal, as `kd.init()` gave all ranks the same random state."""
    written([f"{index}.tfrecord" for index in range(4)])
    records = tf.data.Dataset.list_files("*.tfrecord").flat_map(tf.data.TFRecordDataset)
    return fitted(compiled(distribute), batched(records.map(parsed)))


@differs("differs-captured")
def captured() -> tf.data.Dataset:
    """What a map before `batch` has captured, such as the order of a Python `set`."""
    labels = tf.constant([float(kd.rank()), 1.0], tf.float64), np.asarray([1.0, float(kd.rank())])
    return batched(examples().map(lambda x, y: (x, y * labels[0][0] + labels[1][1])))


RANKS = ("horovod", "multi_worker")


@contract("differs-without-training", of=RANKS, covered_by=("differs-constants",))
def test_differs_without_training(distribute: Any) -> Numbers:
    model, (x, y) = compiled(distribute), numbers()
    other = x + 1e-9 * kd.rank()
    results = fitted(model, x, y, validation_data=(x, y))
    if kd.size() > 1:
        calls: list[Callable[[], Any]] = [
            lambda: model.evaluate(other, y, batch_size=BATCH, verbose=0),
            lambda: predictions(model, other),
            lambda: model.predict_on_batch(other),
            lambda: model.test_on_batch(other, y),
            lambda: model.fit(x, y, validation_data=(other, y), verbose=0),
        ]
        for call in calls:
            weights = model.get_weights()
            with pytest.raises(kd.MismatchError, match="The ranks read different data"):
                call()
            model.set_weights(weights)
    return {**results, "evaluated": model.evaluate(x, y, verbose=0), "predicted": predictions(model, x)}


class Scaled(keras.layers.Layer):
    """Multiplies by a constant that is no weight."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def call(self, x: Any) -> Any:
        return x * self.scale


def words(vocabulary: list[str]) -> keras.Model:
    layers = keras.layers
    lookup = layers.StringLookup(vocabulary=vocabulary)
    return keras.Sequential(
        [keras.Input([1], dtype="string"), lookup, layers.Embedding(5, 2), layers.Flatten(), layers.Dense(1)]
    )


@contract("differs-constants", of=RANKS)
def test_differs_constants(distribute: Any) -> Numbers:
    """Constants of a layer or a loss, and vocabularies: they are no weights, so the chief's are not sent."""
    x, y = numbers(24)
    text = tf.constant([["a"], ["b"], ["c"], ["a"]] * 2)

    def scaled(scale: Any) -> keras.Model:
        return stack(Scaled(scale), keras.layers.Dense(1))

    def weighted(scale: float) -> Callable[[Any, Any], Any]:
        return lambda y, y_pred: tf.square(y - y_pred)[:, 0] * scale

    own = 0.5 * kd.rank()
    cases: dict[str, Any] = {
        "array": (lambda own: compiled(distribute, model=scaled(np.full([FEATURES], 1.0 + own))), x, y, "float64(4,)"),
        "tensor": (
            lambda own: compiled(distribute, model=scaled(tf.constant(1.0 + own, tf.float64))), x, y, "float64()"
        ),
        "loss": (lambda own: compiled(distribute, loss=weighted(1.0 + own)), x, y, "float64()"),
        "words": (
            lambda own: compiled(distribute, model=words(["c", "b", "a"] if own else ["a", "b", "c"])), text, y[:8],
            "the vocabulary of layer 'string_lookup",
        ),
    }  # fmt: skip
    for make, inputs, outputs, named in some(cases, "array", "words").values():
        make(0.0).fit(inputs, outputs, verbose=0)
        if kd.size() > 1:
            with pytest.raises(kd.MismatchError, match="The ranks compute with different constants") as raised:
                make(own).fit(inputs, outputs, verbose=0)
            assert named in str(raised.value)
            if make(own).loss == "mse":
                with pytest.raises(kd.MismatchError, match="The ranks compute with different constants"):
                    make(own).predict(inputs, verbose=0)
    return {}


# --- TensorFlow Datasets ---


def prepared() -> Any:
    """A dataset of `numbers` in four files, prepared by the chief."""
    import tensorflow_datasets as tfds

    def rows(_: Any) -> list[dict[str, Any]]:
        return [{"x": x, "y": y} for x, y in zip(*numbers(), strict=True)]

    builder = tfds_builder(rows, rows(None)[0])
    if kd.is_chief():
        builder(data_dir="data").download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    kd.barrier()
    return builder(data_dir="data")


@contract("data-tfds", covered_by=("together-data",))
def test_tfds(distribute: Any) -> Numbers:
    prepared()
    # While TFDS prepares a dataset, one process draws from Python's generator, from which layers draw; ranks do not.
    keras.utils.set_random_seed(1)
    data = prepared().as_dataset(split="train", as_supervised=True)
    return fitted(compiled(distribute, metrics=["mae"]), batched(data.shuffle(COUNT)))


@differs("data-tfds-shuffle-files", "together-data", "differs-captured", is_certain=False)
def of_shuffled_files() -> tf.data.Dataset:
    """TFDS then reads with `deterministic=False`: the data may or may not be the same."""
    return batched(prepared().as_dataset(split="train", as_supervised=True, shuffle_files=True))


# --- Input work ---

FULL = 3 * BATCH  # no rank has an empty share, for which it would read another rank's example as a placeholder


def in_own_files() -> list[str]:
    """Writes a file for each example of this rank's shares to its own folder, and changes to that folder."""
    folder = Path(f"rank-{kd.rank()}-of-{kd.size()}")
    folder.mkdir()
    os.chdir(folder)
    x, y = numbers(FULL)
    start, stop = share_bounds(BATCH, kd.rank(), kd.size())
    for index in range(FULL):
        if start <= index % BATCH < stop:
            Path(f"{index}.example").write_bytes(np.concatenate([x[index], y[index]]).tobytes())
    return [f"{index}.example" for index in range(FULL)]


def read(name: Any) -> tuple[Any, Any]:
    return parsed(tf.io.read_file(name))


@contract("input-own-share", sizes=(3, 4), also=("multi_worker-2",))
def test_own_share(distribute: Any) -> Numbers:
    """No rank has the files of another rank's share: reading one would raise an error."""
    names = tf.data.Dataset.from_tensor_slices(in_own_files())
    data = names.map(read, tf.data.AUTOTUNE).map(lambda x, y: (2 * x, y)).batch(BATCH).prefetch(1)
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, data, validation_data=data)
    evaluated = model.evaluate(data.repeat(), steps=4, verbose=0)
    return {**result, "evaluated": evaluated, "predictions": model.predict(data, verbose=0)}


contract("input-random-map")(
    lambda distribute: fitted(
        compiled(distribute),
        batched(examples().shuffle(COUNT).map(lambda x, y: (x + tf.random.normal([FEATURES], dtype=tf.float64), y))),
    )
)
