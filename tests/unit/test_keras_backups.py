"""Keras's `BackupAndRestore` writes two files one after the other. Ours replaces both together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_dist.state import checkpoint

FILES = ["latest.weights.h5", "training_metadata.json"]


def trained_until_cut(folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> tuple[int, int]:
    """Fails in the second epoch between the two files. Returns the epoch and the steps on the disk."""

    class Cut(Exception):
        pass

    callback = keras.callbacks.BackupAndRestore(folder)
    if at_once:
        for _ in range(2):
            checkpoint.make_atomic(callback)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    plain, calls = json.dumps, []

    def dumps(*args: Any, **kwargs: Any) -> str:
        calls.append(args)
        if len(calls) == 2:
            raise Cut
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("keras.src.callbacks.backup_and_restore.json.dumps", dumps)
        with pytest.raises(Cut):
            model.fit(np.zeros([4, 2]), np.zeros([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[callback])
    text = (folder / FILES[1]).read_text()
    model.load_weights(folder / FILES[0])
    return json.loads(text)["epoch"] if text else -1, int(model.optimizer.iterations)


def test_weights_and_epoch_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained_until_cut(tmp_path, monkeypatch, at_once=True) == (1, 2)


def test_keras_still_writes_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, keras_backups.py is no longer needed."""
    assert trained_until_cut(tmp_path, monkeypatch, at_once=False) == (-1, 4)


def test_the_files_have_their_names(tmp_path: Path) -> None:
    callback = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    checkpoint.make_atomic(callback)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros([4, 2]), np.zeros([4, 1]), verbose=0, callbacks=[callback])
    assert sorted(os.listdir(tmp_path)) == FILES


KILLED = """
import os, signal, sys
import keras, numpy as np
from keras_dist.state import checkpoint

plain, moved = os.replace, []

def replace(*args):
    moved.append(args)
    if len(moved) == 4:  # the second file of the second epoch
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*args)

os.replace = replace
callback = keras.callbacks.BackupAndRestore(sys.argv[1])
checkpoint.make_atomic(callback)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.zeros([4, 2]), np.zeros([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[callback])
"""


def test_a_kill_between_the_two_files_is_made_good(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    callback = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    checkpoint.make_atomic(callback)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    steps: list[int] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.append(int(model.optimizer.iterations))
    )
    history = model.fit(
        np.zeros([4, 2]), np.zeros([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[callback, note]
    )
    assert (history.epoch, steps) == ([2], [4])
    assert sorted(os.listdir(tmp_path)) == FILES


def test_the_state_before_is_replaced_too(tmp_path: Path) -> None:
    callback = keras.callbacks.BackupAndRestore(tmp_path, double_checkpoint=True, delete_checkpoint=False)
    checkpoint.make_atomic(callback)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros([4, 2]), np.zeros([4, 1]), epochs=3, verbose=0, callbacks=[callback])
    epochs = [json.loads((tmp_path / name).read_text())["epoch"] for name in (FILES[1], f"{FILES[1]}.bkp")]
    assert epochs == [3, 2]
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, *(f"{name}.bkp" for name in FILES)])
