"""Handwritten digits as TensorFlow datasets: scikit-learn's 1,797 images, without a download, or MNIST."""

import fcntl
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

tfds.disable_progress_bar()

TEST_IMAGES = 360
CLASSES = 10


class Digits(tfds.core.GeneratorBasedBuilder):
    """The 8x8 images that come with scikit-learn, split into 1,437 for training and 360 for testing."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                "label": tfds.features.ClassLabel(num_classes=CLASSES),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        order = np.random.RandomState(0).permutation(len(images))
        test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
        return {
            "train": self._generate_examples(images[train], digits.target[train]),
            "test": self._generate_examples(images[test], digits.target[test]),
        }

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": image, "label": int(label)}


def load(name: str, directory: str | Path) -> tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset]:
    """Returns datasets of (image, label) for training, validation and testing. Prepares the files first.

    Args:
        name: `"digits"`, or `"mnist"`, which TFDS downloads.
        directory: The folder of the files.
    """
    builder = prepare(name, Path(directory))
    splits = ["train[:90%]", "train[90%:]", "test"]
    train, validation, test = builder.as_dataset(split=splits, as_supervised=True)
    return train, validation, test


def prepare(name: str, directory: Path) -> tfds.core.DatasetBuilder:
    """Returns a builder whose files exist. If several processes start at once, only one of them writes the files."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed, or the process dies
        builder = Digits(data_dir=directory) if name == "digits" else tfds.builder(name, data_dir=directory)
        # TFDS draws a random name for a temporary folder. It must not change what a seed gives in the first run.
        state = random.getstate()
        builder.download_and_prepare()
        random.setstate(state)
    return builder
