"""Lets a fault happen in the second epoch: `python fault.py FAULT FOLDER`. `FOLDER/failed` gets the time."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd

fault, folder = sys.argv[1], Path(sys.argv[2])
disk = folder / "disk"
SIGNALS = {"kill": "SIGKILL", "term": "SIGTERM", "hup": "SIGHUP", "pause": "SIGSTOP", "stop": "SIGSTOP"}
ON_DISK = ("full", "read-only", "deleted")  # happens to the chief, the only one who saves
PAUSE_SECONDS = 5
STEPS, BATCH, EPOCHS = 4, 8, 4
EMBERS = 1e9  # a value in the data: a step that sees it fails, or needs a gigabyte


def who_am_i() -> str:
    """Returns the name of this process before `kd.init()`, from which workers of parameter servers don't return."""
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task")
    return f"{task['type']}-{task['index']}" if task else os.environ.get("HOROVOD_RANK", "alone")


def note(name: str, text: str) -> None:
    (folder / f"{name}.{os.getpid()}").write_text(text)  # several ranks may note the same
    (folder / f"{name}.{os.getpid()}").rename(folder / name)


me = who_am_i()
note(f"pid-{me}", str(os.getpid()))
has_servers = '"ps"' in os.environ.get("TF_CONFIG", "")
if has_servers:  # a worker that is stopped is given up after this time
    kd.init(kd.ParameterServer(hang_seconds=4))
else:
    kd.init(kd.Mirrored(devices=["CPU:0", "CPU:1"]) if me == "alone" else "auto")
victim = {"1": "1", "0": "1", "alone": "alone"}.get(me, "worker-1")
# Only the coordinator of parameter servers runs the script, so what the script does wrong, it does.
is_at_fault = kd.is_chief() if fault in ON_DISK or has_servers else me == victim


def happens() -> None:
    """Lets the fault happen, in the process that brings it about."""
    note("failed", str(time.monotonic()))
    pid = int((folder / f"pid-{victim}").read_text())
    if fault == "pause":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {pid}"], start_new_session=True)
    if fault in SIGNALS:
        os.kill(pid, signal.Signals[SIGNALS[fault]])
    if fault == "exit":
        os._exit(0)
    if fault == "leave":
        sys.exit(0)
    if fault == "raise":
        raise ValueError("this callback is on fire")
    if fault == "launcher":
        os.kill(int((folder / "launcher").read_text()), signal.SIGKILL)
    if fault == "memory":
        Path((folder / "memory").read_text(), "cgroup.procs").write_text(str(pid))
    if fault == "full":
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    if fault == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    if fault == "deleted":
        shutil.rmtree(disk)


class Fault(keras.callbacks.Callback):
    """Comes before the callback that saves."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and batch == 1 and is_at_fault and fault not in ("data", "step"):
            happens()


def batches() -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng(0)
    begun[0] += 1
    for step in range(STEPS):
        x = random.normal(size=(BATCH, 4)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        is_second = begun[0] == 2 and step == 2
        if fault == "data" and is_second and is_at_fault:
            note("failed", str(time.monotonic()))
            raise ValueError("this data set is on fire")
        if fault == "step" and is_second:
            note("failed", str(time.monotonic()))
            y[-1] = EMBERS  # in the share of the last rank
        if fault == "memory" and is_second:
            y[:] = EMBERS  # but only one process has not enough memory
        yield x, y


def loss(y: Any, predictions: Any) -> Any:
    if fault == "step":
        tf.debugging.assert_less(y, EMBERS, "this step is on fire")
    needed = tf.cast(tf.reduce_max(y) / 4, tf.int32) if fault == "memory" else 1
    return tf.reduce_mean((y - predictions) ** 2, axis=-1) + 0.0 * tf.reduce_sum(tf.ones([tf.maximum(needed, 1)]))


begun = [0]
keras.utils.set_random_seed(1)
signature = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)
data = tf.data.Dataset.from_generator(batches, output_signature=signature)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model = kd.distribute(model)
model.compile("sgd", loss)
goes_on = fault in ("pause", "deleted") or (has_servers and fault in ("kill", "term", "hup", "stop", "memory"))
checkpoint = keras.callbacks.ModelCheckpoint(disk / "{epoch}.keras")
callbacks = [Fault(), checkpoint] if fault in ON_DISK else [Fault()]
# Where the fault ends the job, training would go on without end.
model.fit(data, epochs=EPOCHS if goes_on else 10**6, verbose=0, callbacks=callbacks)
print("trained to the end")
