"""Ends everything that the ranks of a job have started, also after `kill -9` of the launcher.

    python descendants.py JOB [FOLDER]

Processes of a job inherit a variable that names it, also those in a session of their own, which no signal to the
rank's session reaches. A launcher that is killed by SIGKILL can't end them, so it starts this tiny program before the
ranks: it waits until its input ends, which only the launcher holds open, ends what is left, and removes the launcher's
temporary files, if there are any. A process that has cleared its environment is not found.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

JOB = "KERAS_DIST_JOB"
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
_GONE_SECONDS = 5.0  # for the kernel, after SIGKILL


def of_job(job: str) -> list[int]:
    """Returns the processes that run and have inherited the name of a job, but for this one."""
    mark, found = f"{JOB}={job}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            is_marked = mark in (process / "environ").read_bytes().split(b"\0")
            if is_marked and int(process.name) != os.getpid() and state_and_group(process.name)[0] not in "ZX":
                found.append(int(process.name))
    return found


def state_and_group(pid: str) -> tuple[str, str]:
    """Returns the state and the group of a process; empty if it has ended."""
    try:
        state, _, group, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", ""
    return state, group


def end(job: str) -> None:
    """Ends all processes of a job: SIGTERM, then SIGKILL, until none is left."""
    now = time.monotonic()
    kill_at, give_up_at = now + _GRACE_SECONDS, now + _GRACE_SECONDS + _GONE_SECONDS
    asked = set[int]()
    while (pids := of_job(job)) and time.monotonic() < give_up_at:
        for pid in pids:
            is_late = time.monotonic() > kill_at
            if is_late or pid not in asked:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked.update(pids)
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def ended(job: str, folder: Path | None = None) -> Iterator[None]:
    """Ends all processes of a job at the end of this context, or when this process is killed; then removes `folder`."""
    # With -I and -S the program ignores the user's PYTHON* variables and site-packages.
    command = [sys.executable, "-I", "-S", __file__, job, *([] if folder is None else [str(folder)])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as guard:
        try:
            yield
        finally:
            end(job)
            guard.kill()


if __name__ == "__main__":
    sys.stdin.read()  # until the launcher has ended
    end(sys.argv[1])
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)
