"""One rank as a process, in a session of its own, so that it can be ended with everything that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_dist.launch.die_with_parent import wrap
from keras_dist.launch.output import RankOutput


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank has ended.

    Args:
        rank: Which one.
        code: Its exit code, or minus the number of the signal that killed it.
        at: When, on the monotonic clock.
    """

    rank: int
    code: int
    at: float


@dataclasses.dataclass(frozen=True)
class Asked:
    """The launcher was asked to stop.

    Args:
        signal: By which signal.
    """

    signal: signal.Signals


# Its `put` is safe in a signal handler, which `queue.Queue`'s isn't.
Events = queue.SimpleQueue[Ended | Asked]


class RankProcess:
    """A rank that runs; its end arrives as an event.

    Args:
        rank: Index of the rank.
        command: The program and its arguments.
        environ: The whole environment of the rank.
        output: Where its output goes.
        events: Where its end is announced.
    """

    def __init__(
        self, rank: int, command: list[str], environ: Mapping[str, str], output: RankOutput, events: Events
    ) -> None:
        self.rank = rank
        self.output = output
        self._popen = subprocess.Popen(
            wrap(command),
            env=dict(environ),
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=output.stdout,
            stderr=output.stderr,
            bufsize=0,
            start_new_session=True,
        )
        output.attach(self._popen)
        threading.Thread(target=self._wait, args=(events,), name=f"keras_dist-wait-{rank}", daemon=True).start()

    def send(self, signum: int) -> None:
        """Sends a signal to the rank and to all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signum)

    def is_gone(self) -> bool:
        """True if nothing is left of the rank and of what it started. Call it only after the rank's end."""
        self._popen.wait()
        try:
            os.killpg(self._popen.pid, 0)
        except ProcessLookupError:
            return True
        return not _runs_in_group(self._popen.pid)

    def _wait(self, events: Events) -> None:
        # WNOWAIT leaves the ended process in the table, so that its number can't go to another program while
        # we may still send signals to its group; `is_gone` removes it.
        result = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        if result is None:  # only with WNOHANG; for the type checker
            return
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        events.put(Ended(self.rank, code, time.monotonic()))


def _runs_in_group(group: int) -> bool:
    """False if the processes of a group have all ended, though init, whose they are now, lets them lie."""
    if sys.platform != "linux":
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


@contextlib.contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    """Turns the signals that ask the launcher to stop into events. For the main thread only."""

    def announce(signum: int, frame: object) -> None:
        events.put(Asked(signal.Signals(signum)))

    previous = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}  # ignored, it would hide ends
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # `nohup` and `&` in a shell script ask for this
            previous[signum] = signal.signal(signum, announce)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
