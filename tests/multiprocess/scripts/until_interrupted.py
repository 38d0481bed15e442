"""Trains until somebody presses Ctrl-C, then saves: twice.

The first time each rank is interrupted by itself, and in the worst way: one before a step, the others while they
wait for it inside that step.
"""

import hashlib
import os
import signal
import threading
from pathlib import Path

import keras
import numpy as np

import keras_dist as kd


class Apart(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if (self.model.optimizer.iterations.numpy(), batch) == (35, 3):
            if kd.is_chief():
                os.kill(os.getpid(), signal.SIGINT)
            else:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


class Progress(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        Path(f"trains-{kd.rank()}").touch()


kd.init(seed=1)
x = np.random.RandomState(0).normal(size=(256, 4))
y = x.sum(axis=1, keepdims=True)
model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
for name, callback in {"apart": Apart(), "together": Progress()}.items():
    try:
        model.fit(x, y, batch_size=4, epochs=10**6, validation_split=0.5, verbose=0, callbacks=[callback])
    except KeyboardInterrupt:
        model.save(f"{name}.keras")
    for each in (model, keras.models.load_model(f"{name}.keras")):
        weights = b"".join(weight.tobytes() for weight in each.get_weights())
        print(name, "after", int(each.optimizer.iterations.numpy()), hashlib.sha256(weights).hexdigest())
