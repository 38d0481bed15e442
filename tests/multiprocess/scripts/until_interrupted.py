"""Runs until somebody presses Ctrl-C: `until_interrupted.py fit|evaluate|predict|loop`. `runs-RANK` says that it runs.

`fit` does it twice, and saves. The first time each rank is interrupted by itself, and in the worst way: one before a
step, the others while they wait for it inside that step.
"""

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd


class Apart(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if (self.model.optimizer.iterations.numpy(), batch) == (35, 3):
            if kd.is_chief():
                os.kill(os.getpid(), signal.SIGINT)
            else:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


class Ready(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        runs()

    def on_test_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3 and how != "fit":
            runs()

    on_predict_batch_end = on_test_batch_end


def runs() -> None:
    Path(f"runs-{kd.rank()}").touch()


def fit() -> None:
    options = {"batch_size": 4, "epochs": 10**6, "validation_split": 0.5, "verbose": 0}
    for name, callback in {"apart": Apart(), "together": Ready()}.items():
        try:
            model.fit(x, y, callbacks=[callback], **options)
        except KeyboardInterrupt:
            model.save(f"{name}.keras")
        for each in (model, keras.models.load_model(f"{name}.keras")):
            weights = b"".join(weight.tobytes() for weight in each.get_weights())
            print(name, "after", int(each.optimizer.iterations.numpy()), hashlib.sha256(weights).hexdigest())


def loop() -> None:
    for index, batch in enumerate(kd.shard(data)):
        step(batch)
        if index == 3:
            runs()


@tf.function
def step(batch: object) -> tf.Tensor:
    return kd.reduce("mean", kd.run(lambda batch: tf.reduce_mean(model(batch[0])), (batch,)))


how = sys.argv[1]
kd.init(seed=1)
x = np.random.RandomState(0).normal(size=(256, 4))
y = x.sum(axis=1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
try:
    if how in ("fit", "loop"):
        {"fit": fit, "loop": loop}[how]()
    else:
        getattr(model, how)(data, steps=10**6, verbose=0, callbacks=[Ready()])
except KeyboardInterrupt:
    if how != "loop":  # there, ranks may have been in different steps
        kd.barrier()
        print("stopped together")
    raise
