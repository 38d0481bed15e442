"""Evaluates, predicts or runs a loop of its own until somebody presses Ctrl-C: `until_stopped.py evaluate`."""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd


class Ready(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3:
            Path(f"runs-{kd.rank()}").touch()

    on_predict_batch_end = on_test_batch_end


kd.init(seed=1)
x = np.random.RandomState(0).normal(size=(64, 4))
y = x.sum(axis=1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")


@tf.function
def step(batch: object) -> tf.Tensor:
    return kd.reduce("mean", kd.run(lambda batch: tf.reduce_mean(model(batch[0])), (batch,)))


def loop() -> None:
    for index, batch in enumerate(kd.shard(data)):
        step(batch)
        if index == 3:
            Path(f"runs-{kd.rank()}").touch()


try:
    if sys.argv[1] == "loop":
        loop()
    elif sys.argv[1] == "evaluate":
        model.evaluate(data, steps=10**6, verbose=0, callbacks=[Ready()])
    else:
        model.predict(data, steps=10**6, verbose=0, callbacks=[Ready()])
except KeyboardInterrupt:
    if sys.argv[1] != "loop":  # there, ranks may have been in different steps
        kd.barrier()
        print("stopped together")
    raise
