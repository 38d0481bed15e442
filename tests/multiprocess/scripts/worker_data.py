"""Trains on what the workers read, and kills a worker meanwhile: `python worker_data.py FOLDER`."""

import json
import os
import random
import signal
import sys
import threading
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
        if "worker" in case and (self.epoch, batch) == (1, self.batch):
            print("fault in batch", batch, "after", self.delay, flush=True)
            threading.Timer(self.delay, self.strike).start()

    def strike(self):
        os.kill(int((folder / "worker-1.pid").read_text()), signal.SIGKILL)


def read(context):
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4))
    y = np.stack([np.tanh(x.sum(axis=1)), np.arange(EXAMPLES)], 1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.shuffle(20).batch(4)


kd.init(kd.ParameterServer(mode="async" if case.startswith("async") else "sync"))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
counts, fault = Counts(), Fault()
model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]))
model.compile(keras.optimizers.Adam(0.01), lambda y, p: (y[:, :1] - p) ** 2, metrics=[counts])
history = model.fit(kd.shard(read), epochs=EPOCHS, verbose=0, callbacks=[fault]).history
result = {
    "history": history,
    "weights": [weight.tolist() for weight in model.get_weights()],
    "iterations": int(model.optimizer.iterations),
    "reads": fault.reads,
}
(folder / "result.json").write_text(json.dumps(result))
