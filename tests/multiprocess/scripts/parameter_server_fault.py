"""Lets the fault of `FOLDER/plan.json` happen: `python parameter_server_fault.py FOLDER`, in a task or alone."""

import faulthandler
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

faulthandler.enable()  # where TensorFlow crashes, if it does
faulthandler.register(signal.SIGUSR1)  # where it hangs, if it does
folder = Path(sys.argv[1])
plan = json.loads((folder / "plan.json").read_text())
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "plain"})
STEPS, BATCH, EPOCHS = 5, 8, 3
timers: list[threading.Timer] = []


def moment(name: str) -> None:
    """Called at each moment at which something may happen; it happens soon after that of the plan."""
    if task["type"] != "chief" or name != plan["moment"] or timers or (folder / "fault").exists():
        return
    plan["times"] -= 1
    if plan["times"] < 0:
        timers.append(threading.Timer(plan["delay"], strike))
        timers[0].start()


def strike() -> None:
    (folder / "fault").write_text(str(time.monotonic()))
    pids = json.loads((folder / "pids.json").read_text())
    for name in plan["who"]:
        os.kill(pids[name], signal.SIGSTOP if plan["hangs"] else signal.SIGKILL)


class Moments(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        saved = folder / "backup" / "training_metadata.json"  # read before the callback that resumes has seen it
        epoch = json.loads(saved.read_text())["epoch"] if saved.exists() else 0
        (folder / "left").write_text(str(EPOCHS - epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        moment("step")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        moment("validation")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        moment("prediction")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        moment("checkpoint")  # this callback comes before the one that saves


def loss(y: Any, predictions: Any) -> Any:
    """Its gradient does not depend on the weights: asynchronous steps add up to the same in any order."""
    if not tf.executing_eagerly():
        moment("trace")
    if plan["mode"] == "async":
        return tf.reduce_mean(y * predictions, axis=-1)
    return tf.reduce_mean((y - predictions) ** 2, axis=-1)


def counted(y: Any, predictions: Any) -> Any:
    """Does not depend on the weights either."""
    return tf.reduce_mean(y**2, axis=-1)


if task["type"] != "plain":
    moment("start")
    kd.init(kd.ParameterServer(mode=plan["mode"], hang_seconds=plan["hang_seconds"]))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(STEPS * BATCH - 5, 4))
y = np.tanh(x.sum(axis=1, keepdims=True))
is_async = plan["mode"] == "async"
hidden = [] if is_async else [keras.layers.Dense(5, "tanh")]
model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
model = model if task["type"] == "plain" else kd.distribute(model)
moment("placed")
model.compile(keras.optimizers.SGD(0.1) if is_async else keras.optimizers.Adam(0.01), loss, metrics=[counted])
callbacks = [Moments(), keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)]
history = model.fit(
    x, y, batch_size=BATCH, shuffle=False, epochs=EPOCHS, verbose=0, validation_data=(x[:20], y[:20]),
    callbacks=callbacks,
)  # fmt: skip
predictions = model.predict(x, batch_size=BATCH, verbose=0, callbacks=callbacks[:1])
for timer in timers:
    timer.join()
evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
result = {
    "history": history.history,
    "predictions": predictions.tolist(),
    "evaluated": evaluated,
    "weights": [weight.tolist() for weight in model.get_weights()],
    "iterations": int(model.optimizer.iterations),
}
(folder / "result.json").write_text(json.dumps(result))
