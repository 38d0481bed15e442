"""`keras-dist run` with small scripts, and what tests ask of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CONTRACT_SECONDS = 5.0  # within which all ranks have ended after one fails; a test allows `limit` of it
START_SECONDS = 60.0  # for a condition, on a busy machine

# The start of every script below. `mark` tells the test when the rank reached a point; all processes of a machine
# share the monotonic clock.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
if "TF_CONFIG" in os.environ:
    config = json.loads(os.environ["TF_CONFIG"])
    tasks = [(job, index) for job, addresses in config["cluster"].items() for index in range(len(addresses))]
    rank = tasks.index((config["task"]["type"], config["task"]["index"]))
else:
    rank = int(os.environ["HOROVOD_RANK"])
here = Path(__file__).parent

def mark(name):
    (here / f"{name}.part{rank}").write_text(str(time.monotonic()))
    (here / f"{name}.part{rank}").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def fail_by(action):
    mark("failed")
    action()
"""

# The start of a script that trains. One process has the same numbers.
SMALL_MODEL = """
import keras, numpy as np
import keras_dist as kd
keras.utils.set_random_seed(0)
kd.init()
keras.backend.set_floatx("float64")
x = np.random.default_rng(0).normal(size=(50, 8))
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
model = kd.distribute(model)
model.compile(keras.optimizers.Adam(0.01), "mse")
"""


@dataclasses.dataclass
class Job:
    """A running launcher, and what a test may ask of it."""

    folder: Path
    process: subprocess.Popen[str]
    marker: str

    def finish(self, seconds: float = START_SECONDS) -> tuple[int, str, str]:
        """Returns its exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def wait_for(self, *names: str) -> None:
        """Waits until the ranks have made these marks."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def seconds_since(self, name: str) -> float:
        """Returns the time since a mark was made."""
        return time.monotonic() - float((self.folder / name).read_text())

    def processes(self) -> list[int]:
        """Returns the processes of the job that still run, also in other sessions."""
        return processes_marked(self.marker)


Start = Callable[..., Job]


def until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.01)


def processes_marked(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, not ours, or gone meanwhile
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def popen(command: Sequence[str], folder: Path, marker: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a command in a folder, whose processes `end` finds by a marker, also in other sessions."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "KERAS_DIST_TEST_MARKER": marker, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(marker: str, *launchers: subprocess.Popen[str]) -> None:
    """Kills what launchers have left behind, and fails if that was anything."""
    left = processes_marked(marker)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.communicate()
    assert left == []


def last_line(text: str) -> str:
    return text.rstrip("\n").split("\n")[-1]


@contextlib.contextmanager
def launches(folder: Path) -> Iterator[Start]:
    """Gives a function that starts `keras-dist run`; afterwards looks for processes and files that it left behind."""
    marker = f"marker-{uuid.uuid4().hex}"
    temporary = folder / "temporary"
    temporary.mkdir()
    jobs = []

    def start(source: str, *options: str, arguments: tuple[str, ...] = ()) -> Job:
        script = folder / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        target = () if "-m" in options or "--" in options else (str(script),)
        command = [sys.executable, "-m", "keras_dist", "run", *options, *target, *arguments]
        process = popen(command, folder, marker, TMPDIR=str(temporary))
        jobs.append(Job(folder, process, marker))
        return jobs[-1]

    yield start
    end(marker, *(job.process for job in jobs))
    names = [file.name for file in temporary.iterdir()]
    assert names == [], f"left behind: {names}"
