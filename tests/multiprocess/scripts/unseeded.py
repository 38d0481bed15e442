"""Trains without a global seed, and notes what it has read: `python unseeded.py FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd

EPOCHS, COUNT = 3, 32
kd.init()
numbers = np.arange(COUNT, dtype="float32")[:, None]


def noted(source: Any, **options: Any) -> list[list[float]]:
    """Returns what this rank has computed of the first column in each epoch, in order."""
    found: list[float] = []

    class Noting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            def note(column: Any) -> Any:
                found.extend(column.numpy().tolist())
                return np.zeros([], "int32")

            with tf.control_dependencies([tf.py_function(note, [data[0][:, 0]], tf.int32)]):
                return super().train_step(data)

    # Not tried out: what is noted in Python would be noted twice more.
    model = kd.distribute(Noting([keras.Input([source_width(source)]), keras.layers.Dense(1)]), verify=False)
    model.compile("sgd", "mse")
    model.fit(source, epochs=EPOCHS, verbose=0, **options)
    return [found[epoch * len(found) // EPOCHS : (epoch + 1) * len(found) // EPOCHS] for epoch in range(EPOCHS)]


def source_width(source: Any) -> int:
    spec = source.element_spec[0] if isinstance(source, tf.data.Dataset) else source
    return int(spec.shape[-1])


def noise(x: Any, y: Any) -> Any:
    return tf.random.uniform([1]), y


examples = tf.data.Dataset.from_tensor_slices((numbers, numbers))
result = {
    "own seed": noted(examples.shuffle(COUNT, seed=5).batch(8)),
    "shuffled": noted(examples.shuffle(COUNT).batch(8)),
    "arrays": noted(numbers, y=numbers, batch_size=8),
    "noise": noted(examples.map(noise).batch(8)),
    "noise, several at a time": noted(examples.map(noise, 2).batch(8)),
}
Path(sys.argv[1], f"{kd.rank()}.json").write_text(json.dumps(result))
