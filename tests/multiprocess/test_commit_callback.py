"""`kd.callbacks.Commit`: what it refuses, what it says, and what a run that resumes may change."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import keras_dist as kd
from keras_dist.state.commits import Commits
from keras_dist.testing import WorkerError
from keras_dist.training import resuming

STEPS = 4  # of an epoch
OnRank = Callable[[Callable[[str], Any]], Any]


@pytest.fixture
def on_rank(pools: Any, tmp_path: Path) -> OnRank:
    """Calls a function with a folder in a live process, and returns its result."""
    return lambda function: pools.get("serial", 1).run(function, str(tmp_path))[0]


def fitted(folder: str, *, seed: int | None = 3, units: int = 4, distribute: bool = True, **options: Any) -> Any:
    """Trains a small model with commits. Returns the model and its history."""
    os.chdir(folder)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    random = np.random.default_rng(1)
    x, y = random.normal(size=(8 * STEPS, 3)), random.normal(size=(8 * STEPS, 1))
    data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(32).batch(8)}
    if options.pop("arrays", False):
        data = {"x": x, "y": y, "batch_size": 8}
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(units), keras.layers.Dense(1)])
    model = kd.distribute(model) if distribute else model
    model.compile("adam", "mse", **options.pop("compile", {}))
    every = options.pop("every", 1)
    callbacks = [kd.callbacks.Commit("commits", every=every), *options.pop("callbacks", [])]
    history = model.fit(verbose=0, callbacks=callbacks, **{"epochs": 2, **data, **options})
    return model, history.history


def crashing(batches: int) -> Any:
    class Crashing(keras.callbacks.Callback):
        left = batches

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("a crash")

    return Crashing()


def crash(folder: str, batches: int, **options: Any) -> None:
    callbacks = [*options.pop("callbacks", []), crashing(batches)]
    with contextlib.suppress(RuntimeError):
        fitted(folder, callbacks=callbacks, **options)


def logged() -> Any:
    return unittest.TestCase().assertLogs("keras_dist", "INFO")


def resumed(folder: str, batches: int, make: Callable[[], list[Any]] = list, **options: Any) -> Any:
    """Trains until a crash, then resumes, each with callbacks of its own. Returns what was said, history and steps."""
    with logged() as messages:
        crash(folder, batches, callbacks=make(), **options)
        model, history = fitted(folder, callbacks=make(), **options)
    return "\n".join(messages.output), history, int(model.optimizer.iterations)


# The number of batches before a crash, if there is one, and how the second run differs; the error.
REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "not distributed": (
        0, {"distribute": False}, "Commit needs a model that keras_dist knows, also in one process.",
        "Add `model = kd.distribute(model)` before `model.compile`.",
    ),
    "twice": (
        99, {}, "A call of `fit` with these commits has ended in this process",
        "Give each call of `fit` a directory of its own",
    ),
    "another seed": (
        6, {"seed": 4}, "The training data come in another order than in the run that resumes here.",
        "Call keras.utils.set_random_seed with the same seed as before",
    ),
    "another model": (
        6, {"units": 5}, "The commit is of another model or optimizer",
        "variables/model/0/kernel: shape (3, 4) in the commit, (3, 5) now",
    ),
    "longer executions": (
        5, {"compile": {"steps_per_execution": 2}}, "a commit after 1 batches of the epoch, steps_per_execution=2",
        "Compile the model with the same steps_per_execution as before",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(on_rank: OnRank, name: str) -> None:
    batches, options, problem, remedy = REFUSED[name]

    def run(folder: str) -> None:
        if batches:
            crash(folder, batches)
        fitted(folder, **options)

    with pytest.raises(WorkerError, match=f"(?s){re.escape(problem)}.*{re.escape(remedy)}"):
        on_rank(run)


def test_without_a_seed_a_run_goes_on_at_an_epoch_and_says_so(on_rank: OnRank) -> None:
    def run(folder: str) -> Any:
        context.context()._seed = None
        return resumed(folder, 6, seed=None, arrays=True)

    messages, history, _ = on_rank(run)
    assert "the training data have another order in each run" in messages
    assert "call keras.utils.set_random_seed(1) at the top of the script" in messages
    assert "resumes after step 4 (epoch 2, batch 0)" in messages
    assert len(history["loss"]) == 2


def test_a_dataset_without_a_seed_goes_on_at_the_next_batch(on_rank: OnRank) -> None:
    def twice(folder: str) -> Any:
        """Returns the messages, and the numbers of all examples that were read by both runs, in order."""
        context.context()._seed = None
        os.chdir(folder)
        read: list[int] = []

        class Noting(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                read.extend(data[0][:, 0].numpy().astype(int).tolist())
                return super().train_step(data)

        def run(*callbacks: Any) -> None:
            model = kd.distribute(Noting([keras.Input([1]), keras.layers.Dense(1)]))
            model.compile("sgd", "mse", run_eagerly=True)
            numbers = tf.range(8.0 * STEPS)[:, None]
            noisy = tf.data.Dataset.from_tensor_slices((numbers, numbers)).shuffle(32).map(
                lambda x, y: (x + 0.1 * tf.random.uniform([]), y)
            )  # fmt: skip
            commit = kd.callbacks.Commit("commits", every=2)
            model.fit(noisy.batch(8), epochs=2, verbose=0, callbacks=[commit, *callbacks])

        with logged() as messages:
            with contextlib.suppress(RuntimeError):
                run(crashing(6))
            run()
        return "\n".join(messages.output), read

    messages, read = on_rank(twice)
    assert "resumes after step 6 (epoch 2, batch 2)" in messages
    first, second = read[: 8 * STEPS], read[8 * STEPS :]
    assert sorted(first) == sorted(second) == [*range(8 * STEPS)]
    assert first != second


def test_batches_that_only_an_index_makes_are_jumped_over(on_rank: OnRank) -> None:
    def interrupted(folder: str) -> Any:
        """Returns the results of a run without and with a crash, and which batches the latter has made after it."""
        os.chdir(folder)

        class ByIndex(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 16

            def __getitem__(self, index: int) -> Any:
                made.append(index)
                x = np.arange(8 * index, 8 * index + 8, dtype="float32")[:, None] / 128
                return x, 2 * x

        def run(*callbacks: Any) -> Any:
            keras.utils.set_random_seed(3)
            model = kd.distribute(keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
            model.compile("adam", "mse")
            model.fit(ByIndex(), epochs=1, verbose=0, callbacks=[*callbacks])
            return [weight.tolist() for weight in model.get_weights()]

        made: list[int] = []
        expected = run()
        with contextlib.suppress(RuntimeError):
            run(kd.callbacks.Commit("commits", every=4), crashing(12))
        made = []
        return expected, run(kd.callbacks.Commit("commits", every=4)), made

    expected, actual, made = on_rank(interrupted)
    assert actual == expected
    assert len(made) < 10  # two for the shapes, one for the twelve that are skipped, four that are left


def test_more_epochs_are_trained_and_no_epoch_twice(on_rank: OnRank) -> None:
    def run(folder: str) -> Any:
        histories = []
        for epochs in (2, 3, 3):
            resuming._complete.clear()  # as in a new process
            model, history = fitted(folder, epochs=epochs)
            histories.append(history)
        return *histories, int(model.optimizer.iterations)

    first, second, third, steps = on_rank(run)
    assert second["loss"][:2] == first["loss"]
    assert len(second["loss"]) == 3
    assert third == second
    assert steps == 3 * STEPS


def test_what_was_logged_before_the_first_batches_are_committed_is_cut(on_rank: OnRank) -> None:
    def run(folder: str) -> Any:
        board = functools.partial(keras.callbacks.TensorBoard, "logs", write_graph=False, update_freq=1)
        messages, _, _ = resumed(folder, 2, lambda: [board()], every="epoch")
        read = tf.compat.v1.train.summary_iterator
        events = [event for path in sorted(Path("logs/train").glob("events*")) for event in read(str(path))]
        return messages, [event.step for event in events for value in event.summary.value if value.tag == "batch_loss"]

    messages, steps = on_rank(run)
    assert "resumes after step 0 (epoch 1, batch 0)" in messages
    assert sorted(steps) == [*range(1, 2 * STEPS + 1)]


def test_the_commit_is_used_and_not_the_backup_beside_it(on_rank: OnRank) -> None:
    backup = functools.partial(keras.callbacks.BackupAndRestore, "backup", delete_checkpoint=False)
    messages, history, steps = on_rank(lambda folder: resumed(folder, 6, lambda: [backup()]))
    assert "resumes after step 6 (epoch 2, batch 2)" in messages
    assert len(history["loss"]) == 2
    assert steps == 2 * STEPS


def test_by_time(on_rank: OnRank) -> None:
    def run(folder: str) -> list[int]:
        fitted(folder, every="0.001s")
        return [entry.step for entry in Commits("commits").list()]

    steps = on_rank(run)
    assert (len(steps), steps[-1]) == (3, 2 * STEPS)


@pytest.mark.parametrize("every", [0, -1, True, "5 days", "epochs", None, 2.5])
def test_unknown_times_are_refused(every: Any) -> None:
    with pytest.raises(kd.ConfigurationError) as caught:
        kd.callbacks.Commit("commits", every=every)
    assert f"Received: every={every!r}" in str(caught.value)
    assert 'Pass a time ("300s", "10min", "1h"), a number of batches, or "epoch".' in str(caught.value)
