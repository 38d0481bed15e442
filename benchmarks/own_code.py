"""What the check of the script's own code costs: the time until the first step has ended, with it over without it.

    python benchmarks/own_code.py            # some minutes on two idle cores
    python benchmarks/own_code.py --rounds 1 # shows only that it works

Each round trains a new model with the check and another one without it, in the same two processes, one thread each.
"""

from __future__ import annotations

import statistics
from typing import Any

from exact import BACKENDS, show_ratios  # beside this script

# Name: batch size, shape of an example.
MODELS = {
    "small CNN": (64, (28, 28, 1)),
    "transformer, 6 layers": (64, (64,)),
    "ResNet50, 64 pixels": (32, (64, 64, 3)),
}


def main() -> None:
    show_ratios(__doc__, 5, "of two models", measured, MODELS, (*BACKENDS, "parameter_server"))


def measured(rounds: int) -> dict[str, tuple[float, float]]:
    """Returns for each model the least and the greatest ratio. Runs on every rank."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    found = {}
    for model in MODELS:
        seconds_of_first_step(model, None)  # what TensorFlow does once
        pairs = [[seconds_of_first_step(model, verify) for verify in (None, False)] for _ in range(rounds)]
        ratios = [checked / plain for checked, plain in pairs]
        found[model] = min(ratios), max(ratios)
        print(f"{model}: median {statistics.median(ratios):.2f}, {pairs}", flush=True)
    return found


def seconds_of_first_step(name: str, verify: Any) -> float:
    import time

    import keras
    import numpy as np

    import keras_dist as kd

    class Clock(keras.callbacks.Callback):
        seconds = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds = self.seconds or time.perf_counter() - began

    random, (batch, shape) = np.random.RandomState(0), MODELS[name]
    x = random.randint(0, 1000, (batch, *shape)) if len(shape) == 1 else random.rand(batch, *shape).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model, clock = kd.distribute(built(name), verify=verify), Clock()
    model.compile("adam", loss, metrics=["accuracy"])
    began = time.perf_counter()
    model.fit(x, random.randint(0, 10, batch), batch_size=batch, verbose=0, callbacks=[clock])
    return clock.seconds


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
