"""Ends `fit` while a thread of tf.data runs a generator: `python slow_generator.py BACKEND HOW`, a backend or none."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

backend, how = sys.argv[1:]


def batches() -> Iterator[tuple[Any, Any]]:
    while True:
        for _ in range(3):
            time.sleep(0.01)  # after it, the thread waits for Python
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 9 and how == "error":
            raise ValueError("this callback is on fire")
        if batch == 9:
            sys.exit(3)


signature = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)
data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
if backend != "none":
    import keras_dist as kd

    kd.init(backend)
    model = kd.distribute(model)
model.compile("sgd", "mse")
print("fit", file=sys.stderr)
model.fit(data, steps_per_epoch=20, epochs=10, verbose=0, callbacks=[Ends()])
