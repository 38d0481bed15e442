"""Keras's `BackupAndRestore` writes two files one after the other. Ours replaces both together."""

from __future__ import annotations

import json
import os
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
