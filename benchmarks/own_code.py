"""What the check of the script's own code costs: the time until the first step has ended, with it over without it.

    python benchmarks/own_code.py            # half an hour on two idle cores
    python benchmarks/own_code.py --rounds 1 --backends horovod

Each measurement is a job of its own, as a user starts it, with two processes. The first ratio is of
the time since the launch, the second of the time since `fit` was called.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

BACKENDS = ("horovod", "multi_worker", "mirrored", "parameter_server")
# Name: batch size, shape of an example.
MODELS = {
    "small CNN": (64, (28, 28, 1)),
    "transformer, 6 layers": (64, (64,)),
    "ResNet50, 64 pixels": (32, (64, 64, 3)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of two jobs for each model and backend (3)")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="(all)")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)  # in such a job
    arguments = parser.parse_args()
    if arguments.model:
        print("seconds", *seconds_of_first_step(arguments.model), flush=True)
        return
    print("| | " + " | ".join(arguments.backends) + " |\n|---|" + "---|" * len(arguments.backends))
    for model in MODELS:
        cells = [ranges(model, backend, arguments.rounds) for backend in arguments.backends]
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)


def ranges(model: str, backend: str, rounds: int) -> str:
    pairs = [(seconds_of_job(model, backend, "auto"), seconds_of_job(model, backend, "0")) for _ in range(rounds)]
    print(f"{backend}, {model}: seconds with and without {pairs}", file=sys.stderr, flush=True)
    cells = []
    for which in range(2):
        ratios = [checked[which] / plain[which] for checked, plain in pairs]
        cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    return ", ".join(cells)


def seconds_of_job(model: str, backend: str, verify: str) -> tuple[float, float]:
    """Returns the seconds from the launch, and from the call of `fit`, to the end of the first step."""
    environment = {**os.environ, "KERAS_DIST_VERIFY": verify, "KERAS_DIST_BACKEND": backend}
    launcher = [] if backend == "mirrored" else ["-m", "keras_dist", "run", "-np", "2", "--backend", backend]
    command = [sys.executable, *launcher, __file__, "--model", model]
    began = time.time()
    job = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    fit, end = map(float, job.stdout.split("seconds ")[1].split()[:2])
    return end - began, end - fit


def seconds_of_first_step(name: str) -> tuple[float, float]:
    """Returns when `fit` was called, and when its first step has ended."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist as kd

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.time())

    if os.environ["KERAS_DIST_BACKEND"] == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    kd.init()
    random, (batch, shape) = np.random.RandomState(0), MODELS[name]
    x = random.randint(0, 1000, (batch, *shape)) if len(shape) == 1 else random.rand(batch, *shape).astype("float32")
    model = kd.distribute(built(name))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    times = [time.time()]
    model.fit(x, random.randint(0, 10, batch), batch_size=batch, verbose=0, callbacks=[Clock()])
    return times[0], times[1]


def built(name: str) -> Any:
    """Returns a model with a `train_step` as in Keras's guide; the layers of the transformer are the script's own."""
    import keras
    import tensorflow as tf

    layers = keras.layers

    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.drop = layers.MultiHeadAttention(4, 16), layers.Dropout(0.1)
            self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
            self.inner, self.outer = layers.Dense(256, "gelu"), layers.Dense(64)

        def call(self, x: Any, training: bool = False) -> Any:
            x = self.first(x + self.attention(x, x))
            return self.second(x + self.drop(self.outer(self.inner(x)), training=training))

    class Trained(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compute_loss(x, y, predictions)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, predictions)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = keras.Input(MODELS[name][1])
    if name.startswith("ResNet"):
        net = keras.applications.ResNet50(weights=None, input_tensor=inputs, classes=10, classifier_activation=None)
        return Trained(net.input, net.output)
    if name == "small CNN":
        x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(inputs))
        x = layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu")(x))
        return Trained(inputs, layers.Dense(10)(layers.Flatten()(x)))
    x = layers.Embedding(1000, 64)(inputs)
    for _ in range(6):
        x = Block()(x)
    return Trained(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


if __name__ == "__main__":
    main()
