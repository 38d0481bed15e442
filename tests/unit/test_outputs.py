"""A run that resumes cuts its own files, and touches no others."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

import keras_dist as kd
from keras_dist.state import checkpoint

MADE, OWN = 1_800_000_000, "a.host.12"


def event_file(folder: Path, time: int, by: str, text: str = "events") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{time}.{by}.0.v2"
    path.write_text(text)
    return path


def test_files_are_cut_to_what_they_were(tmp_path: Path) -> None:
    callbacks = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path)]
    (tmp_path / "log.csv").write_text("epoch,loss\n0,1\n")
    events = event_file(tmp_path / "train", MADE, OWN)
    sizes = checkpoint.sizes(callbacks)
    (tmp_path / "log.csv").open("a").write("1,0.5\n")
    events.open("a").write(" and more")
    checkpoint.cut(callbacks, sizes, MADE + 5, tmp_path)
    assert (tmp_path / "log.csv").read_text() == "epoch,loss\n0,1\n"
    assert events.read_text() == "events"


def test_the_files_of_each_rank_are_cut(tmp_path: Path) -> None:
    callbacks = [kd.callbacks.Timing(tmp_path)]
    events = [event_file(tmp_path / folder, MADE, OWN) for folder in ("rank-0", "rank-1")]
    sizes = checkpoint.sizes(callbacks)
    for path in events:
        path.open("a").write(" and more")
    later = event_file(tmp_path / "rank-2", MADE + 9, OWN)
    (tmp_path / ".event-writers").write_text(f"{OWN}\n")
    checkpoint.cut(callbacks, sizes, MADE + 5, tmp_path)
    assert [path.read_text() for path in events] == ["events", "events"]
    assert not later.exists()


def test_the_folder_of_each_rank_may_be_in_a_bucket() -> None:
    import tensorflow as tf

    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    # TensorFlow's file system in memory stands for that of a cloud.
    model.fit(np.zeros([4, 1]), np.zeros([4, 1]), verbose=0, callbacks=[kd.callbacks.Timing("ram://bucket/logs")])
    (file,) = tf.io.gfile.listdir("ram://bucket/logs/rank-0")
    (value,) = (
        tf.make_ndarray(value.tensor)
        for event in tf.compat.v1.train.summary_iterator(f"ram://bucket/logs/rank-0/{file}")
        for value in event.summary.value
        if value.tag == "ranks/wait_seconds"
    )
    assert value == 0


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


def test_the_names_of_tensorflow(tmp_path: Path) -> None:
    import tensorflow as tf

    events = tf.summary.create_file_writer(str(tmp_path / "train"))
    events.close()
    (path,) = checkpoint.sizes([keras.callbacks.TensorBoard(tmp_path)])
    checkpoint.note_writer(tmp_path / "commits")
    checkpoint.note_writer(tmp_path / "commits")
    (writer, again) = (tmp_path / "commits" / ".event-writers").read_text().splitlines()
    assert writer == again
    assert f".{writer}." in path
