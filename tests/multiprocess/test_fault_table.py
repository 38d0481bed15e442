"""Each fault, in a job that was started in each way: it ends in time, names the cause, and leaves nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keras_dist.environment import TF_CONFIG
from keras_dist.launcher.cluster import MultiWorkerCluster
from tests.fault_table import ANSWER_SECONDS, CI, FAULTS, JOBS, ON_DISK, USUAL, promise
from tests.leaks import is_known
from tests.limits import limit
from tests.multiprocess.launches import FOLDER, HOROVODRUN, QUIET, RUN, SCRIPTS, processes_of, small_disk
from tests.results import FAULT

STARTED_SECONDS = 90.0  # until the fault happens
ENDED_SECONDS = 45.0  # then the job hangs
MEMORY_BYTES = 64 << 20
LAUNCHERS: dict[str, list[str]] = {
    "run-horovod": [*RUN, "-np", "2", "--backend", "horovod"],
    "run-multi-worker": [*RUN, "-np", "2", "--backend", "multi_worker"],
    "run-parameter-server": [*RUN, "--workers", "2", "--ps", "1"],
    "horovodrun": [str(HOROVODRUN), "-np", "2", sys.executable],
    "tf-config": [sys.executable],
    "one-process": [sys.executable],
}

pytestmark = [pytest.mark.timeout(240), pytest.mark.timed]
Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def running(job: str, fault: str, folder: Path) -> Iterator[list[Process]]:
    """A job in which a fault happens: its launcher, or without one its two processes. Their outputs are in files."""
    (folder / "tmp").mkdir()
    environ = {**os.environ, **QUIET, FOLDER: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    if fault == "stop":  # a rank that pauses is waited for, by default for longer
        environ |= dict.fromkeys(("KERAS_DIST_ANSWER_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"), str(ANSWER_SECONDS))
    configs: list[dict[str, str]] = [{}]
    if job == "tf-config":
        with MultiWorkerCluster(2, {}) as cluster:
            configs = [{TF_CONFIG: cluster.environment(rank)[TF_CONFIG]} for rank in range(2)]
    with contextlib.ExitStack() as stack:
        if fault in ("full", "read-only"):
            stack.enter_context(small_disk(folder / "disk", "1m"))
        else:
            (folder / "disk").mkdir()
        if fault == "memory":
            (folder / "memory").write_text(str(stack.enter_context(memory_cgroup())))
        processes: list[Process] = []
        stack.callback(kill_all, folder, processes)
        for index, config in enumerate(configs):
            output = stack.enter_context((folder / f"output-{index}").open("wb"))
            command = [*LAUNCHERS[job], str(SCRIPTS / "fault.py"), fault, str(folder)]
            processes.append(
                subprocess.Popen(
                    command, env={**environ, **config}, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            )
        (folder / "launcher").write_text(str(processes[0].pid))
        yield processes


def wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_all(folder: Path, processes: Sequence[Process]) -> None:
    """Ends what a job has left, so that a failure of one test is not one of the next."""

    def is_gone() -> bool:
        left = processes_of(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait(is_gone, 10)
    for process in processes:
        process.wait(10)


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    group = root / ("memory" if is_v1 else "") / f"fault-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(MEMORY_BYTES))
        (group / ("memory.swappiness" if is_v1 else "memory.swap.max")).write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"this user may not limit the memory of a process: {error}")
    try:
        yield group
    finally:
        wait(lambda: not (group / "cgroup.procs").read_text().strip(), 10)
        group.rmdir()


def cells() -> list[Any]:
    tiers: dict[Any, list[pytest.MarkDecorator]] = {**dict.fromkeys(USUAL, []), **dict.fromkeys(CI, [pytest.mark.ci])}
    return [
        pytest.param(job, fault, id=f"{job}-{fault}", marks=tiers.get((job, fault), [pytest.mark.full]))
        for job in JOBS
        for fault in FAULTS
        if promise(job, fault) is not None
    ]


@pytest.mark.parametrize(("job", "fault"), cells())
def test_fault(job: str, fault: str, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    promised = promise(job, fault)
    time_of_fault, tmp, disk = (tmp_path / name for name in ("failed", "tmp", "disk"))
    # Without a launcher code and words are those of a process to which nothing happened.
    survivor = 1 if job == "tf-config" and fault in ON_DISK else 0
    stays = []  # a process that nobody could end until it went on
    with running(job, fault, tmp_path) as processes:

        def have_ended() -> bool:
            return all(process.poll() is not None for process in processes)

        wait(lambda: time_of_fault.exists() or have_ended(), STARTED_SECONDS)
        if fault == "stop" and job == "tf-config":
            wait(lambda: processes[survivor].poll() is not None, ENDED_SECONDS)
            stays = ["the stopped process, until it resumes"]
        else:
            wait(lambda: have_ended() and not processes_of(tmp_path), ENDED_SECONDS)
        ended = time.monotonic()
        if stays:
            processes[1].send_signal(signal.SIGCONT)
            wait(lambda: have_ended() and not processes_of(tmp_path), ENDED_SECONDS)
        left = [path for path in tmp.rglob("*") if not is_known(path.relative_to(tmp))]
        left += [path for path in disk.rglob("*") if path.name != "filler" and not path.name[0].isdigit()]
        left_processes = processes_of(tmp_path)
        code = processes[survivor].poll()
    code = 128 - code if code is not None and code < 0 else code  # as a shell shows it
    outputs = [(tmp_path / f"output-{index}").read_text(errors="replace") for index in range(len(processes))]
    output = "\n".join(outputs)
    says = "\n".join(outputs[survivor].strip().splitlines()[-promised.lines :])
    seconds = ended - float(time_of_fault.read_text()) if time_of_fault.exists() else 0.0
    found = promised.says and re.search(promised.says, says)
    named = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", found[0]) if found else ""
    result = {"seconds": seconds, "code": code, "says": named, "left": stays}
    record_property(FAULT, [f"{job}-{fault}", result])

    assert time_of_fault.exists(), output  # else it ended before the fault, or did not start
    assert code == promised.code, output
    assert promised.says is None or found, f"no {promised.says!r} in the last lines of\n{output}"
    assert re.search(promised.shows, output), f"no {promised.shows!r} in\n{output}"
    assert not blames_a_victim(job, fault, says), output
    assert ("trained to the end" in output) == promised.goes_on
    assert (left, left_processes) == ([], set()), output
    assert seconds < limit(promised.seconds), output


def blames_a_victim(job: str, fault: str, says: str) -> bool:
    """True if one of the last lines names the rank that goes on, or would, as the one that failed."""
    if job in ("one-process", "run-parameter-server"):
        return False  # there is no other rank that runs the script
    victim = 1 if fault in ON_DISK else 0
    manner = r"(was (killed|stopped)|exited|at \S+ (has|does)|has (ended|failed)|shows no life)"
    return re.search(rf"[Rr]ank {victim} {manner}", says) is not None
