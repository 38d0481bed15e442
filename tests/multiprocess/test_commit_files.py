"""Commits survive what happens to processes and disks. Real processes are killed, on real file systems."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from keras_dist.errors import ConfigurationError
from keras_dist.state.commits import Commits
from tests.multiprocess.commit_jobs import checked, write
from tests.multiprocess.launches import ROOT

pytestmark = [pytest.mark.timeout(120), pytest.mark.timed]


@contextlib.contextmanager
def job(name: str, folder: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Runs a job, which is killed at the end of this context. Yields it and its output."""
    command = [sys.executable, "-m", "tests.multiprocess.commit_jobs", name, str(folder), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process, process.stdout
        finally:
            process.kill()


def printed(name: str, folder: Path, *arguments: object) -> list[Any]:
    """Returns what a job printed, after it has ended well."""
    with job(name, folder, *arguments) as (process, output):
        lines = [json.loads(line) for line in output]
        assert process.wait() == 0
    return lines


NOT_WRITTEN = "keras_dist could not write a commit into {}. The last good commit is still there: {}"


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".writer")


def test_a_kill_at_every_call_of_the_system(tmp_path: Path) -> None:
    """Before it: commits 5, which had replaced 4, and 2, of steps 2 and 1. Commit 7 is of step 3."""
    *killed, complete = printed("every_moment", tmp_path)
    assert complete[0] == 0
    assert {code for code, *_ in killed} == {-signal.SIGKILL}
    assert len(killed) > 15
    newest = [found for _, found, *_ in killed]
    assert newest == sorted(newest)
    assert {*newest} == {5, 7}
    for code, found, problems, after, left in [*killed, complete]:
        assert (problems, after) == ([], 9)
        before = "commit-000000000003" if found == 7 else "commit-000000000002.2"
        assert left == [".writer", before, "commit-000000000004"], code


def test_a_reader_meanwhile_never_sees_less(tmp_path: Path) -> None:
    with job("loop", tmp_path) as (_, output):
        for _ in range(3):
            output.readline()  # there are two commits
        commits, seen = Commits(tmp_path), []
        for _ in range(60):
            seen.append(checked(commits.newest()))
            assert [entry.problem for entry in commits.list() if entry.problem] == []
    assert seen == sorted(seen)
    assert seen[0] >= 1
    assert seen[-1] > seen[0]


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    commits = Commits(tmp_path)
    write(commits, 0)
    commits.close()  # lets others write
    with job("hold", tmp_path) as (process, output):
        pid = int(output.readline())
        with pytest.raises(ConfigurationError) as caught:
            write(commits, 10)
        assert str(caught.value) == (
            "Another process writes commits into this folder.\n"
            f"Received: process {pid} on {os.uname().nodename} has locked {tmp_path}/.writer\n"
            "Remedy: End it first, or give each run a folder of its own."
        )
        assert names(tmp_path) == ["commit-000000000000", "commit-000000000004"]
        assert checked(commits.newest()) == 9
        process.kill()
        process.wait()
        write(commits, 10)
    assert checked(commits.newest()) == 10


def test_a_child_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As a worker that loads data, which may outlive a training that was killed."""
    with job("fork", tmp_path) as (process, output):
        assert output.readline() == "forked\n"
        process.wait()
        commits = Commits(tmp_path)
        write(commits, 2)
        process.stdin.close()
        assert output.readline() == "Another process writes commits into this folder.\n"
        assert output.readline() == (
            f"Received: process {os.getpid()} on {os.uname().nodename} has locked {tmp_path}/.writer\n"
        )
        output.read()
    assert checked(commits.newest()) == 2


def test_a_lost_permission() -> None:
    folder = Path(tempfile.mkdtemp(prefix="keras_dist-commits-"))  # others can't come to pytest's
    try:
        folder.chmod(0o755)
        lost, denied = printed("permission", folder)
    finally:
        shutil.rmtree(folder)
    not_written = NOT_WRITTEN.format(f"{folder}/work", f"{folder}/work/commit-000000000001")
    assert lost == ["Permission denied", not_written]
    assert denied == f"[Errno 13] Permission denied: '{folder}/work'"


def test_a_folder_or_a_lock_that_is_deleted_while_it_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "commits"
    commits = Commits(folder)

    def writes_and_locks(number: int) -> None:
        write(commits, number)
        with job("hold", folder) as (_, output):
            assert output.readline() == "Another process writes commits into this folder.\n"
        assert checked(commits.newest()) == number

    write(commits, 0)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError) as caught:
        write(commits, 2)
    assert caught.value.__notes__ == [
        f"keras_dist could not write a commit into {folder}. There is no good commit in it."
    ]
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    writes_and_locks(2)  # the lock is that of the new folder
    (folder / ".writer").unlink()
    writes_and_locks(4)
