"""Keras's callbacks work unchanged: every rank takes the same decisions, and files are written once."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

from tests.contract.harness import Numbers, contract
from tests.contract.parts import BATCH, compiled, fitted, float64, numbers


def listing() -> list[str]:
    """Returns every file of the shared folder, including temporary ones."""
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def settled_listing() -> list[str]:
    """The same, once all ranks are done."""
    import keras_dist as kd

    kd.barrier()
    return listing()


@contract("model-checkpoint", covered_by=("together-callbacks", "chief-only"))
def test_model_checkpoint(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.ModelCheckpoint("epoch-{epoch}.keras")
    model = compiled(distribute, keras.optimizers.Adam(0.01), metrics=["mae"])
    result = fitted(model, *numbers(), callbacks=[callback])
    files = settled_listing()
    assert files == ["epoch-1.keras", "epoch-2.keras"]
    loaded = [keras.models.load_model(file) for file in files]
    return {**result, "saved": [model.get_weights() for model in loaded], "steps": loaded[1].optimizer.iterations}


@contract("model-checkpoint-best-weights", covered_by=("together-callbacks",))
def test_model_checkpoint_best_weights(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.ModelCheckpoint(
        "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
    )
    model = compiled(distribute, keras.optimizers.SGD(0.7))
    result = fitted(model, *numbers(), epochs=4, validation_data=numbers(9), callbacks=[callback])
    assert settled_listing() == ["best.weights.h5"]
    model.load_weights("best.weights.h5")
    return {**result, "best": model.get_weights(), "value": callback.best}


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


@contract("model-checkpoint-between-batches")
def test_model_checkpoint_between_batches(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.ModelCheckpoint("{epoch}-{batch}.keras", save_freq=3)
    result = fitted(compiled(distribute), *numbers(), callbacks=[callback])
    files = settled_listing()
    return {**result, "files": ",".join(files), "saved": [keras.models.load_model(f).get_weights() for f in files]}


@contract("tensorboard", covered_by=("together-callbacks",))
def test_tensorboard(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.TensorBoard("logs", write_graph=False)
    result = fitted(compiled(distribute), *numbers(), validation_data=numbers(9), callbacks=[callback])
    settled_listing()
    return {**result, "scalars": scalars("logs")}


def scalars(folder: str) -> dict[str, list[float]]:
    """Reads the event files; two writers would give each value twice."""
    import tensorflow as tf

    values: dict[str, list[float]] = {}
    for path in sorted(Path(folder).rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if "per_second" not in value.tag:
                    values.setdefault(f"{path.parent.name}:{value.tag}", []).append(
                        float(tf.make_ndarray(value.tensor).ravel()[0]) if value.tensor.dtype == 1 else 0.0
                    )
    return values


@contract("csv-logger", covered_by=("together-callbacks",))
def test_csv_logger(distribute: Any) -> Numbers:
    float64()
    result = fitted(compiled(distribute), *numbers(), callbacks=[keras.callbacks.CSVLogger("log.csv")])
    assert settled_listing() == ["log.csv"]
    with open("log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    return {**result, "written": [float(row["loss"]) for row in rows]}


@contract("early-stopping", sizes=(3,), covered_by=("together-callbacks", "commit-stopped-early"))
def test_early_stopping(distribute: Any) -> Numbers:
    """With `"max"` the worst epoch, the first, counts as the best: training stops two epochs later and restores it."""
    float64()
    callback = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)
    model = compiled(distribute)
    result = fitted(model, *numbers(), epochs=9, validation_data=numbers(9), callbacks=[callback])
    assert len(result["history"]["loss"]) == 3
    return {**result, "stopped": callback.stopped_epoch}


@contract(
    "reduce-lr-on-plateau",
    covered_by=("together-callbacks", "stops-different-learning-rates"),
)
def test_reduce_lr_on_plateau(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)
    model = compiled(distribute, keras.optimizers.SGD(0.5))
    result = fitted(model, *numbers(), epochs=5, callbacks=[callback])
    return {**result, "rate": model.optimizer.learning_rate}


@contract("learning-rate-scheduler", covered_by=("stops-different-learning-rates",))
def test_learning_rate_scheduler(distribute: Any) -> Numbers:
    float64()
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)
    return fitted(compiled(distribute), *numbers(), epochs=3, callbacks=[callback])


@contract("terminate-on-nan", covered_by=("terminate-on-nan-of-one-rank",))
def test_terminate_on_nan(distribute: Any) -> Numbers:
    """All ranks stop in the middle of an epoch, after the same batch."""
    float64()
    x, y = numbers()
    y[-1] = np.nan  # in the last share only
    model = compiled(distribute)
    history = model.fit(
        x, y, batch_size=8, shuffle=False, epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    return {"epochs": len(history.epoch), "steps": model.optimizer.iterations}


@contract("backup-and-restore")
def test_backup_and_restore(distribute: Any) -> Numbers:
    """A second run continues where the first was interrupted."""

    class Cut(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    float64()
    try:
        first = compiled(distribute, keras.optimizers.Adam(0.01))
        backup = keras.callbacks.BackupAndRestore("backup")
        fitted(first, *numbers(), epochs=4, callbacks=[backup, Cut()], shuffle=False)
    except KeyboardInterrupt:
        settled_listing()
    second = compiled(distribute, keras.optimizers.Adam(0.01))
    backup = keras.callbacks.BackupAndRestore("backup")
    result = fitted(second, *numbers(), epochs=4, callbacks=[backup], shuffle=False)
    return {**result, "steps": second.optimizer.iterations}


@contract("custom-callback-logs", covered_by=("custom-callback-batch-logs",))
def test_custom_callback_logs(distribute: Any) -> Numbers:
    """At the end of an epoch a callback sees the metrics of the whole dataset, and the weights."""
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append([epoch, logs["loss"], logs["val_loss"], float(np.sum(self.model.get_weights()[0]))])

    float64()
    result = fitted(compiled(distribute), *numbers(), validation_data=numbers(9), callbacks=[Look()])
    return {**result, "seen": seen}


@contract("custom-callback-batch-logs", sizes=(3,))
def test_custom_callback_batch_logs(distribute: Any) -> Numbers:
    """After each batch, of training, validation and evaluation, a callback sees the metrics of whole batches."""
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([batch, logs["loss"], logs["mae"]])

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([batch, logs["loss"], logs["mae"]])

    float64()
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, *numbers(), validation_data=numbers(9), callbacks=[Look()])
    evaluation = model.evaluate(*numbers(), batch_size=BATCH, verbose=0, callbacks=[Look()])
    return {**result, "seen": seen, "evaluation": evaluation}


@contract(
    "callback-of-a-tracker",
    of=("serial", "central_storage", "horovod", "mirrored", "multi_worker", "parameter_server"),
)
def test_callback_of_a_tracker(distribute: Any) -> Numbers:
    """Experiment trackers replace `keras.Model.fit`, and add a callback that the script does not pass."""
    seen: list[Any] = []

    class Tracker(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([batch, logs["loss"], logs["mae"]])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append([epoch, logs["loss"], logs["val_mae"]])

    plain = keras.Model.fit

    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), Tracker()]
        return plain(self, *args, **kwargs)

    float64()
    with mock.patch.object(keras.Model, "fit", fit):
        model = compiled(distribute, metrics=["mae"])
        result = fitted(model, *numbers(), validation_data=numbers(9))
    return {**result, "seen": seen}


@contract("callback-evaluates", covered_by=("stops-different-learning-rates", "evaluate", "predict"))
def test_callback_evaluates(distribute: Any) -> Numbers:
    """A custom callback that runs the model on every rank."""
    seen: list[Any] = []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.evaluate(*numbers(9), verbose=0))
            seen.append(self.model.predict(numbers(9)[0], verbose=0))

    float64()
    result = fitted(compiled(distribute), *numbers(), callbacks=[Evaluate()])
    return {**result, "seen": seen}


@contract("chief-only")
def test_chief_only(distribute: Any) -> Numbers:
    """A custom callback that writes a file."""
    import keras_dist as kd

    class Write(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with open("own.txt", "a") as file:
                file.write(f"{os.getpid()} {epoch}\n")
            self.model.save("own.keras")

    float64()
    model = compiled(distribute)
    result = fitted(model, *numbers(), callbacks=[kd.callbacks.ChiefOnly(Write())])
    assert settled_listing() == ["own.keras", "own.txt"]
    return {**result, "lines": len(Path("own.txt").read_text().splitlines())}
