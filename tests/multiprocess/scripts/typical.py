"""A script with what scripts have: callbacks, kinds of data, weights, files. Writes its numbers to the given file.

It runs on a TPU if one is named, otherwise in one process. The folder that it runs in is its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd

kd.init()

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 12)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
FOLDER = kd.broadcast(sys.argv[2])  # a path of TensorFlow's file system
Layers = keras.layers


def model_of(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [Layers.Dense(8, "relu"), Layers.BatchNormalization(momentum=0.8), Layers.Dropout(0.1), Layers.Dense(2)]
    model = kd.distribute(keras.Sequential([keras.Input((12,)), *layers]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def numbers(model: keras.Model, history: Any = None) -> dict[str, Any]:
    sums = [float(np.abs(np.asarray(weight, "float64")).sum()) for weight in model.get_weights()]
    return {"weights": sums, "history": {} if history is None else history.history}


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return X[32 * index : 32 * index + 32], Y[32 * index : 32 * index + 32]


def generator() -> Iterator[Any]:
    while True:
        for index in range(4):
            yield X[25 * index : 25 * index + 25], Y[25 * index : 25 * index + 25]


def with_callbacks() -> dict[str, Any]:
    model = model_of(1)
    callbacks = [
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.TensorBoard("board"),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=1.0),
    ]
    history = model.fit(X, Y, batch_size=32, epochs=4, validation_split=0.3, callbacks=callbacks, verbose=2)
    loaded = keras.models.load_model("best.keras")
    files = sorted(path.name for path in Path().iterdir() if path.suffix in (".keras", ".h5", ".csv"))
    events = len(list(Path("board").rglob("events*")))
    predicted = loaded.predict(X, verbose=0)
    return {**numbers(model, history), "files": files, "log": len(Path("log.csv").read_text().splitlines()),
            "events": events, "predicted": predicted.sum(0).tolist(), "rows": len(predicted)}  # fmt: skip


def with_weights() -> dict[str, Any]:
    model = model_of(2)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    weights = RNG.uniform(size=100).astype("float32")
    history = model.fit(X, Y, sample_weight=weights, epochs=2, callbacks=[schedule], verbose=0)
    balanced = model.fit(X, Y, class_weight={0: 0.3, 1: 2.0}, validation_data=(X[:30], Y[:30], weights[:30]), verbose=0)
    return {"first": numbers(model, history), "second": numbers(model, balanced)}


def with_sources() -> dict[str, Any]:
    model = model_of(3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=1).batch(32).prefetch(2)
    found = {"tf.data": numbers(model, model.fit(data, validation_data=data, epochs=2, verbose=0))}
    found["repeat"] = numbers(model, model.fit(data.repeat(), steps_per_epoch=3, epochs=2, verbose=0))
    found["PyDataset"] = numbers(model, model.fit(Sequence(), verbose=0, shuffle=False))
    found["generator"] = numbers(model, model.fit(generator(), steps_per_epoch=4, verbose=0))
    found["evaluated"] = {"values": model.evaluate(data, verbose=0)}
    return found


def with_batches() -> dict[str, Any]:
    model = model_of(4)
    logs = [model.train_on_batch(X[:20], Y[:20], return_dict=True) for _ in range(2)]
    tested = model.test_on_batch(X[20:], Y[20:], return_dict=True)
    return {"trained": {name: float(value) for name, value in logs[-1].items()},
            "tested": {name: float(value) for name, value in tested.items()},
            "predicted": np.abs(model.predict_on_batch(X[:7])).sum(0).tolist()}  # fmt: skip


def with_files() -> dict[str, Any]:
    """Where TensorFlow's file system writes, a checkpoint is read back."""
    model = model_of(5)
    model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("again")])
    model.save(f"{FOLDER}/model.keras")
    loaded = kd.distribute(keras.models.load_model(f"{FOLDER}/model.keras"))
    history = loaded.fit(X, Y, verbose=0)
    checkpoint = tf.train.Checkpoint(model=loaded)
    path = checkpoint.save(f"{FOLDER}/checkpoint")
    loaded.set_weights([weight * 0 for weight in loaded.get_weights()])
    checkpoint.restore(path).assert_existing_objects_matched()
    return {**numbers(loaded, history), "listed": sorted(tf.io.gfile.listdir(FOLDER))}


def with_low_precision() -> dict[str, Any]:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = model_of(6)
    history = model.fit(X, Y, batch_size=25, verbose=0)
    return {**numbers(model, history), "dtype": model.layers[0].compute_dtype}


if __name__ == "__main__":
    cases = (with_callbacks, with_weights, with_sources, with_batches, with_files, with_low_precision)
    Path(sys.argv[1]).write_text(json.dumps({case.__name__: case() for case in cases}))
