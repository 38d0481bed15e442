"""Processes in sessions of their own, so that they can be ended with everything that they started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dist import environment
from keras_dist.errors import Stopped
from keras_dist.launcher import descendants
from keras_dist.launcher.descendants import state_and_group
from keras_dist.launcher.die_with_parent import wrap
from keras_dist.launcher.output import CHIEF, Console, RankOutput

LOOPBACK_DEVICE = "lo"


def start_process(command: list[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, which dies with this process. `options` are for `subprocess.Popen`."""
    return subprocess.Popen(wrap(command), env=dict(environ), start_new_session=True, **options)


def signal_session(process: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


@contextlib.contextmanager
def running(command: list[str], environ: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process as `start_process` does, and at the end of the context kills it with all that it has started."""
    process = start_process(command, environ, **options)
    try:
        yield process
    finally:
        signal_session(process, signal.SIGKILL)
        process.wait()


def output_of(
    command: list[str], environ: Mapping[str, str], seconds: float | None = None, **options: Any
) -> tuple[str, str]:
    """Returns what a program prints, and why it has failed, `""` if it has not."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=environ, timeout=seconds, stdin=subprocess.DEVNULL, check=False, **options)
    except subprocess.TimeoutExpired:
        return "", f"no result after {seconds:g} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    return done.stdout, f"exit code {done.returncode}" if done.returncode else ""


@dataclasses.dataclass(frozen=True)
class Ended:
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


# These variables of an outer launch do not apply to the new processes.
_FROM_OUTER_LAUNCH = (
    environment.INITIALIZED_BY, environment.SECRET, environment.STORE, environment.COMMITTED, environment.TF_CONFIG,
    "HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK",
)  # fmt: skip


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what ranks inherit, without what an outer launch has set."""
    return {name: value for name, value in environ.items() if name not in _FROM_OUTER_LAUNCH}


def rank_environment(environ: Mapping[str, str], interface: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of a rank of this machine, from the launcher's and the cluster's variables.

    The number of threads stays as it is: TensorFlow shares the cores among ranks well enough, and a limit set
    here would silently change the order of its sums, hence the numbers.
    """
    return {
        "PYTHONUNBUFFERED": "1",  # keeps what a rank printed before it was killed
        "NCCL_SOCKET_IFNAME": interface,
        **inherited(environ),
        **variables,
    }


@dataclasses.dataclass
class LocalRanks:
    """The ranks of this machine, in a job that this launcher or that of node 0 leads."""

    command: Sequence[str]
    environ: Mapping[str, str]  # what they inherit
    mode: str = CHIEF  # whose output is shown here
    log_dir: Path | None = None
    console: Console = dataclasses.field(default_factory=Console)
    events: Events = dataclasses.field(default_factory=queue.SimpleQueue)  # gets their ends
    interface: str = LOOPBACK_DEVICE
    title: str = ""  # of this node, for messages
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for these ranks only
    folder: Path | None = None  # temporary files, which are removed if this process is killed
    outputs: dict[int, RankOutput] = dataclasses.field(init=False, default_factory=dict)
    _processes: dict[int, subprocess.Popen[bytes]] = dataclasses.field(init=False, default_factory=dict)
    _guard: contextlib.ExitStack = dataclasses.field(init=False, default_factory=contextlib.ExitStack)

    def start(self, rank: int, variables: Mapping[str, str], restart: int) -> RankOutput:
        """Starts a rank, with `variables` added to its environment. `restart` says how often all were started before.

        For a thread that lives as long as the rank.
        """
        if not self._processes:
            self._guard.enter_context(descendants.ended(variables[descendants.JOB], self.folder))
        output = RankOutput(rank, self.mode, self.log_dir, self.console, restart, self.title)
        self.outputs[rank] = output
        environ = rank_environment(self.environ, self.interface, {**variables, **self.variables})
        stdin = None if rank == 0 else subprocess.DEVNULL
        process = start_process(
            [*self.command], environ, stdin=stdin, stdout=output.stdout, stderr=output.stderr, bufsize=0
        )
        self._processes[rank] = process
        output.attach(process)
        threading.Thread(target=self._wait, args=(rank, process), name=f"keras_dist-wait-{rank}", daemon=True).start()
        return output

    def send(self, signum: int) -> None:
        """Sends a signal to the ranks and all processes of their sessions."""
        for process in self._processes.values():
            signal_session(process, signum)

    def send_on(self, signum: int) -> bool:
        """Sends a signal to the ranks that handle it, and not to what they started. Returns false if none does."""
        is_handled = False
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # it has ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                caught = int(status.partition("SigCgt:")[2].split()[0], 16)
                if caught >> (signum - 1) & 1:
                    is_handled = True
                    os.kill(process.pid, signum)
        return is_handled

    def standing(self) -> list[int]:
        """Returns the ranks that were stopped, by SIGSTOP or a debugger, and do nothing."""
        return [rank for rank, process in self._processes.items() if state_and_group(str(process.pid))[0] in ("T", "t")]

    def all_gone(self) -> bool:
        """True if nothing is left of the ranks and of what they started. Call it only after the ranks have ended."""
        left = set()
        for process in self._processes.values():
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 0)
                left.add(str(process.pid))
        if not left:
            return True
        # What has ended may be left too, until init, its new parent, removes it.
        states = [state_and_group(process.name) for process in Path("/proc").glob("[0-9]*")]
        return not any(group in left and state not in "ZX" for state, group in states)

    def end_all(self) -> None:
        """Ends all that the ranks have started. Twice is the same as once."""
        self._guard.close()
        for output in self.outputs.values():
            output.close()
        self.outputs.clear()
        self._processes.clear()

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        # WNOWAIT keeps the ended process in the process table: its number can't go to another program while we may
        # still send signals to its group. `all_gone` removes it.
        result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if result is not None:  # it is only with WNOHANG; for the type checker
            self.events.put(Ended(rank, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status))


@contextlib.contextmanager
def on_stop_signals(
    handle: Callable[[signal.Signals], object] | None = None, also: Sequence[signal.Signals] = ()
) -> Iterator[None]:
    """Calls `handle`, or raises `Stopped`, at each signal that asks this process to stop, or of `also`.

    For the main thread only.
    """

    def handler(signum: int, frame: object) -> None:
        if handle is None:
            raise Stopped(signal.Signals(signum))
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
        names = {signum.value: signum.name for signum in signal.Signals}  # without the real-time signals
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    if code == environment.COMMITTED_EXIT_CODE:
        return f"was asked to stop (exit code {code})"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def quote(rank: int, outputs: Sequence[RankOutput]) -> list[str]:
    """Returns the last lines of a rank's output, unless the user has seen them."""
    output, seen = outputs[rank], [other.last_lines(_SAME_LINES) for other in outputs if other.is_shown]
    if output.is_shown or not output.tail or output.last_lines(_SAME_LINES) in seen:
        return []
    return [f"[{rank}] {line}".rstrip() for line in output.last_lines(_TAIL_LINES)]
