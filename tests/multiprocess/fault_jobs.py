"""Runs a job in which a fault happens, started in one of several ways, and tells how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from keras_dist.environment import TF_CONFIG
from keras_dist.launcher.cluster import MultiWorkerCluster
from tests.fault_table import ANSWER_SECONDS, ON_DISK
from tests.leaks import is_known, marked
from tests.multiprocess.launches import HOROVODRUN, ROOT, RUN, SCRIPTS

SCRIPT = SCRIPTS / "fault.py"
MARK = "KERAS_DIST_FAULT"
STARTED_SECONDS = 90.0  # until the fault happens
ENDED_SECONDS = 45.0  # then the job hangs
_MOUNTED = ("full", "read-only")
_NOT_ENDED = -1
_MEMORY_BYTES = 64 << 20
_DISK = "size=1m"
_POLL_SECONDS = 0.02
_LINES = 40  # of an output are kept

_LAUNCHERS: dict[str, list[str]] = {
    "run-horovod": [*RUN, "-np", "2", "--backend", "horovod"],
    "run-multi-worker": [*RUN, "-np", "2", "--backend", "multi_worker"],
    "run-parameter-server": [*RUN, "--workers", "2", "--ps", "1"],
    "horovodrun": [str(HOROVODRUN), "-np", "2", sys.executable],
    "tf-config": [sys.executable],
    "one-process": [sys.executable],
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended; without a launcher code and words are those of a process to which nothing happened."""

    happened: bool  # False if it ended before the fault, or did not start
    seconds: float  # from the fault to the end of its last process
    code: int  # as a shell shows it
    says: list[str]  # the last lines that its user reads
    left: list[str]  # processes, temporary files
    stays: list[str]  # a process that nobody could end until it went on
    output: str  # everything, to understand a failure


def why_not(fault: str) -> str | None:
    """Returns why this machine can't let a fault happen, `None` if it can."""
    if fault in _MOUNTED and _mounter() is None:
        return "this user may not mount a small disk"
    if fault == "memory":
        try:
            with _memory_cgroup(f"probe-{os.getpid()}"):
                pass
        except OSError as error:
            return f"this user may not limit the memory of a process: {error}"
    return None


def run(job: str, fault: str, folder: Path) -> Outcome:
    """Runs a job, in which a fault happens."""
    for name in ("disk", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    mounter = _mounter() if fault in _MOUNTED else None
    if mounter is None:
        return _run_here(job, fault, folder)
    # In a mount namespace, which ends with its last process and takes the disk with it.
    mount = f'mount -t tmpfs -o {_DISK} tmpfs "$0" && exec "$@"'
    this = [sys.executable, "-m", "tests.multiprocess.fault_jobs", job, fault, str(folder)]
    done = subprocess.run(
        [*mounter, "sh", "-c", mount, str(folder / "disk"), *this],
        cwd=ROOT, capture_output=True, text=True, timeout=STARTED_SECONDS + 2 * ENDED_SECONDS,
    )  # fmt: skip
    return Outcome(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else _failed(done.stderr)


def _failed(output: str) -> Outcome:
    return Outcome(False, 0.0, 1, [], [], [], output)


@functools.cache
def _mounter() -> list[str] | None:
    """Returns what runs a command that may mount: as root, or in a user namespace."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0:
                return command
    return None


def _run_here(job: str, fault: str, folder: Path) -> Outcome:
    mark = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        if fault == "memory":
            (folder / "memory").write_text(str(stack.enter_context(_memory_cgroup(mark))))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill_all, mark, processes)
        environ = _environment(fault, folder, mark)
        processes.extend(_start(job, [str(SCRIPT), fault, str(folder)], environ, folder, stack))
        return _outcome(job, fault, processes, folder, mark)


def _environment(fault: str, folder: Path, mark: str) -> dict[str, str]:
    environ = {**os.environ, MARK: mark, "TMPDIR": str(folder / "tmp")}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    if fault == "stop":  # a rank that pauses is waited for, by default for longer
        limit = str(ANSWER_SECONDS)
        environ |= {"KERAS_DIST_ANSWER_TIMEOUT": limit, "HOROVOD_GLOO_TIMEOUT_SECONDS": limit}
    return environ


def _start(
    job: str, script: Sequence[str], environ: Mapping[str, str], folder: Path, stack: contextlib.ExitStack
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the launcher, or without one the two processes."""
    for index, own in enumerate(_tf_configs() if job == "tf-config" else [{}]):
        output = stack.enter_context((folder / f"output-{index}").open("wb"))
        process = subprocess.Popen(
            [*_LAUNCHERS[job], *script], env={**environ, **own}, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if index == 0:
            (folder / "launcher").write_text(str(process.pid))
        yield process


def _tf_configs() -> list[dict[str, str]]:
    with MultiWorkerCluster(2, {}) as cluster:
        return [{TF_CONFIG: cluster.environment(rank)[TF_CONFIG]} for rank in range(2)]


def _outcome(job: str, fault: str, processes: list[subprocess.Popen[bytes]], folder: Path, mark: str) -> Outcome:
    time_of_fault = folder / "failed"
    survivor = 1 if job == "tf-config" and fault in ON_DISK else 0
    stays = []
    _wait(lambda: time_of_fault.exists() or _all_ended(processes), STARTED_SECONDS)
    if fault == "stop" and job == "tf-config":
        # Nobody can end the process that is stopped. It ends as soon as it resumes.
        _wait(lambda: processes[survivor].poll() is not None, ENDED_SECONDS)
        ended = time.monotonic()
        stays = ["the stopped process, until it resumes"]
        processes[1].send_signal(signal.SIGCONT)
        _wait(lambda: _all_ended(processes) and not marked(MARK, mark), ENDED_SECONDS)
    else:
        _wait(lambda: _all_ended(processes) and not marked(MARK, mark), ENDED_SECONDS)
        ended = time.monotonic()
    left = [f"process {pid}" for pid in marked(MARK, mark)] + _temporary_files(folder)
    outputs = [(folder / f"output-{index}").read_text(errors="replace") for index in range(len(processes))]
    code = processes[survivor].poll()
    return Outcome(
        happened=time_of_fault.exists(),
        seconds=ended - float(time_of_fault.read_text()) if time_of_fault.exists() else 0.0,
        code=_NOT_ENDED if code is None else code if code >= 0 else 128 - code,
        says=outputs[survivor].strip().splitlines()[-_LINES:],
        left=left,
        stays=stays,
        output="\n".join(outputs),
    )


def _all_ended(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(process.poll() is not None for process in processes)


def _temporary_files(folder: Path) -> list[str]:
    left = [path for path in (folder / "tmp").rglob("*") if not is_known(path.relative_to(folder / "tmp"))]
    left += [path for path in (folder / "disk").rglob("*") if path.name != "filler" and not path.name[0].isdigit()]
    return [f"file {path.relative_to(folder)}" for path in left]


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _kill_all(mark: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what a job has left, so that a failure of one test is not one of the next."""
    deadline = time.monotonic() + 10
    while (pids := marked(MARK, mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    for process in processes:
        process.wait(10)


@contextlib.contextmanager
def _memory_cgroup(name: str) -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    group = root / ("memory" if is_v1 else "") / f"fault-{name}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(_MEMORY_BYTES))
        (group / ("memory.swappiness" if is_v1 else "memory.swap.max")).write_text("0")
        yield group
    finally:
        _wait(lambda: not (group / "cgroup.procs").read_text().strip(), 10)
        group.rmdir()


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_run_here(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
