"""Two ranks without a folder in common, as on two hosts: training is broken off, then resumed from a backup."""

import contextlib
import json
import os
from pathlib import Path

import keras
import numpy as np

import keras_dist as kd

kd.init(seed=1)
common = Path.cwd()
own = common / f"host-{kd.rank()}"
own.mkdir()
os.chdir(own)

x = np.random.RandomState(0).normal(size=(25, 4))
y = x.sum(axis=1, keepdims=True)


class Break(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == 2:
            raise RuntimeError("power cut")


def train(*callbacks: keras.callbacks.Callback) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


whole = train()
with contextlib.suppress(RuntimeError):
    train(keras.callbacks.BackupAndRestore("backup"), Break())
resumed = train(keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False))
resumed.save("model.keras")
weights = [[weight.tolist() for weight in model.get_weights()] for model in (whole, resumed)]
files = sorted(str(path) for path in Path().iterdir())
(common / f"found-{kd.rank()}.json").write_text(json.dumps({"weights": weights, "files": files}))
resumed.load_weights("model.keras")
