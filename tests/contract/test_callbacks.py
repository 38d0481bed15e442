"""Keras's callbacks work unchanged: every rank takes the same decisions, and files are written once."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from tests.contract.harness import FLOAT32, NOT_TPU, Numbers, contract, same
from tests.contract.parts import BATCH, COUNT, FEATURES, compiled, evaluated, examples, files, fitted, numbers


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


@contract("custom-callback-batch-logs", sizes=(3,), covered_by=("callback-of-a-tracker", "evaluate"))
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


@contract("callback-evaluates")
def test_callback_evaluates(distribute: Any) -> Numbers:
    """After the evaluation within an epoch, Keras continues to count where that has ended.

    Evaluations alternate between batches of 3 and validation of 8, whose iterator Keras keeps.
    """
    x, y = numbers(9)

    def evaluate(model: keras.Model, epoch: int, logs: Any) -> list[Any]:
        return [model.evaluate(x, y, batch_size=3, verbose=0), model.predict(x, verbose=0)]

    def within(model: keras.Model, batch: int, logs: Any) -> Any:
        return model.evaluate(10 * x, y, batch_size=3, verbose=0) if batch == 1 else 0.0

    look = Note(on_epoch_end=evaluate, on_train_batch_end=within)
    model = compiled(distribute, metrics=["mae"])
    return {**fitted(model, *numbers(), callbacks=[look], validation_data=numbers(16)), "seen": look.seen}


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


@contract("chief-only-evaluates", covered_by=("chief-only", "callback-evaluates"))
def test_chief_only_evaluates(distribute: Any) -> Numbers:
    """Within an epoch as in `test_callback_evaluates`."""
    model = compiled(distribute, metrics=["mae"])
    seen: list[Any] = []

    def within(batch: int, logs: Any) -> None:
        if batch == 1:
            seen.append(model.evaluate(*numbers(9), verbose=0))

    look = kd.callbacks.ChiefOnly(keras.callbacks.LambdaCallback(on_train_batch_end=within))
    return {**fitted(model, *numbers(), callbacks=[look]), "own_seen": np.asarray(seen)}


STEPS = 4  # of an epoch: 8, 8, 8, 1


# --- TensorBoard ---


def with_board(distribute: Any, model: Any = None, data: Any = None, **options: Any) -> Numbers:
    """Trains and writes event files to `logs`, whose names are returned without host, process and time."""
    board = keras.callbacks.TensorBoard("logs", **options)
    result = fitted(compiled(distribute, model=model), *data or numbers(), callbacks=[board], shuffle=data is None)
    return {**result, "files": ",".join(re.sub(r"events.*", "events", path) for path in files())}


def named_mlp() -> keras.Model:
    """Tags contain layer names, which otherwise count the layers of a process."""
    layers = [keras.Input([FEATURES]), keras.layers.Dense(6, "tanh", name="one"), keras.layers.Dense(1, name="two")]
    return keras.Sequential(layers, name="named")


@contract("tensorboard-histograms", tolerance=FLOAT32, since="3.14", covered_by=("callbacks",))
def test_tensorboard_histograms(distribute: Any) -> Numbers:
    result = with_board(distribute, named_mlp(), histogram_freq=1, write_images=True)
    written = events("logs")
    assert written["train:named/one/kernel/histogram:1"][0].sum(axis=0)[2] == FEATURES * 6
    (graph,) = (graph for key, graphs in written.items() if ":keras:" in key for graph in graphs)
    assert json.loads(graph)["config"]["name"] == "named"
    return {**result, "events": {key: value for key, value in written.items() if "image" not in key}}


@contract("tensorboard-batches", tolerance=FLOAT32, since="3.15", covered_by=("callbacks",))
def test_tensorboard_batches(distribute: Any) -> Numbers:
    """The logs of a batch are those of the chief's share, and here both halves of a batch are the same."""
    data = (np.repeat(array.reshape(2, 2, 1, 4, -1), 2, axis=2).reshape(32, -1) for array in numbers(16))
    result = with_board(distribute, None, tuple(data), update_freq=2, write_graph=False)
    written = events("logs")
    assert [key for key in written if "batch_loss" in key] == [f"train:batch_loss:{step}" for step in (2, 4, 6, 8)]
    return {**result, "events": written}


# --- Other callbacks of Keras ---


@contract("swap-ema-weights", covered_by=("ema-overwrite-at-end",))
def test_swap_ema_weights(distribute: Any) -> Numbers:
    """Validation uses the averages, and so does a checkpoint if they are swapped on epochs."""
    results: Numbers = {}
    for name, swap_on_epoch in (("tests", False), ("epochs", True)):
        callbacks = [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch),
            keras.callbacks.ModelCheckpoint(f"{name}-{{epoch}}.weights.h5", save_weights_only=True),
        ]
        model = compiled(distribute, keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
        results[name] = fitted(model, *numbers(), validation_data=numbers(9), callbacks=callbacks)
        results[name]["evaluated"] = model.evaluate(*numbers(9), verbose=0, callbacks=callbacks[:1])
        files()
        results[name]["saved"] = weights_in(model, *(f"{name}-{epoch}.weights.h5" for epoch in (1, 2)))
    assert abs(results["epochs"]["saved"][0][0] - results["tests"]["saved"][0][0]).max() > 1e-3
    return results


@contract("terminate-on-nan-of-one-rank", sizes=(3,))
def test_terminate_on_nan_of_one_rank(distribute: Any) -> Numbers:
    look = Note(on_train_batch_end=lambda model, batch, logs: bool(np.isnan(logs["loss"])))
    x, y = numbers()
    y[15] = np.nan
    model = compiled(distribute)
    fitted(model, x, y, shuffle=False, epochs=3, callbacks=[look, keras.callbacks.TerminateOnNaN()])
    return {"steps": model.optimizer.iterations, "losses_are_nan": look.seen}


@contract("remote-monitor", covered_by=("callbacks",))
def test_remote_monitor(distribute: Any) -> Numbers:
    posted: list[Any] = []
    monitor = keras.callbacks.RemoteMonitor()
    with mock.patch("requests.post", lambda url, data, headers: posted.append(json.loads(data["data"]))):
        result = fitted(compiled(distribute), *numbers(), validation_data=numbers(9), callbacks=[monitor])
    assert [sorted(report) for report in posted] == [["epoch", "loss", "val_loss"]] * 2 * kd.is_chief()
    return {**result, "received": kd.broadcast(posted)}


def only_the_chief_shows_progress(results: list[Numbers], plain: Numbers, size: int) -> None:
    """In four calls over all examples and one over nine. Each bar ends with the metrics of all ranks."""
    assert [result["own_output"] for result in results[1:]] == [""] * (len(results) - 1)
    shown, expected = (last_of_each_call(result["own_output"]) for result in (results[0], plain))
    assert shown == expected
    assert [line.split()[0] for line in shown] == [*["4/4"] * 4, "2/2"]


def last_of_each_call(output: str) -> list[str]:
    lines = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;]*m|\x08", "", output)) if "/step" in line]
    # A bar may be drawn again at its last step. The next one begins with its first step.
    last = [line for line, following in zip(lines, [*lines[1:], "-"], strict=True) if place(following) != place(line)]
    finished = [line for line in last if len(set(place(line).split("/"))) == 1]
    return [re.sub(r"━+| \d+\S*/step| \d+s", "", line).strip() for line in finished]


def place(line: str) -> str:
    return line.split()[0]


def with_bars(model: keras.Model, **options: Any) -> Numbers:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        result = fitted(model, *numbers(), verbose=1, **options)
        model.evaluate(*numbers(), batch_size=BATCH, verbose=1)
        model.predict(numbers(9)[0], batch_size=BATCH, verbose=1)
    return {**result, "own_output": output.getvalue()}


@contract("callbacks", sizes=(3,), verify=only_the_chief_shows_progress)
def test_together_callbacks(distribute: Any) -> Numbers:
    """Files of the chief alone, decisions of all ranks, a bar that ends with the metrics of all. What a callback that
    writes leaves behind, all ranks have.
    """
    stopping = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)
    callbacks = [
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.ModelCheckpoint("epoch-{epoch}.keras"),
        board := WithRate("logs", write_graph=False),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        stopping,
    ]
    model = compiled(distribute, keras.optimizers.SGD(0.1), metrics=["mae"], steps_per_execution=1)
    result = with_bars(model, epochs=5, validation_data=numbers(9), callbacks=callbacks)
    assert [name for name in files() if not name.startswith("logs")] == [
        "epoch-1.keras", "epoch-2.keras", "epoch-3.keras", "log.csv",
    ]  # fmt: skip
    with open("log.csv") as file:
        written = [float(row["loss"]) for row in csv.DictReader(file)]
    loaded = keras.models.load_model("epoch-3.keras")
    saved = {"weights": loaded.get_weights(), "steps": loaded.optimizer.iterations}
    told = {"stopped": stopping.stopped_epoch, "rate": model.optimizer.learning_rate, "written": written}
    told["epochs"] = board.epochs
    return {**result, **told, "saved": saved, "events": events("logs")}


# --- Decisions of one rank ---


def on_last_rank(hook: str, at: int, action: Callable[[keras.Model], None]) -> Note:
    def run(model: keras.Model, index: int, logs: Any) -> None:
        if index == at and kd.rank() == kd.size() - 1:
            action(model)

    return Note(**{hook: run})


def stop(model: keras.Model) -> None:
    model.stop_training = True


@contract("stop-training-on-one-rank", sizes=(3,), covered_by=("learning-rate-warmup",))
def test_stop_training_on_one_rank(distribute: Any) -> Numbers:
    steps = []
    for hook, at in (("on_epoch_begin", 1), ("on_train_batch_end", 1), ("on_epoch_end", 0)):
        model = compiled(distribute)
        fitted(model, *numbers(), epochs=3, callbacks=[on_last_rank(hook, at, stop)])
        steps.append(int(model.optimizer.iterations))
    assert steps == [STEPS + 1, 2, STEPS]
    return {"steps": steps}


# --- ChiefOnly ---


def halves_and_doubles() -> Note:
    """Halves the rate before the second batch, doubles it after the third, and divides it by 3 when an epoch begins."""

    def times(factor: float, at: int | None = None) -> Callable[..., None]:
        def change(model: keras.Model, index: int, logs: Any) -> None:
            if at in (None, index):
                model.optimizer.learning_rate = float(model.optimizer.learning_rate) * factor

        return change

    return Note(on_epoch_begin=times(1 / 3), on_train_batch_begin=times(0.5, 1), on_train_batch_end=times(2.0, 2))


@contract("chief-only-learning-rate-between-batches", covered_by=("stops-different-learning-rates",))
def test_chief_only_learning_rate_between_batches(distribute: Any) -> Numbers:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    model = compiled(distribute, optimizer)
    result = fitted(model, *numbers(), callbacks=[kd.callbacks.ChiefOnly(halves_and_doubles())])
    return {**result, "rate": model.optimizer.learning_rate}


@contract("chief-only-stop-training", sizes=(3,), covered_by=("learning-rate-warmup", "stops-different-learning-rates"))
def test_chief_only_stop_training(distribute: Any) -> Numbers:
    """Stops at the end of an epoch, and from a LambdaCallback between batches."""
    early = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2)
    model = compiled(distribute)
    result = fitted(model, *numbers(), epochs=9, validation_data=numbers(9), callbacks=[kd.callbacks.ChiefOnly(early)])
    second = compiled(distribute)
    between = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: stop(second) if batch == 2 else None
    )
    fitted(second, *numbers(), callbacks=[kd.callbacks.ChiefOnly(between)])
    steps = [int(model.optimizer.iterations), int(second.optimizer.iterations)]
    assert steps == [3 * STEPS, 3]
    return {**result, "steps": steps}


# --- LearningRateWarmup ---


def note_rates() -> Note:
    return Note(on_train_batch_end=lambda model, batch, logs: float(model.optimizer.learning_rate))


def warmed_up(size: int, distribute: Any = same, **options: Any) -> Numbers:
    """Trains for 4 epochs with a warm-up of 2.5 epochs from 0.3 / size to 0.3, and checks the rate of each step."""
    rates = note_rates()
    warmup = kd.callbacks.LearningRateWarmup(epochs=2.5, **options)
    model = compiled(distribute, keras.optimizers.SGD(0.3, momentum=0.5))
    result = fitted(model, *numbers(), epochs=4, callbacks=[warmup, rates])
    expected = [0.3 / size + (0.3 - 0.3 / size) * min(step / 10, 1) for step in range(4 * STEPS)]
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-12)
    assert rates.seen[10:] == [0.3] * 6
    return {**result, "rates": rates.seen}


contract("learning-rate-warmup", sizes=(3,), reference=lambda size: warmed_up(size, start=0.3 / size))(
    lambda distribute: warmed_up(kd.num_replicas(), distribute)
)


@contract("learning-rate-warmup-resumed", covered_by=("learning-rate-warmup",))
def test_learning_rate_warmup_resumed(distribute: Any) -> Numbers:
    def run(*more: Any) -> tuple[Numbers, list[float]]:
        rates = note_rates()
        callbacks = [keras.callbacks.BackupAndRestore("backup"), kd.callbacks.LearningRateWarmup(3, 0.05), rates]
        model, result = compiled(distribute, keras.optimizers.SGD(0.3)), {}
        with contextlib.suppress(KeyboardInterrupt):
            result = fitted(model, *numbers(), epochs=4, shuffle=False, callbacks=[*callbacks, *more])
        return result, rates.seen

    (_, before), (result, after) = interrupted_once(run)
    assert len(before) == len(after) == 2 * STEPS
    expected = [0.05 + 0.25 * min(step / 12, 1) for step in range(4 * STEPS)]
    np.testing.assert_allclose([*before, *after], expected, rtol=1e-6)
    rates, warmup = note_rates(), kd.callbacks.LearningRateWarmup(epochs=3, start=0.05)
    model = compiled(distribute, keras.optimizers.SGD(0.3))
    for _ in range(4):
        fitted(model, *numbers(), epochs=1, callbacks=[warmup, rates])
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    return {**result, "rates": [before, after, rates.seen]}


@contract("learning-rate-warmup-refuses")
def test_learning_rate_warmup_refuses(distribute: Any) -> Numbers:
    for epochs in (0, -1):
        with pytest.raises(kd.ConfigurationError, match=f"epochs={epochs}"):
            kd.callbacks.LearningRateWarmup(epochs=epochs)
    warmup = kd.callbacks.LearningRateWarmup()
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(kd.ConfigurationError, match="cannot set this learning rate: it is not a number"):
        fitted(compiled(distribute, keras.optimizers.SGD(schedule)), *numbers(), callbacks=[warmup])
    unknown = examples().filter(lambda x, y: True).batch(BATCH)
    with pytest.raises(kd.ConfigurationError, match="needs the number of steps in an epoch"):
        fitted(compiled(distribute), unknown, callbacks=[kd.callbacks.LearningRateWarmup()])
    fitted(compiled(distribute), unknown, callbacks=[kd.callbacks.LearningRateWarmup(steps_per_epoch=STEPS)])
    return {}


# --- Timing ---

TIMES = ("step_seconds", "wait_seconds", "examples_per_second")


def times_are_alike(results: list[Numbers], plain: Numbers, size: int) -> None:
    assert all(result["own_times"] == results[0]["own_times"] for result in results)
    if len(results) == 1:
        assert results[0]["own_times"]["wait_seconds"] == [0.0, 0.0]


@contract("timing", sizes=(3,), verify=times_are_alike, covered_by=("timing-tensorboard",))
def test_timing(distribute: Any) -> Numbers:
    timing = kd.callbacks.Timing()
    writers = [keras.callbacks.TensorBoard("logs", write_graph=False), keras.callbacks.CSVLogger("log.csv")]
    model = compiled(distribute, steps_per_execution=3)
    result = fitted(model, *numbers(), validation_data=numbers(9), callbacks=[timing, *writers])
    times = {name: result["history"].pop(name) for name in TIMES}
    written = events("logs")
    with open("log.csv") as file:
        rows = list(csv.DictReader(file))
    for name in TIMES:
        assert [float(row[name]) for row in rows] == times[name]
        (first,), (second,) = (written[f"train:epoch_{name}:{epoch}"] for epoch in (0, 1))
        np.testing.assert_allclose([first, second], times[name], rtol=1e-6)
    seconds = np.asarray(times["step_seconds"])
    np.testing.assert_allclose(times["examples_per_second"] * seconds * STEPS, COUNT, rtol=1e-6)
    assert (seconds > 0).all()
    assert (np.asarray(times["wait_seconds"]) < seconds).all()
    assert len(timing.by_rank) == kd.size()
    return {**result, "own_times": times}


SECONDS = 2.0  # longer than what else a busy machine makes a rank wait for


class Slow(keras.callbacks.Callback):
    """Makes each step of the last rank longer by a number of seconds."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if kd.rank() == kd.size() - 1:
            time.sleep(SECONDS)


def others_have_waited(results: list[Numbers], plain: Numbers, size: int) -> None:
    for result in results:
        assert result["own_by_rank"] == results[0]["own_by_rank"]
    *waited, slowest = [times["wait_seconds"] for times in results[0]["own_by_rank"]]
    assert all(seconds > 0.5 * SECONDS for seconds in waited)
    # Ranks may also wait for other reasons, but the slow one has not waited in this part of a step.
    assert slowest + SECONDS <= results[0]["own_by_rank"][-1]["step_seconds"] * (1 + 1e-6)


@contract("timing-slow-rank", sizes=(3,), verify=others_have_waited, covered_by=("timing-tensorboard",))
def test_timing_slow_rank(distribute: Any) -> Numbers:
    """The others' waiting shows how much slower one rank is, also if the ranks synchronize after each batch."""
    timing = kd.callbacks.Timing()
    model = compiled(distribute)
    fitted(model, *numbers())  # traced without a stopwatch
    result = fitted(model, *numbers(), callbacks=[timing, Slow()])
    return {"weights": result["weights"], "own_by_rank": timing.by_rank}


def lines_are_of_ranks(results: list[Numbers], plain: Numbers, size: int) -> None:
    """The losses of the shares, weighted by their examples, are the loss of the batch."""
    for epoch, loss in enumerate(plain["history"]["loss"]):
        of_epoch = {name: np.asarray(values) for name, values in results[0]["own_written"][str(epoch)].items()}
        examples = of_epoch["examples_per_second"] * of_epoch["step_seconds"] * STEPS
        assert examples.sum() == pytest.approx(COUNT, rel=1e-6)
        np.testing.assert_allclose(np.average(of_epoch["loss"], weights=examples), loss, rtol=1e-6)
        assert len({*of_epoch["loss"].ravel().tolist()}) == len(results)  # each has other examples


@contract("timing-tensorboard", sizes=(3,), verify=lines_are_of_ranks)
def test_timing_for_tensorboard(distribute: Any) -> Numbers:
    result = fitted(compiled(distribute), *numbers(), callbacks=[kd.callbacks.Timing("ranks")])
    for name in TIMES:
        result["history"].pop(name)
    written: Numbers = {}
    for key, values in sorted(events("ranks").items()):  # in the order of rank
        folder, tag, epoch = key.split(":")
        assert (len(values), folder[:5], tag[:6]) == (1, "rank-", "ranks/")
        written.setdefault(epoch, {}).setdefault(tag[6:], []).extend(values)
    return {**result, "own_written": written}
