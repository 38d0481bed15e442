"""Processes in sessions of their own, so that they can be ended with everything that they started."""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from keras_dist import environment
from keras_dist.errors import Stopped
from keras_dist.launcher import descendants
from keras_dist.launcher.descendants import state_and_group
from keras_dist.launcher.output import CHIEF, Console, RankOutput

LOOPBACK_DEVICE = "lo"


# Becomes a command that the kernel kills as soon as its parent has ended: a parent killed by SIGKILL can't end it. A
# `preexec_fn` could ask the kernel too, but runs Python between fork and exec, where a lock that another thread of the
# parent holds is never released. This costs about 20 ms instead, in all ranks at the same time.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which survives `exec`
if os.getppid() != parent:  # the parent ended before
    sys.exit(128 + signal.SIGKILL)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"keras-dist: can't run {command[0]!r}: {error.strerror}")
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Returns the command that runs `command` as a child that dies with the thread that starts it."""
    # With -I and -S the user's PYTHON* variables and site-packages are for the command only.
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def start_process(command: Sequence[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, which dies with this process. `options` are for `subprocess.Popen`."""
    return subprocess.Popen(dying_with_parent(command), env=dict(environ), start_new_session=True, **options)


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
    """Returns what a program prints, and why it failed (`""` if it did not)."""
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


# The variables of an outer launch do not apply to the new processes.
_FROM_OUTER_LAUNCH = (
    environment.INITIALIZED_BY, environment.SECRET, environment.STORE, environment.COMMITTED, environment.TF_CONFIG,
    "HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK",
)  # fmt: skip


# Lets malloc ask for pages of 2 MB, which Linux often gives on request only. In a virtual machine steps of two ranks
# took 1 to 8 % less time, and 1 to 2 % more memory.
LARGE_PAGES = "glibc.malloc.hugetlb=1"


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what ranks inherit, without the variables of an outer launch."""
    return {name: value for name, value in environ.items() if name not in _FROM_OUTER_LAUNCH}


def rank_environment(environ: Mapping[str, str], interface: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of a rank of this machine, from the launcher's and the cluster's variables.

    The number of threads stays as it is: TensorFlow shares the cores among ranks well enough, and a limit set
    here would silently change the order of its sums, hence the numbers.
    """
    return {
        environment.GLIBC_TUNABLES: LARGE_PAGES,
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
        """Starts a rank, with `variables` in its environment. For a thread that lives as long as the rank."""
        if not self._processes:
            self._guard.enter_context(descendants.ended(variables[descendants.JOB], self.folder))
        output = RankOutput(rank, self.mode, self.log_dir, self.console, restart, self.title)
        self.outputs[rank] = output
        environ = rank_environment(self.environ, self.interface, {**variables, **self.variables})
        streams = {"stdin": None if rank == 0 else subprocess.DEVNULL, "stdout": output.stdout, "stderr": output.stderr}
        process = self._processes[rank] = start_process(self.command, environ, bufsize=0, **streams)
        output.attach(process)
        threading.Thread(target=self._wait, args=(rank, process), name=f"keras_dist-wait-{rank}", daemon=True).start()
        return output

    def send(self, signum: int) -> None:
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
        """Ends all that the ranks have started. Calling it twice is harmless."""
        self._guard.close()
        for output in self.outputs.values():
            output.close()
        self.outputs.clear()
        self._processes.clear()

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        # WNOWAIT keeps the ended process in the process table: its number can't go to another program while we may
        # still send signals to its group. `all_gone` removes it.
        result = cast(os.waitid_result, os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
        self.events.put(Ended(rank, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status))


@contextlib.contextmanager
def on_stop_signals(
    handle: Callable[[signal.Signals], object] | None = None, also: Sequence[signal.Signals] = ()
) -> Iterator[None]:
    """Calls `handle`, or raises `Stopped`, at each signal to stop or of `also`. For the main thread only."""

    def handler(signum: int, frame: object) -> None:
        if handle is None:
            raise Stopped(signal.Signals(signum))
        handle(signal.Signals(signum))

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *also)
    # `nohup`, and `&` in a shell script, make a process ignore signals.
    caught = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}  # ignored, it would hide ends
    previous |= {signum: signal.signal(signum, handler) for signum in caught}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)
