"""Runs that are killed at random moments, and started again, end bit for bit as runs that nobody disturbs."""

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from keras_dist.environment import COMMITTED_EXIT_CODE
from tests.multiprocess.launches import FOLDER, QUIET, RUN, SCRIPTS, processes_of, small_disk
from tests.results import SCHEDULE

SCRIPT = SCRIPTS / "resume.py"
FIRST, COUNT = int(os.environ.get("CHAOS_SEED", "0")), int(os.environ.get("CHAOS_COUNT", "20"))
STEPS = 52  # of the whole training
CODES = {"SIGKILL": 128 + signal.SIGKILL, "SIGTERM": COMMITTED_EXIT_CODE, "ENOSPC": 1}
BALLAST = "ballast"  # what fills the disk
_SECONDS = 150.0  # for one start of the script, on a busy machine
_SESSION = "PYTEST_XDIST_TESTRUNUID"
_LAUNCHERS = {
    "horovod": [*RUN, "-np", "2", "--backend", "horovod"],
    "multi_worker": [*RUN, "-np", "2", "--backend", "multi_worker"],
    "parameter_server": [*RUN, "--workers", "2", "--ps", "1"],
}

pytestmark = [pytest.mark.full, pytest.mark.timeout(4 * _SECONDS), pytest.mark.timed]

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


def schedule_of(seed: int) -> tuple[str, list[Fault]]:
    """Returns the backend of a seed, each in turn, and what happens at the first starts: one or two faults."""
    draw = random.Random(seed)
    backend = _TURNS[seed % len(_TURNS)]
    ranks = [[0], [1], [0, 1]] if backend in ("horovod", "multi_worker") else [[0]]
    steps = sorted(draw.sample(range(1, STEPS), draw.choice([1, 1, 2])))
    signals = ["SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGTERM", "ENOSPC"]
    return backend, [Fault(draw.choice(ranks), step, draw.uniform(0.0, 0.05), draw.choice(signals)) for step in steps]


def start(backend: str, folder: Path, fault: Fault | None = None, options: Sequence[str] = ()) -> tuple[int, str]:
    """Runs the script to its end. Returns its exit code, as a shell shows it, and its output."""
    folder.mkdir(exist_ok=True)
    faults = [] if fault is None else [json.dumps(dataclasses.asdict(fault))]
    command = [*_LAUNCHERS.get(backend, [sys.executable]), *options, str(SCRIPT), backend, str(folder), *faults]
    environ = {**os.environ, **QUIET, FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS
    )
    assert not processes_of(folder), "processes are left"
    return job.returncode if job.returncode >= 0 else 128 - job.returncode, job.stdout


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


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
    backend, faults = schedule_of(seed)
    found: list[dict[str, Any]] = []
    record_property(SCHEDULE, [seed, {"backend": backend, "faults": found}])
    output = ""
    with contextlib.ExitStack() as disk:
        if any(fault.signal == "ENOSPC" for fault in faults):
            disk.enter_context(small_disk(tmp_path / "commits", "4m"))
        try:
            for fault in faults:
                code, output = start(backend, tmp_path, fault)
                if code == 0:
                    break  # the training was faster than the fault
                has_ended = any(tmp_path.glob(f"commits/commit-{STEPS:012}*"))  # then nobody handles SIGTERM any more
                assert code == CODES[fault.signal] or (has_ended and code == 128 + signal.SIGTERM)
                if fault.signal == "ENOSPC":
                    assert "No space left on device" in output
                    assert "The last good commit is still there" in output
                    (tmp_path / "commits" / BALLAST).unlink()
            if code != 0:
                had_commit = any(tmp_path.glob("commits/commit-*"))
                code, output = start(backend, tmp_path)
                assert code == 0
                assert ("resumes after step" in output) == had_commit
            assert_same(result(tmp_path), undisturbed(backend))
        except AssertionError as error:
            error.add_note(f"CHAOS_SEED={seed}: {backend}, {faults}\n{output}")
            raise
        found += went_on(faults, tmp_path)


def went_on(faults: list[Fault], folder: Path) -> list[dict[str, Any]]:
    """Returns for each fault before the last batch how many batches were computed again, and when the next came."""
    starts = [lines.split() for lines in (folder / "batches").read_text().split("start\n") if lines]
    found = []
    for fault, before, after in zip(faults, starts, starts[1:], strict=False):
        again, seconds = int(before[-2]) - int(after[0]) + 1, float(after[1]) - float(before[-1])
        found.append({"signal": fault.signal, "again": again, "seconds": round(seconds, 2)})
    return found


@pytest.mark.parametrize("backend", ["horovod", "parameter_server"])
def test_the_launcher_starts_again(backend: str, tmp_path: Path, undisturbed: Any) -> None:
    fault = Fault([0], 30, 0.0, "SIGKILL")
    code, output = start(backend, tmp_path, fault, ["--max-restarts", "1"])
    assert code == 0, output
    assert "rank 0 was killed by SIGKILL" in output
    assert re.search(r"restarts all ranks \(restart 1 of 1\), from the commit of step (27|30)\.", output), output
    assert_same(result(tmp_path), undisturbed(backend))


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, of_run in expected.items():
        assert actual[name] == of_run, f"{name} differs"
