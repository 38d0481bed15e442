"""Runs a command as several ranks on this machine: start, monitor, end, report."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from keras_dist.errors import ConfigurationError
from keras_dist.launch.cluster import LocalCluster, MultiWorkerCluster, ParameterServerCluster
from keras_dist.launch.failure import describe, describe_helper, exit_code, first_cause, lost_peer, signal_name
from keras_dist.launch.output import MODES, Console, RankOutput
from keras_dist.launch.processes import Asked, Ended, Events, RankProcess, signals_as_events

# The promise is that all have ended 5 s after the first failure: SETTLE + GRACE + the kill.
SETTLE_SECONDS = 1.5  # for the rank that is to blame to end, after one that only lost its peer has
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
SAVE_SECONDS = 5.0  # for scripts that save something when the user stops them
_HELPERS_SECONDS = 6.0  # for workers and servers to end by themselves, after their coordinator has
_KILL_SECONDS = 1.0
_DRAIN_SECONDS = 0.3
_POLL_SECONDS = 0.02


class Cluster(Protocol):
    """What the ranks of a backend need to find each other."""

    size: int  # of processes to start
    helps: bool  # True if all but rank 0 only help it: they may be lost, and end when it does

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the whole environment of one rank."""

    def close(self) -> None:
        """Frees what the cluster holds."""


# The one place to add a backend to the launcher, in order of preference.
CLUSTERS: dict[str, Callable[[int, Mapping[str, str]], Cluster]] = {
    "horovod": LocalCluster,
    "multi_worker": MultiWorkerCluster,
    "parameter_server": ParameterServerCluster,
}


def launch(
    command: Sequence[str],
    size: int,
    environ: Mapping[str, str],
    *,
    backend: str = "auto",
    servers: int = 1,
    output: str = "chief",
    log_dir: str | Path | None = None,
) -> int:
    """Runs a command as `size` ranks on this machine until all have ended; for the main thread only.

    If a rank fails, the others are ended within 5 s, and the last thing printed names the first cause.

    Args:
        command: The program and its arguments.
        size: Number of ranks; for parameter servers that of workers.
        environ: What the ranks inherit, usually `environment.current()`.
        backend: How the ranks talk to each other, `"horovod"`, `"multi_worker"`, or `"auto"`: Horovod, which is the
            faster one. With `"parameter_server"` rank 0 coordinates; the others help, and may be lost.
        servers: Number of parameter servers.
        output: `"chief"` shows the output of rank 0 only, `"all"` that of all, each line with its rank.
        log_dir: Folder for the whole output of each rank, if any.

    Returns:
        0 if all ranks ended with 0; else the code of the rank that failed first, or 128 + the signal that
        killed it; 128 + the signal that stopped the launcher.

    Raises:
        ConfigurationError: If an option has no meaning, or the backend is not installed.

    Example:

    >>> launch([sys.executable, "train.py"], 4, environment.current())
    0
    """
    console = Console()
    cluster = _make_cluster(backend, size, environ, servers)
    outputs: list[RankOutput] = []
    try:
        _check_output(output)
        folder = Path(log_dir) if log_dir is not None else None
        for rank in range(cluster.size):
            outputs.append(RankOutput(rank, output, folder, console))
        return _Job(outputs, console, cluster.helps).run([*command], cluster)
    finally:
        cluster.close()
        for rank_output in outputs:
            rank_output.close()


class _Job:
    """The ranks of one launch and what has become of them."""

    def __init__(self, outputs: Sequence[RankOutput], console: Console, helps: bool = False) -> None:
        self._outputs = outputs
        self._helps = helps
        self._console = console
        self._events: Events = queue.SimpleQueue()
        self._ranks: list[RankProcess] = []
        self._ended: list[Ended] = []

    def run(self, command: list[str], cluster: Cluster) -> int:
        with signals_as_events(self._events):
            asked = None
            try:
                self._start(command, cluster)
                asked = self._monitor()
                ended_by_themselves = [*self._ended]
            finally:
                killed = self._end(asked)
            return self._report(asked, ended_by_themselves, killed)

    def _start(self, command: list[str], cluster: Cluster) -> None:
        for rank, output in enumerate(self._outputs):
            process = RankProcess(rank, command, cluster.environment(rank), output, self._events)
            self._ranks.append(process)

    def _monitor(self) -> signal.Signals | None:
        """Waits until all ranks have ended, or the others must be; returns the signal that asked for it."""
        deadline = None
        while len(self._ended) < len(self._ranks):
            event = self._next_event(deadline)
            if event is None:
                break
            if isinstance(event, Asked):
                return event.signal
            if self._helps:
                if event.rank == 0:
                    deadline = time.monotonic() + _HELPERS_SECONDS
                elif event.code and deadline is None:
                    self._console.say(describe_helper(event, self._outputs))
                continue
            if event.code == 0:
                continue
            if not self._is_victim(event):
                break
            deadline = deadline or time.monotonic() + SETTLE_SECONDS
        return None

    def _end(self, asked: signal.Signals | None) -> list[int]:
        """Ends what still runs, ever less politely; returns the ranks that had to be killed."""
        steps = [] if asked is None else [(asked, SAVE_SECONDS)]
        if asked != signal.SIGTERM:
            steps.append((signal.SIGTERM, GRACE_SECONDS))
        for signum, seconds in steps:
            if self._wait_until_gone(signum, seconds):
                return []
        ended = {end.rank for end in self._ended}
        self._wait_until_gone(signal.SIGKILL, _KILL_SECONDS)
        return [process.rank for process in self._ranks if process.rank not in ended]

    def _wait_until_gone(self, signum: signal.Signals, seconds: float) -> bool:
        """Sends the signal to all that is left and waits; stops waiting if the user asks once more."""
        if self._all_gone():
            return True
        for process in self._ranks:
            process.send(signum)
        deadline = time.monotonic() + seconds
        while not self._all_gone():
            if time.monotonic() > deadline:
                return False
            if isinstance(self._next_event(time.monotonic() + _POLL_SECONDS), Asked):
                self._kill()
        return True

    def _kill(self) -> None:
        for process in self._ranks:
            process.send(signal.SIGKILL)

    def _all_gone(self) -> bool:
        return len(self._ended) == len(self._ranks) and all(process.is_gone() for process in self._ranks)

    def _next_event(self, deadline: float | None) -> Ended | Asked | None:
        """Returns what happens next, `None` at the deadline. Ends of ranks are noted."""
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            self._ended.append(event)
        return event

    def _is_victim(self, end: Ended) -> bool:
        """True if a rank failed only because another one was gone."""
        if end.code == -signal.SIGKILL:  # no rank does this to itself
            return False
        output = self._outputs[end.rank]
        output.drain(_DRAIN_SECONDS)
        return lost_peer(output.tail.text())

    def _report(self, asked: signal.Signals | None, ended: Sequence[Ended], killed: Sequence[int]) -> int:
        for output in self._outputs:
            output.drain(_DRAIN_SECONDS)
        if asked is not None:
            names = ", ".join(f"rank {rank}" for rank in killed)
            unwilling = f" Had to kill: {names}." if killed else ""
            self._console.say(f"keras-dist: stopped by {signal_name(asked)}.{unwilling}")
            return 128 + asked
        if self._helps:
            ended = [end for end in ended if end.rank == 0]
        cause = first_cause(ended, self._is_victim)
        if cause is None:
            return 0
        self._console.say(describe(cause, ended, self._outputs, len(self._ranks)))
        return exit_code(cause, ended)


def _make_cluster(backend: str, size: int, environ: Mapping[str, str], servers: int) -> Cluster:
    if backend == "auto":
        backend = next(iter(CLUSTERS))
    if backend not in CLUSTERS:
        raise ConfigurationError(
            "This backend can't be launched.", f"backend={backend!r}", f"Use one of: auto, {', '.join(CLUSTERS)}."
        )
    if backend == "parameter_server":
        return ParameterServerCluster(size, environ, servers)
    return CLUSTERS[backend](size, environ)


def _check_output(output: str) -> None:
    if output not in MODES:
        raise ConfigurationError(
            "Unknown kind of output.", f"output={output!r}", f"Use one of: {', '.join(MODES)}."
        )
