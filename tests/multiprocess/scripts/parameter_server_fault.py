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
is_async, is_together = plan["mode"] == "async", plan.get("reads") == "together"
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
    if is_async:
        return tf.reduce_mean(y * predictions, axis=-1)
    return tf.reduce_mean((y - predictions) ** 2, axis=-1)


def counted(y: Any, predictions: Any) -> Any:
    """Does not depend on the weights either."""
    return tf.reduce_mean(y**2, axis=-1)


STEPS, BATCH, EPOCHS = 5, 8, 3


def on_arrays() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH - 5, 4))
    y = np.tanh(x.sum(axis=1, keepdims=True))
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
    return {**numbers(model, history), "predictions": predictions.tolist(), "evaluated": evaluated}


def numbers(model: keras.Model, history: keras.callbacks.History) -> dict[str, Any]:
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"history": history.history, "weights": weights, "iterations": int(model.optimizer.iterations)}


EXAMPLES = 50


class Counts(keras.metrics.Metric):
    """How often each example was in a step."""

    def __init__(self) -> None:
        super().__init__(name="counts")
        self.counts = self.add_variable([EXAMPLES], "zeros", "int64", aggregation="sum", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        example = tf.cast(y_true[:, 1:], "int64")
        self.counts.assign_add(tf.scatter_nd(example, tf.ones_like(example[:, 0]), [EXAMPLES]))

    def result(self) -> Any:
        return tf.reduce_max(self.counts.value)


class Reads(keras.callbacks.Callback):
    """A worker is killed in the second epoch; in the plan "together", in the third step of its first call."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.epoch, self.seen = counts, 0, []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(np.array(self.counts.counts).tolist())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if is_together and (self.epoch, batch) == (0, 0):
            threading.Thread(target=strike_in_step).start()
        if self.epoch == 1:
            moment("step")


def strike_in_step() -> None:
    while not (folder / "in-step").exists():
        time.sleep(0.01)
    strike()
    (folder / "killed").write_text("")


def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4))
    y = np.stack([np.tanh(x.sum(axis=1)), np.arange(EXAMPLES)], 1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(4) if is_together else data.shuffle(20).batch(4)


def loss_of_what_was_read(y: Any, predictions: Any) -> Any:
    """In the plan "together" the third step of worker 1 waits until that was killed."""
    if is_together:
        tf.cond(tf.reduce_any(y[:, 1] == 17.0), wait_until_killed, lambda: False)
    return (y[:, :1] - predictions) ** 2


def wait_until_killed() -> Any:
    with tf.control_dependencies([tf.io.write_file(str(folder / "in-step"), "")]):
        killed = tf.constant(False)
    found = lambda _: (tf.size(tf.io.matching_files(str(folder / "killed"))) > 0,)  # noqa: E731
    return tf.while_loop(lambda killed: ~killed, found, (killed,))[0]


def on_what_workers_read() -> dict[str, Any]:
    counts = Counts()
    reads = Reads(counts)
    model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]))
    together = 10 if is_together else 1
    model.compile(keras.optimizers.Adam(0.01), loss_of_what_was_read, metrics=[counts], steps_per_execution=together)
    return {**numbers(model, model.fit(kd.shard(read), epochs=4, verbose=0, callbacks=[reads])), "reads": reads.seen}


if task["type"] != "plain":
    moment("start")
    kd.init(kd.ParameterServer(mode=plan["mode"], hang_seconds=plan["hang_seconds"]))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
result = on_what_workers_read() if plan.get("reads") else on_arrays()
(folder / "result.json").write_text(json.dumps(result))
