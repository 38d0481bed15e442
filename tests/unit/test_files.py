"""Files are replaced completely or not at all, whatever ends the process; a run that resumes cuts its own."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.state import checkpoint
from keras_dist.state.files import finish_writes, write_atomically

# A process that kills itself before it moves the n-th file.
KILL = """
import os, pathlib, signal, sys

folder, when = pathlib.Path(sys.argv[1]), int(sys.argv[2])
plain, moved = os.replace, []

def replace(*args):
    moved.append(args)
    if len(moved) == when:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*args)

os.replace = replace
"""
# It writes `new` to a.txt and b.txt; before a "0th" move it kills itself in the write.
WRITE = """
from keras_dist.state import files

def write(path):
    path = pathlib.Path(path)
    for name in ("a.txt", "b.txt"):
        path.with_name(name).write_text("new")
        if when == 0:
            os.kill(os.getpid(), signal.SIGKILL)

files.write_atomically(folder / "a.txt", write)
"""
BACKUP = "from tests.unit import test_files as t; t.trained(t.small_model(), t.atomic(folder))"


def killed(folder: Path, when: int, program: str = WRITE) -> None:
    command = [sys.executable, "-c", KILL + program, str(folder), str(when)]
    process = subprocess.run(command, timeout=120, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def written(path: str | Path) -> None:
    write_atomically(path, lambda temporary: Path(temporary).write_text("new") and None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("old")
    return tmp_path


def test_a_kill_in_a_write_leaves_the_old_files(folder: Path) -> None:
    killed(folder, 0)
    assert texts(folder) == {"a.txt": "old", "b.txt": "old"}
    assert len(os.listdir(folder)) == 3
    finish_writes(folder)
    assert sorted(os.listdir(folder)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("when", [1, 2])
def test_a_kill_between_the_moves_is_made_good(folder: Path, when: int) -> None:
    killed(folder, when)
    assert texts(folder) == {"a.txt": "new" if when == 2 else "old", "b.txt": "old"}
    finish_writes(folder)
    assert texts(folder) == {"a.txt": "new", "b.txt": "new"}
    assert sorted(os.listdir(folder)) == ["a.txt", "b.txt"]


def test_the_next_write_removes_what_is_left(folder: Path) -> None:
    killed(folder, 0)
    written(folder / "c.txt")
    assert texts(folder) == {"a.txt": "old", "b.txt": "old", "c.txt": "new"}
    assert len(os.listdir(folder)) == 3


def test_an_error_leaves_the_old_file(folder: Path) -> None:
    def write(path: str) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(folder / "a.txt", write)
    assert texts(folder) == {"a.txt": "old", "b.txt": "old"}
    assert sorted(os.listdir(folder)) == ["a.txt", "b.txt"]


def test_a_link_stays_and_its_file_is_replaced(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.txt"
    elsewhere.write_text("old")
    (folder / "link.txt").symlink_to(elsewhere)
    written(folder / "link.txt")
    assert (folder / "link.txt").is_symlink()
    assert elsewhere.read_text() == "new"


def test_permissions_and_owner_stay(folder: Path) -> None:
    (folder / "a.txt").chmod(0o600)
    if os.geteuid() == 0:  # only root may give files away
        os.chown(folder / "a.txt", 1234, 2345)
    before = (folder / "a.txt").stat()
    written(folder / "a.txt")
    after = (folder / "a.txt").stat()
    assert stat.S_IMODE(after.st_mode) == 0o600
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_files_are_flushed_before_they_are_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    flush, move = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        flush(descriptor)

    def replace(*args: Path) -> None:
        events.append("move")
        move(*args)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    written(folder / "a.txt")
    assert events == ["file", "folder", "move", "folder"]


FILES = ["latest.weights.h5", "training_metadata.json"]


def small_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def trained(model: keras.Model, *callbacks: Any) -> keras.callbacks.History:
    return model.fit(np.zeros([4, 2]), np.zeros([4, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[*callbacks])


def atomic(folder: Path) -> keras.callbacks.BackupAndRestore:
    callback = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    for _ in range(2):
        checkpoint.make_atomic(callback)
    return callback


@pytest.mark.parametrize("at_once", [True, False])
def test_weights_and_epoch_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """The second epoch fails between the two files. Once plain Keras keeps both, keras_backups.py is not needed."""

    class Cut(Exception):
        pass

    model, plain, calls = small_model(), json.dumps, []

    def dumps(*args: Any, **kwargs: Any) -> str:
        calls.append(args)
        if len(calls) == 2:
            raise Cut
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("keras.src.callbacks.backup_and_restore.json.dumps", dumps)
        with pytest.raises(Cut):
            trained(model, atomic(tmp_path) if at_once else keras.callbacks.BackupAndRestore(tmp_path))
    text = (tmp_path / FILES[1]).read_text()
    model.load_weights(tmp_path / FILES[0])
    found = json.loads(text)["epoch"] if text else -1, int(model.optimizer.iterations)
    assert found == ((1, 2) if at_once else (-1, 4))


def test_a_kill_between_the_two_files_is_made_good(tmp_path: Path) -> None:
    killed(tmp_path, 4, BACKUP)  # the second file of the second epoch
    model, steps = small_model(), list[int]()
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.append(int(model.optimizer.iterations))
    )
    assert trained(model, atomic(tmp_path), note).epoch == [2]
    assert steps == [4]
    assert sorted(os.listdir(tmp_path)) == FILES


MADE, OWN = 1_800_000_000, "a.host.12"


def event_file(folder: Path, time: int, by: str, text: str = "events") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{time}.{by}.0.v2"
    path.write_text(text)
    return path


def test_files_are_cut_to_what_they_were(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    callbacks = [keras.callbacks.CSVLogger(log), keras.callbacks.TensorBoard(tmp_path), kd.callbacks.Timing(tmp_path)]
    events = [event_file(tmp_path / folder, MADE, OWN) for folder in ("train", "rank-0", "rank-1")]
    log.write_text("epoch,loss\n0,1\n")
    sizes = checkpoint.sizes(callbacks)
    for path in (log, *events):
        path.open("a").write("1,0.5\n")
    later = event_file(tmp_path / "rank-2", MADE + 9, OWN)
    (tmp_path / ".event-writers").write_text(f"{OWN}\n")
    checkpoint.cut(callbacks, sizes, MADE + 5, tmp_path)
    assert log.read_text() == "epoch,loss\n0,1\n"
    assert [path.read_text() for path in events] == ["events"] * 3
    assert not later.exists()


def test_the_folder_of_each_rank_may_be_in_a_bucket() -> None:
    import tensorflow as tf

    # TensorFlow's file system in memory stands for that of a cloud.
    trained(small_model(), kd.callbacks.Timing("ram://bucket/logs"))
    (file,) = tf.io.gfile.listdir("ram://bucket/logs/rank-0")
    events = tf.compat.v1.train.summary_iterator(f"ram://bucket/logs/rank-0/{file}")
    values = [value for event in events for value in event.summary.value if value.tag == "ranks/wait_seconds"]
    assert [float(tf.make_ndarray(value.tensor)) for value in values] == [0.0] * 3


def test_only_event_files_that_the_run_made_after_the_commit_are_removed(tmp_path: Path) -> None:
    callbacks = [keras.callbacks.TensorBoard(tmp_path)]
    after = [event_file(tmp_path / "validation", MADE + 9, by) for by in (OWN, "a.host.11")]
    others = [
        event_file(tmp_path / "validation", MADE + 9, "a.host.13"),
        event_file(tmp_path / "validation", MADE - 9, OWN),
        event_file(tmp_path / "another_run" / "train", MADE + 9, OWN),
        event_file(tmp_path, MADE + 9, OWN),
    ]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "events.txt").write_text("notes")
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / ".event-writers").write_text(f"a.host.11\n{OWN}\n")
    checkpoint.cut(callbacks, {}, MADE, tmp_path / "commits")
    assert not any(path.exists() for path in after)
    assert all(path.exists() for path in others)
    assert (tmp_path / "train" / "events.txt").exists()


def test_a_living_writer_is_left_alone(folder: Path) -> None:
    def write(path: str) -> None:
        Path(path).write_text("new")
        finish_writes(folder)

    write_atomically(folder / "a.txt", write)
    assert texts(folder) == {"a.txt": "new", "b.txt": "old"}
