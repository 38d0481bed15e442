"""Processes that write commits and are killed meanwhile: `python -m tests.multiprocess.commit_jobs JOB FOLDER ...`."""

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist.state.commits import Commit, Commits, Position

NOBODY = 65534
KEEP = 2
_WATCHED = ("open", "os.", "shutil.", "fcntl.")


def contents(number: int, size: int = 100_000) -> tuple[Position, dict[str, np.ndarray]]:
    """Two commits are of the same step: the second replaces the first."""
    kernel = np.random.default_rng(number).standard_normal(size // 8)
    return Position(number // 2, number // 20, number // 2 % 10), {"kernel": kernel, "number": np.int64(number)}


def write(commits: Commits, number: int, size: int = 100_000) -> None:
    commits.write(*contents(number, size))


def checked(commit: Commit | None) -> int:
    """Returns the number of a commit, after a look at all that is in it."""
    if commit is None:
        return -1
    number = int(commit.arrays["number"])
    place, expected = contents(number, 8 * commit.arrays["kernel"].size)
    assert (commit.place, [*commit.arrays]) == (place, [*expected])
    assert all(np.array_equal(commit.arrays[name], expected[name]) for name in expected)
    return number


def loop(folder: str) -> None:
    """Goes on from the newest commit, for ever. Prints each number that was written, and an empty line at first."""
    commits = Commits(folder, KEEP)
    number = checked(commits.newest()) + 1
    print(flush=True)
    while True:
        write(commits, number)
        print(number, flush=True)
        number += 1


def hold(folder: str) -> None:
    """Writes, and lives until its input ends. Or prints why it may not write."""
    commits = Commits(folder)
    try:
        write(commits, 9)
    except RuntimeError as error:
        print(error, flush=True)
        return
    print(os.getpid(), flush=True)
    sys.stdin.read()


def fork(folder: str) -> None:
    """Writes, and ends. A child of it lives until its input ends, and then tries to write too."""
    commits = Commits(folder)
    write(commits, 0)
    if os.fork():
        os._exit(0)
    print("forked", flush=True)
    sys.stdin.read()
    try:
        write(commits, 9)
    except RuntimeError as error:
        print(error, flush=True)


def every_moment(folder: str) -> None:
    """Is killed at every call of the system in a write, each in a folder of its own. Prints what was found."""
    before = Path(folder) / "before"
    prepared = Commits(before, KEEP)
    for number in (2, 4, 5):
        write(prepared, number)
    prepared.close()
    for moment in itertools.count(1):
        work = Path(folder) / str(moment)
        shutil.copytree(before, work)
        if not (child := os.fork()):
            _write_and_die(work, moment)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, *_found(work)]), flush=True)
        if code == 0:
            return


def _write_and_die(work: Path, moment: int) -> None:
    calls = itertools.count(1)

    def called(event: str, args: Any = ()) -> None:
        if event.startswith(_WATCHED) and next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:  # the only one that Python does not tell
        called("os.fsync")
        fsync(descriptor)
        called("os.fsync")

    os.fsync = watched_fsync
    sys.addaudithook(called)
    write(Commits(work, KEEP), 7, size=800)
    os._exit(0)


def _found(work: Path) -> Iterator[Any]:
    """Yields the number of the newest commit, all problems, and what is there after the next write."""
    commits = Commits(work, KEEP)
    yield checked(commits.newest())
    yield [entry.problem for entry in commits.list() if entry.problem]
    write(commits, 9, size=800)
    yield checked(commits.newest())
    commits.close()
    yield sorted(os.listdir(work))


def permission(folder: str) -> None:
    """Loses the permission to write, then to read. Prints the error of each."""
    write(Commits(Path(folder) / "first"), 0)  # imports all that nobody may not read
    work = Path(folder) / "work"
    work.mkdir()
    if os.geteuid() == 0:  # for root all is permitted
        os.chown(work, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    commits = Commits(work)
    write(commits, 2)
    work.chmod(0o555)
    print(json.dumps(_error_of(commits, 4)), flush=True)
    work.chmod(0)
    try:
        commits.newest()
    except PermissionError as denied:
        print(json.dumps(str(denied)), flush=True)
    work.chmod(0o755)
    os.seteuid(os.getuid())


def _error_of(commits: Commits, number: int, size: int = 800) -> list[str] | None:
    try:
        write(commits, number, size)
    except OSError as error:
        return [str(error.strerror), *error.__notes__]
    return None


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
