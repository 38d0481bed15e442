"""Processes in sessions of their own, so that they can be ended with everything that they started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from keras_dist.environment import COMMITTED_EXIT_CODE
from keras_dist.errors import Stopped
from keras_dist.launcher.die_with_parent import wrap
from keras_dist.launcher.output import RankOutput


def start_process(command: list[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, which dies with this process. `options` are for `subprocess.Popen`."""
    return subprocess.Popen(wrap(command), env=dict(environ), start_new_session=True, **options)


def signal_session(process: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank has ended."""

    rank: int
    code: int  # the exit code, or minus the number of the signal that killed it


SENT_ON = (signal.SIGUSR1, signal.SIGUSR2)  # the user's, or Slurm's `--signal`: for the scripts


@dataclasses.dataclass(frozen=True)
class Received:
    """A launcher received a signal: of `SENT_ON`, or to stop."""

    signal: signal.Signals
    node: int = 0  # of that launcher


# Its `put` is safe in a signal handler; that of `queue.Queue` isn't.
Events = queue.SimpleQueue[Ended | Received]


class RankProcess:
    """A running rank, with `environ` as its whole environment. When it ends, an event arrives."""

    def __init__(
        self, rank: int, command: list[str], environ: Mapping[str, str], output: RankOutput, events: Events
    ) -> None:
        self.rank, self.output = rank, output
        stdin = None if rank == 0 else subprocess.DEVNULL
        self._process = start_process(
            command, environ, stdin=stdin, stdout=output.stdout, stderr=output.stderr, bufsize=0
        )
        output.attach(self._process)
        threading.Thread(target=self._wait, args=(events,), name=f"keras_dist-wait-{rank}", daemon=True).start()

    def send(self, signum: int) -> None:
        signal_session(self._process, signum)

    def send_to_rank_only(self, signum: int) -> None:
        """Sends a signal to the rank. What it started may not handle the signal, and would end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signum)

    def handles(self, signum: int) -> bool:
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return False
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
        return bool(caught >> (signum - 1) & 1)

    def is_stopped(self) -> bool:
        """True if the rank was stopped, by SIGSTOP or a debugger, and does nothing."""
        return _stat(Path(f"/proc/{self._process.pid}"))[0] in ("T", "t")

    def is_gone(self) -> bool:
        """True if nothing is left of the rank and of what it started. Call it only after the rank has ended."""
        group = self._process.pid
        self._process.wait()
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        # What has ended may be left too, until init, its new parent, removes it.
        states = [state for state, its_group in map(_stat, Path("/proc").glob("[0-9]*")) if its_group == str(group)]
        return sys.platform == "linux" and not {*states} - {"Z", "X"}

    def _wait(self, events: Events) -> None:
        # WNOWAIT keeps the ended process in the process table: its number can't go to another program while we may
        # still send signals to its group. `is_gone` removes it.
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if result is not None:  # it is only with WNOHANG; for the type checker
            events.put(Ended(self.rank, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status))


def _stat(process: Path) -> tuple[str, str]:
    """Returns the state and the group of a process; empty if it has ended."""
    try:
        state, _, group, *_ = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", ""
    return state, group


def interrupted_by_stop_signals() -> AbstractContextManager[None]:
    """Raises `Stopped` at a signal that asks this process to stop. For the main thread only."""

    def stop(signum: signal.Signals) -> NoReturn:
        raise Stopped(signum)

    return on_stop_signals(stop)


@contextlib.contextmanager
def on_stop_signals(
    handle: Callable[[signal.Signals], object], also: Sequence[signal.Signals] = ()
) -> Iterator[None]:
    """Calls `handle` with each signal that asks this process to stop, or of `also`. For the main thread only."""

    def handler(signum: int, frame: object) -> None:
        handle(signal.Signals(signum))

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *also)
    # `nohup`, and `&` in a shell script, let signals be ignored.
    caught = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}  # ignored, it would hide ends
    previous |= {signum: signal.signal(signum, handler) for signum in caught}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


# What a rank prints that fails only because another one has gone.
_LOST_PEER = (
    "PeerLostError",
    "Horovod has been shut down",
    "HorovodInternalError",
    "Collective ops is aborted by",
    "gloo/transport/",  # marks Gloo's connection errors; those of the script prove nothing
)
_NAMES_FAILED = re.compile(r"PeerLostError: Rank (\d+) has failed")
_TAIL_LINES = 40
_SAME_LINES = 3  # at the end of two outputs: they tell the same error


def lost_peer(text: str) -> bool:
    """True if the output of a rank shows that another rank failed first."""
    return any(mark in text for mark in _LOST_PEER)


def named_failed(text: str) -> int | None:
    """Returns the rank that the output of another one names as the one that failed, if it names one."""
    found = _NAMES_FAILED.search(text)
    return int(found[1]) if found else None


def first_cause(
    ended: Sequence[Ended], lost_its_peer: Callable[[Ended], bool], named_failed: Callable[[Ended], int | None]
) -> Ended | None:
    """Returns the end that made all others fail, `None` if none failed.

    That is the first rank that failed by itself; else the one that another rank names; else, if some rank lost its
    peer, the first one that left with code 0; else the first one that failed. `ended` has the ends of the ranks, in
    order, without those caused by the launcher.
    """
    failed = [end for end in ended if end.code != 0]
    if not failed:
        return None
    failed_by_themselves = [end for end in failed if not lost_its_peer(end)]
    # Such a rank has raised. If it was still ending, which takes a busy machine seconds, its code is Python's 1.
    known = {end.rank: end for end in ended}
    named = [known.get(rank, Ended(rank, 1)) for end in failed if (rank := named_failed(end)) is not None]
    left_early = [end for end in ended if end.code == 0]
    return (failed_by_themselves or named or left_early or failed)[0]


def exit_code(cause: Ended, ended: Sequence[Ended]) -> int:
    """Returns the exit code of the launcher, as a shell would give it, never 0."""
    code = cause.code or next(end.code for end in ended if end.code != 0)
    return code if code > 0 else 128 - code


def describe(cause: Ended, ended: Sequence[Ended], outputs: Sequence[RankOutput]) -> str:
    """Returns the message about the cause. Its last line names the rank, after output that was not shown yet."""
    # The output of a rank that left early shows nothing; a rank that lost it shows in which call.
    quoted_rank = cause.rank if cause.code else next(end.rank for end in ended if end.code != 0)
    who, *where = sentences_about(cause, outputs[cause.rank])
    sentences = [f"keras-dist: {who}", *(["All ranks have ended."] if len(outputs) > 1 else []), *where]
    return "\n".join([*quote(quoted_rank, outputs), " ".join(sentences)])


def sentences_about(end: Ended, output: RankOutput) -> list[str]:
    sentences = [f"rank {end.rank}{output.place} {output.fate or manner(end.code)}."]
    if output.log is not None and output.log_error:
        sentences.append(f"The beginning of its output: {output.log} ({output.log_error})")
    elif output.log is not None:
        sentences.append(f"Its whole output: {output.log}")
    return sentences


def manner(code: int) -> str:
    """Returns how a rank has ended, for a sentence."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (if not by you, then by the kernel, out of memory: see `dmesg`)"
    if code == -signal.SIGSTOP:
        return "was stopped (SIGSTOP, or a debugger), so the other ranks got no answer from it"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code == COMMITTED_EXIT_CODE:
        return f"was asked to stop (exit code {code})"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def quote(rank: int, outputs: Sequence[RankOutput]) -> list[str]:
    """Returns the last lines of a rank's output, unless the user has seen them."""
    output, seen = outputs[rank], [other.tail.lines(_SAME_LINES) for other in outputs if other.is_shown]
    if output.is_shown or not output.tail.text() or output.tail.lines(_SAME_LINES) in seen:
        return []
    return [f"[{rank}] {line}".rstrip() for line in output.tail.lines(_TAIL_LINES)]


def signal_name(number: int) -> str:
    """Returns a name also for signals that have none in Python, as real-time signals."""
    known = {signum.value: signum.name for signum in signal.Signals}
    return known.get(number, f"signal {number}")
