"""TensorFlow Datasets, and which rank maps which examples."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd
from keras_dist.data.shares import share_bounds
from tests.contract.harness import Numbers, contract
from tests.contract.parts import BATCH, COUNT, FEATURES, compiled, examples, fitted, numbers
from tests.contract.test_streams import batched, differs, stopped_then_served

# --- TensorFlow Datasets ---


@functools.cache
def builder_class() -> Any:
    """Created once: TFDS registers each builder."""
    import tensorflow_datasets as tfds

    class ContractNumbers(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = Path()

        def _info(self) -> Any:
            features = {
                "x": tfds.features.Tensor(shape=[FEATURES], dtype=np.float64),
                "y": tfds.features.Tensor(shape=[1], dtype=np.float64),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("x", "y")
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for index, (x, y) in enumerate(zip(*numbers(), strict=True)):
                yield index, {"x": x, "y": y}

    tfds.disable_progress_bar()
    ContractNumbers.__module__ = "__main__"  # TFDS would look for metadata in its package
    return ContractNumbers


def prepared() -> Any:
    """A dataset of `numbers` in four files, prepared by the chief."""
    import tensorflow_datasets as tfds

    if kd.is_chief():
        config = tfds.download.DownloadConfig(num_shards=4)
        builder_class()(data_dir="data").download_and_prepare(download_config=config)
    kd.barrier()
    return builder_class()(data_dir="data")


@contract("data-tfds", covered_by=("together-data",))
def test_tfds(distribute: Any) -> Numbers:
    prepared()
    # While TFDS prepares a dataset, one process draws from Python's generator, from which layers draw; ranks do not.
    keras.utils.set_random_seed(1)
    data = prepared().as_dataset(split="train", as_supervised=True)
    return fitted(compiled(distribute, metrics=["mae"]), batched(data.shuffle(COUNT)))


@differs("data-tfds-shuffle-files", covered_by=("together-data", "differs-captured"))
def test_tfds_shuffle_files(distribute: Any) -> Numbers:
    """TFDS then reads with `deterministic=False`: the data may or may not be the same."""
    builder = prepared()

    def make() -> tf.data.Dataset:
        return batched(builder.as_dataset(split="train", as_supervised=True, shuffle_files=True))

    return stopped_then_served(distribute, make, is_certain=False)


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
    values = tf.reshape(tf.io.decode_raw(tf.io.read_file(name), tf.float64), [FEATURES + 1])
    return values[:FEATURES], values[FEATURES:]


@contract("input-own-share", sizes=(3, 4))
def test_own_share(distribute: Any) -> Numbers:
    """No rank has the files of another rank's share: reading one would raise an error."""
    names = tf.data.Dataset.from_tensor_slices(in_own_files())
    data = names.map(read, tf.data.AUTOTUNE).map(lambda x, y: (2 * x, y)).batch(BATCH).prefetch(1)
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, data, validation_data=data)
    evaluated = model.evaluate(data.repeat(), steps=4, verbose=0)
    return {**result, "evaluated": evaluated, "predictions": model.predict(data, verbose=0)}


@contract("input-random-map")
def test_random_map(distribute: Any) -> Numbers:
    def noisy(x: Any, y: Any) -> tuple[Any, Any]:
        return x + tf.random.normal([FEATURES], dtype=tf.float64), y

    data = examples().shuffle(COUNT).map(noisy).batch(BATCH)
    return fitted(compiled(distribute), data)
