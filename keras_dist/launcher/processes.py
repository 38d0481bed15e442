"""Processes in sessions of their own, so that they can be ended with everything that they started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from keras_dist.errors import Stopped
from keras_dist.launcher.die_with_parent import wrap
from keras_dist.launcher.output import RankOutput


def start_process(command: list[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, which dies with this process.

    Args:
        command: The program and its arguments.
        environ: Its whole environment.
        **options: Further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(wrap(command), env=dict(environ), start_new_session=True, **options)


def signal_session(process: subprocess.Popen[bytes], signum: int) -> None:
    """Sends a signal to a process and to everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank has ended.

    Args:
        rank: Index of the rank.
        code: Its exit code, or minus the number of the signal that killed it.
    """

    rank: int
    code: int


@dataclasses.dataclass(frozen=True)
class StopRequest:
    """A launcher received a signal to stop.

    Args:
        signal: The signal.
        node: The node of that launcher.
    """

    signal: signal.Signals
    node: int = 0


@dataclasses.dataclass(frozen=True)
class SentOn:
    """The launcher received a signal that is for the scripts."""

    signal: signal.Signals


# Its `put` is safe in a signal handler; that of `queue.Queue` isn't.
Events = queue.SimpleQueue[Ended | StopRequest | SentOn]


class RankProcess:
    """A running rank. When it ends, an event arrives.

    Args:
        rank: Index of the rank.
        command: The program and its arguments.
        environ: The whole environment of the rank.
        output: Where its output goes.
        events: Gets the event.
    """

    def __init__(
        self, rank: int, command: list[str], environ: Mapping[str, str], output: RankOutput, events: Events
    ) -> None:
        self.rank = rank
        self._process = start_process(
            command,
            environ,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=output.stdout,
            stderr=output.stderr,
            bufsize=0,
        )
        output.attach(self._process)
        threading.Thread(target=self._wait, args=(events,), name=f"keras_dist-wait-{rank}", daemon=True).start()

    def send(self, signum: int) -> None:
        """Sends a signal to the rank and to everything that it started."""
        signal_session(self._process, signum)

    def send_to_rank_only(self, signum: int) -> None:
        """Sends a signal to the rank. What it started may not handle the signal, and would end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signum)

    def handles(self, signum: int) -> bool:
        """True if the rank has a handler for a signal."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return False
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
        return bool(caught >> (signum - 1) & 1)

    def is_stopped(self) -> bool:
        """True if the rank was stopped, by SIGSTOP or a debugger, and does nothing."""
        return _state(Path(f"/proc/{self._process.pid}"))[:1] in (["T"], ["t"])

    def is_gone(self) -> bool:
        """True if nothing is left of the rank and of what it started. Call it only after the rank has ended."""
        self._process.wait()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return not _runs_in_group(self._process.pid)

    def _wait(self, events: Events) -> None:
        # WNOWAIT keeps the ended process in the process table: its number can't go to another program while we may
        # still send signals to its group. `is_gone` removes it.
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if result is None:  # only with WNOHANG; for the type checker
            return
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        events.put(Ended(self.rank, code))


def _runs_in_group(group: int) -> bool:
    """False if all processes of a group have ended, also if init, their new parent, has not removed them yet."""
    if sys.platform != "linux":
        return True
    for process in Path("/proc").glob("[0-9]*"):
        state, _, its_group = [*_state(process), "", "", "0"][:3]
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def _state(process: Path) -> list[str]:
    """Returns the state, parent and group of a process, and more; nothing if it has ended."""
    try:
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def interrupted_by_stop_signals() -> AbstractContextManager[None]:
    """Raises `Stopped` at a signal that asks this process to stop. For the main thread only."""

    def stop(signum: signal.Signals) -> NoReturn:
        raise Stopped(signum)

    return on_stop_signals(stop)


@contextlib.contextmanager
def on_stop_signals(handle: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Calls `handle` with each signal that asks this process to stop. For the main thread only."""
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide ends
    try:
        with on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), handle):
            yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


@contextlib.contextmanager
def on_signals(signals: Sequence[signal.Signals], handle: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Calls `handle` with each of these signals, but for ignored ones. For the main thread only."""

    def handler(signum: int, frame: object) -> None:
        handle(signal.Signals(signum))

    # `nohup`, and `&` in a shell script, let signals be ignored.
    caught = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handler) for signum in caught}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)
