"""Trains with parameter servers, and lets a fault happen: `python parameter_server.py CASE FOLDER`."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np

import keras_dist as kd

case, folder = sys.argv[1], Path(sys.argv[2])
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "plain", "index": 0})
(folder / f"{task['type']}-{task['index']}.pid").write_text(str(os.getpid()))

FAULTS = {
    "worker": ["worker-1"], "workers": ["worker-0", "worker-1"], "server": ["ps-0"], "coordinator": ["chief-0"],
    "hang": ["worker-1"],
}  # fmt: skip
MODE = "async" if case.startswith("async") else "sync"
FAULT = case.removeprefix("async-")
STEPS, BATCH, EPOCHS = 7, 8, 4


class Fault(keras.callbacks.Callback):
    """Kills processes at a random moment of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = random.SystemRandom().randrange(STEPS)
        self.delay = random.SystemRandom().uniform(0, 0.03)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if self.model.optimizer.iterations // STEPS == 1 and batch == self.batch and not (folder / "fault").exists():
            print("fault in batch", batch, "after", self.delay, flush=True)
            threading.Timer(self.delay, self.strike).start()

    def strike(self) -> None:
        (folder / "fault").write_text(str(time.monotonic()))
        for name in FAULTS.get(FAULT, []):
            os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGSTOP if FAULT == "hang" else signal.SIGKILL)


if task["type"] != "plain":
    kd.init(kd.ParameterServer(mode=MODE, hang_seconds=6.0 if FAULT == "hang" else 600.0))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(STEPS * BATCH - 5, 4))
y = np.tanh(x.sum(axis=1, keepdims=True))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model = model if task["type"] == "plain" else kd.distribute(model)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
callbacks = [keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)]
callbacks += [Fault()] if FAULT in FAULTS else []
history = model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=EPOCHS, verbose=0, callbacks=callbacks)
result = {
    "history": history.history,
    "weights": [weight.tolist() for weight in model.get_weights()],
    "iterations": int(model.optimizer.iterations),
    "devices": sorted({variable.value.device for variable in (*model.variables, *model.optimizer.variables)}),
}
(folder / "result.json").write_text(json.dumps(result))
