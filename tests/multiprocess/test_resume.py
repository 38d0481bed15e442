"""Runs that are killed at random moments, and started again, end bit for bit as runs that nobody disturbs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keras_dist.environment import COMMITTED_EXIT_CODE
from tests.leaks import marked
from tests.multiprocess.launches import RUN, SCRIPTS
from tests.results import SCHEDULE

SCRIPT = SCRIPTS / "resume.py"
FIRST, COUNT = int(os.environ.get("CHAOS_SEED", "0")), int(os.environ.get("CHAOS_COUNT", "20"))
STEPS = 52  # of the whole training
CODES = {"SIGKILL": 128 + signal.SIGKILL, "SIGTERM": COMMITTED_EXIT_CODE, "ENOSPC": 1}
BALLAST = "ballast"  # what fills the disk
MARK = "KERAS_DIST_RESUME"
_SECONDS = 150.0  # for one start of the script, on a busy machine
_SESSION = "PYTEST_XDIST_TESTRUNUID"
_LAUNCHERS: dict[str, list[str]] = {
    "serial": [sys.executable],
    "mirrored": [sys.executable],
    "central_storage": [sys.executable],
    "horovod": [*RUN, "-np", "2", "--backend", "horovod", sys.executable],
    "multi_worker": [*RUN, "-np", "2", "--backend", "multi_worker", sys.executable],
    "parameter_server": [*RUN, "--workers", "2", "--ps", "1", sys.executable],
}

pytestmark = [pytest.mark.full, pytest.mark.timeout(4 * _SECONDS), pytest.mark.alone]

# The cheaper ones more often.
_TURNS = (
    "serial", "horovod", "mirrored", "multi_worker", "serial",
    "parameter_server", "central_storage", "horovod", "serial", "mirrored",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to some ranks."""

    ranks: list[int]
    step: int  # after which it happens
    seconds: float  # how long after it: while a commit is written, or later
    signal: str  # "SIGKILL" or "SIGTERM"; "ENOSPC" if the disk with the commits is full from then on


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A backend, and what happens at the first starts of a script, one after the other."""

    backend: str
    faults: list[Fault]


def schedule_of(seed: int) -> Schedule:
    """Returns the schedule of a seed: each backend in turn, one or two faults."""
    draw = random.Random(seed)
    backend = _TURNS[seed % len(_TURNS)]
    ranks = [[0], [1], [0, 1]] if backend in ("horovod", "multi_worker") else [[0]]
    steps = sorted(draw.sample(range(1, STEPS), draw.choice([1, 1, 2])))
    signals = ["SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGTERM", "ENOSPC"]
    faults = [Fault(draw.choice(ranks), step, draw.uniform(0.0, 0.05), draw.choice(signals)) for step in steps]
    return Schedule(backend, faults)


def start(backend: str, folder: Path, fault: Fault | None = None, options: Sequence[str] = ()) -> tuple[int, str]:
    """Runs the script to its end. Returns its exit code, as a shell shows it, and its output."""
    folder.mkdir(exist_ok=True)
    faults = [] if fault is None else [json.dumps(dataclasses.asdict(fault))]
    *launcher, python = _LAUNCHERS[backend]
    command = [*launcher, *options, python, str(SCRIPT), backend, str(folder), *faults]
    environ = {**os.environ, MARK: str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS
    )
    assert not marked(MARK, str(folder)), "processes are left"
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    return code, job.stdout


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns the results of runs that nobody disturbs, by backend. All processes of pytest share them."""

    def of(backend: str) -> dict[str, Any]:
        shared = tmp_path_factory.getbasetemp().parent / f"undisturbed-{backend}-{os.environ.get(_SESSION, 'alone')}"
        if not shared.exists():
            folder = tmp_path_factory.mktemp(backend)
            code, output = start(backend, folder)
            assert code == 0, output
            with contextlib.suppress(OSError):  # another process was faster
                folder.rename(shared)
        return result(shared)

    return of


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_killed_run_ends_as_if_nothing_had_been(
    seed: int, tmp_path: Path, undisturbed: Any, record_property: Callable[[str, Any], None]
) -> None:
    schedule = schedule_of(seed)
    faults: list[dict[str, Any]] = []
    record_property(SCHEDULE, [seed, {"backend": schedule.backend, "faults": faults}])
    text = f"CHAOS_SEED={seed}: {schedule}"
    with contextlib.ExitStack() as disk:
        if any(fault.signal == "ENOSPC" for fault in schedule.faults):
            disk.enter_context(small_disk(tmp_path / "commits"))
        run(schedule, text, tmp_path, undisturbed)
        faults += went_on(schedule, tmp_path)


def run(schedule: Schedule, text: str, tmp_path: Path, undisturbed: Any) -> None:
    for fault in schedule.faults:
        code, output = start(schedule.backend, tmp_path, fault)
        if code == 0:
            break  # the training was faster than the fault
        has_ended = any(tmp_path.glob(f"commits/commit-{STEPS:012}*"))  # then nobody handles SIGTERM any more
        assert code == CODES[fault.signal] or (has_ended and code == 128 + signal.SIGTERM), f"{text}\n{output}"
        if fault.signal == "ENOSPC":
            assert "No space left on device" in output, f"{text}\n{output}"
            assert "The last good commit is still there" in output, f"{text}\n{output}"
            (tmp_path / "commits" / BALLAST).unlink()
    if code != 0:
        had_commit = any(tmp_path.glob("commits/commit-*"))
        code, output = start(schedule.backend, tmp_path)
        assert code == 0, f"{text}\n{output}"
        assert ("resumes after step" in output) == had_commit, f"{text}\n{output}"
    assert_same(result(tmp_path), undisturbed(schedule.backend), f"{text}\n{output}")


def went_on(schedule: Schedule, folder: Path) -> list[dict[str, Any]]:
    """Returns for each fault before the last batch how many batches were computed again, and when the next came."""
    starts = [lines.split() for lines in (folder / "batches").read_text().split("start\n") if lines]
    found = []
    for fault, before, after in zip(schedule.faults, starts, starts[1:], strict=False):
        again, seconds = int(before[-2]) - int(after[0]) + 1, float(after[1]) - float(before[-1])
        found.append({"signal": fault.signal, "again": again, "seconds": round(seconds, 2)})
    return found


@pytest.mark.parametrize("backend", ["horovod", "parameter_server"])
def test_the_launcher_starts_again(backend: str, tmp_path: Path, undisturbed: Any) -> None:
    fault = Fault([0], 30, 0.0, "SIGKILL")
    code, output = start(backend, tmp_path, fault, ["--max-restarts", "1"])
    assert code == 0, output
    assert "rank 0 was killed by SIGKILL" in output
    assert re.search(r"starts all ranks again \(restart 1 of 1\), from the commit of step (27|30)\.", output), output
    assert_same(result(tmp_path), undisturbed(backend), output)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a disk of its own, which a fault fills."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_same(actual: dict[str, Any], expected: dict[str, Any], text: str) -> None:
    for name, of_run in expected.items():
        assert actual[name] == of_run, f"{name} differs\n{text}"
