"""Trains with checkpoints in a folder that is full on the chief's side."""

import resource
import sys

import keras
import numpy as np

import keras_dist as kd

folder, limit = sys.argv[1], int(sys.argv[2])
kd.init()
if kd.is_chief() and limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
x = np.ones([8, 100], "float32")
model = kd.distribute(keras.Sequential([keras.Input([100]), keras.layers.Dense(1000), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(f"{folder}/best.keras")])
print("trained to the end")
