"""Trains with parameter servers, or alone: `python parameter_server.py FOLDER`."""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

import keras_dist as kd

folder = Path(sys.argv[1])
distributed = "TF_CONFIG" in os.environ
STEPS, BATCH, EPOCHS = 7, 8, 4

if distributed:
    kd.init(kd.ParameterServer())
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(STEPS * BATCH - 5, 4))
y = np.tanh(x.sum(axis=1, keepdims=True))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model = kd.distribute(model) if distributed else model
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=EPOCHS, verbose=0)
result = {
    "history": history.history,
    "weights": [weight.tolist() for weight in model.get_weights()],
    "iterations": int(model.optimizer.iterations),
    "devices": sorted({variable.value.device for variable in (*model.variables, *model.optimizer.variables)}),
}
(folder / "result.json").write_text(json.dumps(result))
