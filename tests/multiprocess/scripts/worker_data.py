"""Trains on what the workers read, and kills a worker meanwhile: `python worker_data.py FOLDER`."""

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
import tensorflow as tf

import keras_dist as kd

folder = Path(sys.argv[1])
case = json.loads((folder / "plan.json").read_text())["case"]
task = json.loads(os.environ["TF_CONFIG"])["task"]
(folder / f"{task['type']}-{task['index']}.pid").write_text(str(os.getpid()))
EXAMPLES, EPOCHS = 50, 4
together = case == "async-together"


class Counts(keras.metrics.Metric):
    """How often each example was in a step."""

    def __init__(self):
        super().__init__(name="counts")
        self.counts = self.add_variable([EXAMPLES], "zeros", "int64", aggregation="sum", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        example = tf.cast(y_true[:, 1:], "int64")
        self.counts.assign_add(tf.scatter_nd(example, tf.ones_like(example[:, 0]), [EXAMPLES]))

    def result(self):
        return tf.reduce_max(self.counts.value)


class Fault(keras.callbacks.Callback):
    """Kills a worker at a random moment of the second epoch."""

    def __init__(self):
        super().__init__()
        self.batch, self.delay = random.SystemRandom().randrange(6), random.SystemRandom().uniform(0, 0.03)
        self.epoch, self.reads = 0, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.reads.append(np.array(counts.counts).tolist())

    def on_train_batch_begin(self, batch, logs=None):
        if case == "async-together" and (self.epoch, batch) == (0, 0):
            threading.Thread(target=self.strike_in_step).start()
        if "worker" in case and (self.epoch, batch) == (1, self.batch):
            print("fault in batch", batch, "after", self.delay, flush=True)
            threading.Timer(self.delay, self.strike).start()

    def strike_in_step(self):
        while not (folder / "in-step").exists():
            time.sleep(0.01)
        self.strike()
        (folder / "killed").write_text("")

    def strike(self):
        os.kill(int((folder / "worker-1.pid").read_text()), signal.SIGKILL)


def read(context):
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4))
    y = np.stack([np.tanh(x.sum(axis=1)), np.arange(EXAMPLES)], 1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(4) if together else data.shuffle(20).batch(4)


def loss(y, predictions):
    """In the case "async-together" the third step of worker 1 waits until that was killed."""
    if together:
        tf.cond(tf.reduce_any(y[:, 1] == 17.0), wait_until_killed, lambda: False)
    return (y[:, :1] - predictions) ** 2


def wait_until_killed():
    with tf.control_dependencies([tf.io.write_file(str(folder / "in-step"), "")]):
        killed = tf.constant(False)
    found = lambda _: (tf.size(tf.io.matching_files(str(folder / "killed"))) > 0,)  # noqa: E731
    return tf.while_loop(lambda killed: ~killed, found, (killed,))[0]


kd.init(kd.ParameterServer(mode="async" if case.startswith("async") else "sync"))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
counts, fault = Counts(), Fault()
model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]))
model.compile(keras.optimizers.Adam(0.01), loss, metrics=[counts], steps_per_execution=10 if together else 1)
history = model.fit(kd.shard(read), epochs=EPOCHS, verbose=0, callbacks=[fault]).history
result = {
    "history": history,
    "weights": [weight.tolist() for weight in model.get_weights()],
    "iterations": int(model.optimizer.iterations),
    "reads": fault.reads,
}
(folder / "result.json").write_text(json.dumps(result))
