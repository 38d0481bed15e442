"""What tests share that start processes."""

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.launches import FOLDER, PREAMBLE, QUIET, RUN, Commands, Job, Start, processes_of


@pytest.fixture
def pool(pools: Any) -> WorkerPool:
    """A coordinator with two workers and a server, which live on from test to test."""
    return pools.get("parameter_server", 2)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts commands in the folder of the test. Afterwards kills what they have left behind, which is a failure."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **variables: str) -> subprocess.Popen[str]:
        environ = {**os.environ, **QUIET, FOLDER: str(tmp_path), **variables}
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        )
        return started[-1]

    yield start
    left = processes_of(tmp_path)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()
    assert not left


@pytest.fixture
def start(commands: Commands, tmp_path: Path) -> Iterator[Start]:
    """Starts `keras-dist run`, of two ranks unless the options name others. It must leave no files behind either."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(source: str, *options: str, arguments: tuple[str, ...] = ()) -> Job:
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        target = () if "-m" in options or "--" in options else (str(script),)
        size = () if "-np" in options or "--workers" in options else ("-np", "2")
        return Job(tmp_path, commands(*RUN, *size, *options, *target, *arguments, TMPDIR=str(temporary)))

    yield start
    assert [file.name for file in temporary.iterdir()] == []
