"""Trains a small model with commits: `python resume.py BACKEND FOLDER [FAULT]`.

`FOLDER` gets the commits, the files of the callbacks and, when the training has ended, `result.json`. `FAULT` is JSON:
the `ranks` to which something happens, after which `step`, how many `seconds` later, and the `signal`.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd

backend, folder = sys.argv[1], Path(sys.argv[2])
fault = json.loads(sys.argv[3]) if len(sys.argv) > 3 else None
COUNT, FEATURES, BATCH, EPOCHS, PATIENCE = 104, 6, 8, 4, 1

keras.utils.set_random_seed(7)
ON_CPUS = {
    "mirrored": lambda: kd.Mirrored(devices=["CPU:0", "CPU:1"]),
    "central_storage": lambda: kd.CentralStorage(compute_devices=["CPU:1", "CPU:2"]),
}
kd.init(ON_CPUS[backend]() if backend in ON_CPUS else "auto")


def build() -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(16, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input([FEATURES]), *hidden, layers.Dense(1)])


def data() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    x = random.normal(size=(COUNT, FEATURES)).astype("float32")
    y = np.tanh(x[:, :1] * x[:, 1:2]).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(COUNT)
    return examples.map(lambda x, y: (x + tf.random.normal([FEATURES], stddev=0.01), y)).batch(BATCH).prefetch(1)


def note(line: str) -> None:
    if kd.is_chief():
        with open(folder / "batches", "a") as batches:
            batches.write(f"{line}\n")


def let_happen() -> None:
    if fault["signal"] != "ENOSPC":
        os.kill(os.getpid(), getattr(signal, fault["signal"]))
        return
    with contextlib.suppress(OSError), open(folder / "commits" / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1024))


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        note(f"{int(self.model.optimizer.iterations)} {time.time()}")
        if not fault or kd.rank() not in fault["ranks"] or int(self.model.optimizer.iterations) < fault["step"]:
            return
        if not (happened := folder / f"happened-{fault['step']}-{kd.rank()}").exists():
            happened.touch()
            timer = threading.Timer(fault["seconds"], let_happen)
            timer.daemon = True
            timer.start()


def events() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for path in sorted((folder / "logs").rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                key = f"{path.parent.name} {value.tag} {event.step}"
                if value.HasField("tensor") and value.tag.startswith(("epoch_", "batch_")):
                    found.setdefault(key, []).append(float(tf.make_ndarray(value.tensor)))
    return found


note("start")
model = kd.distribute(build())
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
history = model.fit(
    data(),
    epochs=EPOCHS,
    verbose=0,
    validation_data=data().take(2),
    callbacks=[
        kd.callbacks.Commit(folder / "commits", every=3),
        keras.callbacks.ReduceLROnPlateau("loss", patience=PATIENCE, min_delta=0.2),
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "logs", write_graph=False, update_freq=2),
        Fault(),
    ],
)
if kd.is_chief():
    variables = [*model.variables, *model.optimizer.variables]
    result = {
        "variables": [np.asarray(variable.value).tolist() for variable in variables],
        "history": history.history,
        "csv": (folder / "log.csv").read_text(),
        "events": events(),
    }
    (folder / "result.json").write_text(json.dumps(result))
