"""Files are replaced completely or not at all, whatever ends the process. Real processes are killed here."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from keras_dist.state.files import finish_writes, write_atomically

# A process that writes `new` to a.txt and b.txt, and kills itself: in the write, or before it moves the n-th file.
KILLED = """
import os, pathlib, signal, sys
from keras_dist.state import files

folder, when = pathlib.Path(sys.argv[1]), int(sys.argv[2])
plain, moved = os.replace, []

def replace(*args):
    moved.append(args)
    if len(moved) == when:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*args)

def write(path):
    path = pathlib.Path(path)
    for name in ("a.txt", "b.txt"):
        path.with_name(name).write_text("new")
        if when == 0:
            os.kill(os.getpid(), signal.SIGKILL)

files.os.replace = replace
files.write_atomically(folder / "a.txt", write)
"""


def killed(folder: Path, when: int) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(when)], timeout=60)
    assert process.returncode == -signal.SIGKILL


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


def test_a_living_writer_is_left_alone(folder: Path) -> None:
    def write(path: str) -> None:
        Path(path).write_text("new")
        finish_writes(folder)

    write_atomically(folder / "a.txt", write)
    assert texts(folder) == {"a.txt": "new", "b.txt": "old"}


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


def test_permissions_stay(folder: Path) -> None:
    (folder / "a.txt").chmod(0o600)
    written(folder / "a.txt")
    assert stat.S_IMODE((folder / "a.txt").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_stays(folder: Path) -> None:
    os.chown(folder / "a.txt", 1234, 2345)
    written(folder / "a.txt")
    after = (folder / "a.txt").stat()
    assert (after.st_uid, after.st_gid) == (1234, 2345)


def test_a_new_file_has_the_permissions_that_the_process_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        written(tmp_path / "new.txt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640


def test_the_longest_name(tmp_path: Path) -> None:
    name = "x" * 251 + ".txt"
    written(tmp_path / name)
    assert texts(tmp_path) == {name: "new"}


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


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing/a.txt"):
        written(tmp_path / "missing" / "a.txt")
