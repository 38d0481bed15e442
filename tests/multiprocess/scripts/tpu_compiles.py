"""Compiles the models with these names by the real TPU compiler, in one process. Prints a report as JSON for each."""

import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import tpu_emulation
from keras_dist.diagnostics.captured import Captured
from keras_dist.diagnostics.check import DryRun
from keras_dist.diagnostics.report import target_of

Layers = keras.layers
NUMBERS, LABELS = tf.TensorSpec((64, 20)), tf.TensorSpec((64,), tf.int32)


class Forbidden(Layers.Layer):
    """Does what no TPU can."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(self.function(x), x.shape)


def dense(*more: Any) -> keras.Model:
    return keras.Sequential([Layers.Dense(64, "relu"), *more, Layers.Dense(10)])


def convolution() -> keras.Model:
    layers = [Layers.Conv2D(8, 3), Layers.BatchNormalization(), Layers.ReLU(), Layers.GlobalAveragePooling2D()]
    return keras.Sequential([*layers, Layers.Dense(10)])


def embedding() -> keras.Model:
    return keras.Sequential([Layers.Embedding(1000, 16), Layers.GlobalAveragePooling1D(), Layers.Dense(10)])


def resnet50() -> keras.Model:
    return keras.applications.ResNet50(weights=None)


def transformer() -> keras.Model:
    """Two layers of an encoder, over 128 tokens."""
    tokens = keras.Input((128,), dtype="int32")
    x = Layers.Embedding(8000, 256)(tokens) + Layers.Embedding(128, 256)(tf.range(128))
    for _ in range(2):
        x = Layers.LayerNormalization()(x + Layers.MultiHeadAttention(8, 32, dropout=0.1)(x, x))
        x = Layers.LayerNormalization()(x + Layers.Dense(256)(Layers.Dense(1024, "gelu")(x)))
    return keras.Model(tokens, Layers.Dense(10)(Layers.GlobalAveragePooling1D()(x)))


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "numpy_function": lambda x: tf.numpy_function(lambda y: y, [x], tf.float32),
    "ragged": lambda x: x + tf.reduce_sum(tf.RaggedTensor.from_tensor(x, padding=0.0).to_tensor()),
}
CASES: dict[str, tuple[Callable[[], keras.Model], Any, str, int]] = {
    "dense": (dense, NUMBERS, "v5e-8", 64),
    "convolution": (convolution, tf.TensorSpec((64, 16, 16, 3)), "v3-8", 64),
    "embedding": (embedding, tf.TensorSpec((64, 12), tf.int32), "v6e-1", 64),
    "mixed_bfloat16": (dense, NUMBERS, "v5p-16", 64),
    "too_big": (dense, NUMBERS, "v5e-1", 40_000_000),
    "resnet50": (resnet50, tf.TensorSpec((128, 224, 224, 3)), "v5e-8", 128),
    "transformer": (transformer, tf.TensorSpec((128, 128), tf.int32), "v5e-8", 128),
}
for name, function in FORBIDDEN.items():
    CASES[name] = (lambda function=function: dense(Forbidden(function, name="odd")), NUMBERS, "v5e-8", 64)  # type: ignore[misc]


def compiled(name: str) -> dict[str, Any]:
    make, inputs, target_name, batch = CASES[name]
    target = target_of(target_name)
    strategy = tpu_emulation.emulated_strategy(target.replicas)
    keras.mixed_precision.set_dtype_policy(name if name.startswith("mixed") else "float32")
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name != "resnet50")
        model.compile("adam", loss, metrics=["accuracy"])
    run = DryRun(strategy, Captured(model, (inputs, LABELS)), target, lambda sent: None, None)
    return run.run(batch, 0).as_json()


if __name__ == "__main__":
    print(json.dumps({name: compiled(name) for name in sys.argv[1:]}))
