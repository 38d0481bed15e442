"""Keras's callbacks work unchanged: every rank takes the same decisions, and files are written once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import keras_dist as kd
from tests.contract.harness import NOT_TPU, Numbers, contract
from tests.contract.parts import compiled, evaluated, files, fitted, numbers


def weights_in(model: keras.Model, *paths: str) -> list[Any]:
    found = []
    for path in paths:
        model.load_weights(path)
        found.append(model.get_weights())
    return found


class Note(keras.callbacks.Callback):
    """Notes what functions of the model and of its hooks' arguments return."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for hook, function in hooks.items():
            setattr(self, hook, lambda at, logs=None, of=function: self.seen.append(of(self.model, at, logs)))


def checkpointed(distribute: Any, path: str, optimizer: Any = None, epochs: int = 2, **options: Any) -> Numbers:
    """Returns which files ModelCheckpoint has written, and what is in them."""
    callback = keras.callbacks.ModelCheckpoint(path, **options)
    model = compiled(distribute, optimizer, metrics=["mae"])
    result = fitted(model, *numbers(), epochs=epochs, validation_data=numbers(9), callbacks=[callback])
    written, numbers_in = files(), {}
    if options.get("save_weights_only"):
        numbers_in = {"saved": weights_in(model, *written)}
    else:
        loaded = [keras.models.load_model(file) for file in written]
        steps = [model.optimizer.iterations for model in loaded]
        numbers_in = {"saved": [model.get_weights() for model in loaded], "steps": steps}
    return {**result, **numbers_in, "files": ",".join(written), "best": callback.best}


contract("model-checkpoint-best-weights", covered_by=("callbacks",))(
    lambda distribute: checkpointed(
        distribute, "best.weights.h5", keras.optimizers.SGD(0.7), 4, save_best_only=True, save_weights_only=True
    )
)
contract("model-checkpoint-between-batches")(
    lambda distribute: checkpointed(distribute, "{epoch}-{batch}.keras", save_freq=3)
)


class WithRate(keras.callbacks.TensorBoard):
    """As people log the learning rate. It counts epochs too. What it adds to a batch's logs no epoch has."""

    epochs = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        logs["rate_of_batch"] = float(self.model.optimizer.learning_rate)
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["rate"] = float(self.model.optimizer.learning_rate)
        self.epochs += 1
        super().on_epoch_end(epoch, logs)


def events(folder: str) -> Numbers:
    """Returns the contents of the event files by writer, tag and step. Two writers would write each value twice."""
    files()
    values: dict[str, list[Any]] = {}
    for path in sorted(Path(folder).rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                content = b"".join(array.ravel()).decode("latin1") if array.dtype == object else array
                values.setdefault(f"{path.parent.name}:{value.tag}:{event.step}", []).append(content)
    return values




def interrupted_once(run: Callable[..., Any]) -> tuple[Any, Any]:
    """Calls `run` with a callback that interrupts it at the end of the second epoch, and again with none."""

    def cut(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    before = run(keras.callbacks.LambdaCallback(on_epoch_end=cut))
    files()
    return before, run()


@contract("backup-and-restore")
def test_backup_and_restore(distribute: Any) -> Numbers:
    def run(*more: Any) -> Numbers:
        model, result = compiled(distribute, keras.optimizers.Adam(0.01)), {}
        callbacks = [keras.callbacks.BackupAndRestore("backup"), *more]
        with contextlib.suppress(KeyboardInterrupt):
            result = fitted(model, *numbers(), epochs=4, callbacks=callbacks, shuffle=False)
        return {**result, "steps": model.optimizer.iterations}

    return interrupted_once(run)[1]


def of_batch(model: keras.Model, batch: int, logs: Any) -> list[Any]:
    return [batch, logs["loss"], logs["mae"]]


@contract("custom-callback-batch-logs", sizes=(3,))
def test_custom_callback_batch_logs(distribute: Any) -> Numbers:
    look = Note(on_train_batch_end=of_batch, on_test_batch_end=of_batch)
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, *numbers(), validation_data=numbers(9), callbacks=[look])
    return {**result, "evaluation": evaluated(model, callbacks=[look]), "seen": look.seen}


@contract("callback-of-a-tracker", of=NOT_TPU)
def test_callback_of_a_tracker(distribute: Any) -> Numbers:
    tracker = Note(
        on_train_batch_end=of_batch, on_epoch_end=lambda model, epoch, logs: [epoch, logs["loss"], logs["val_mae"]]
    )
    plain = keras.Model.fit

    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), tracker]
        return plain(self, *args, **kwargs)

    with mock.patch.object(keras.Model, "fit", fit):
        result = fitted(compiled(distribute, metrics=["mae"]), *numbers(), validation_data=numbers(9))
    return {**result, "seen": tracker.seen}


@contract("callback-evaluates", covered_by=("stops-different-learning-rates", "evaluate", "predict"))
def test_callback_evaluates(distribute: Any) -> Numbers:
    def evaluate(model: keras.Model, epoch: int, logs: Any) -> list[Any]:
        return [model.evaluate(*numbers(9), verbose=0), model.predict(numbers(9)[0], verbose=0)]

    look = Note(on_epoch_end=evaluate)
    return {**fitted(compiled(distribute), *numbers(), callbacks=[look]), "seen": look.seen}


@contract("chief-only")
def test_chief_only(distribute: Any) -> Numbers:
    class Write(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with open("own.txt", "a") as file:
                file.write(f"{os.getpid()} {epoch}\n")
            self.model.save("own.keras")

    model = compiled(distribute)
    result = fitted(model, *numbers(), callbacks=[kd.callbacks.ChiefOnly(Write())])
    assert files() == ["own.keras", "own.txt"]
    return {**result, "lines": len(Path("own.txt").read_text().splitlines())}
