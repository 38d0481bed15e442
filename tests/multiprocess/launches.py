"""Commands of the tests: run to their end, or `keras-dist run` with small scripts, and what tests ask of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = ROOT / "examples"
KERAS_DIST = [sys.executable, "-m", "keras_dist"]
RUN = [*KERAS_DIST, "run"]
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
CONTRACT_SECONDS = 5.0  # within which all ranks have ended after one fails; a test allows `limit` of it
START_SECONDS = 60.0  # for a condition, on a busy machine
RUN_SECONDS = 200.0  # for a whole run, on a busy machine

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


def run(
    *command: str | Path, folder: Path | None = None, seconds: float = RUN_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [*map(str, command)], cwd=folder, env={**os.environ, **QUIET, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip


def output_of(*command: str | Path, folder: Path | None = None, **variables: str) -> str:
    """Returns what a command prints, which ends well."""
    done = run(*command, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logs_of(folder: Path) -> list[str]:
    """Returns the logs of two ranks that `--log-dir logs` has kept."""
    return [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]


def found(output: str) -> Any:
    """Returns what a script has printed as JSON after `found:`."""
    return json.loads(next(line for line in output.splitlines() if line.startswith("found:"))[len("found:") :])


def seconds_since(file: Path) -> float:
    """Returns the time since a script has written the monotonic clock into a file."""
    return time.monotonic() - float(file.read_text())


def finished(process: subprocess.Popen[str], seconds: float = START_SECONDS) -> tuple[int, str, str]:
    """Returns the exit code of a process, stdout and stderr, when it has ended."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@dataclasses.dataclass
class Job:
    """A running launcher, and what a test may ask of it."""

    folder: Path
    process: subprocess.Popen[str]
    marker: str

    def finish(self, seconds: float = START_SECONDS) -> tuple[int, str, str]:
        """Returns its exit code, stdout and stderr."""
        return finished(self.process, seconds)

    def wait_for(self, *names: str) -> None:
        """Waits until the ranks have made these marks."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def signal(self, signum: signal.Signals, *marks: str) -> None:
        """Sends a signal to the launcher, once the ranks have made these marks."""
        self.wait_for(*marks)
        self.process.send_signal(signum)

    def seconds_since(self, name: str) -> float:
        """Returns the time since a mark was made."""
        return seconds_since(self.folder / name)

    def processes(self) -> list[int]:
        """Returns the processes of the job that still run, also in other sessions."""
        return processes_marked(self.marker)


Start = Callable[..., Job]
Commands = Callable[..., subprocess.Popen[str]]


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
        command, cwd=folder, env={**os.environ, "KERAS_DIST_TEST_MARKER": marker, **variables},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


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
        """Two ranks, unless the options name others."""
        script = folder / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        target = () if "-m" in options or "--" in options else (str(script),)
        size = () if "-np" in options or "--workers" in options else ("-np", "2")
        process = popen([*RUN, *size, *options, *target, *arguments], folder, marker, TMPDIR=str(temporary))
        jobs.append(Job(folder, process, marker))
        return jobs[-1]

    yield start
    end(marker, *(job.process for job in jobs))
    names = [file.name for file in temporary.iterdir()]
    assert names == [], f"left behind: {names}"
