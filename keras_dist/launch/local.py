"""Runs a command as several ranks on this machine: start, monitor, end, report."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.backends import BACKENDS, load
from keras_dist.errors import ConfigurationError
from keras_dist.launch import descendants
from keras_dist.launch.cluster import Cluster
from keras_dist.launch.failure import describe, describe_helper, exit_code, first_cause, lost_peer, signal_name
from keras_dist.launch.output import MODES, Console, RankOutput
from keras_dist.launch.processes import Ended, Events, RankProcess, SentOn, StopRequest, on_signals, on_stop_signals

# The promise is that all ranks have ended 5 s after the first failure: SETTLE + GRACE + the kill.
SETTLE_SECONDS = 1.5  # for the rank that failed first to end, if one that lost its peer has ended before it
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
SAVE_SECONDS = 5.0  # for scripts that save something when the user stops them
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_HELPERS_SECONDS = 6.0  # for workers and servers to end by themselves after their coordinator
_KILL_SECONDS = 1.0
_DRAIN_SECONDS = 0.3
_POLL_SECONDS = 0.02

# The backends that can be launched here, in order of preference.
LAUNCHABLE = {name: entry.cluster for name, entry in BACKENDS.items() if entry.cluster is not None}


def make_cluster(backend: str, size: int, environ: Mapping[str, str]) -> Cluster:
    """Returns a new cluster for the ranks of a backend.

    Args:
        backend: Name of the backend; `"auto"` is the first that can be launched, Horovod, which is the fastest.
        size: Number of ranks; with parameter servers, number of workers.
        environ: What the ranks inherit, usually `environment.current()`.

    Raises:
        ConfigurationError: If the backend can't be launched, or is not installed.
    """
    name = next(iter(LAUNCHABLE)) if backend == "auto" else backend
    if name not in LAUNCHABLE:
        one_process = f"This one is a single process: kd.init({name!r}) in the script, and `python train.py`. "
        raise ConfigurationError(
            "This backend can't be launched.",
            f"backend={backend!r}",
            f"{one_process if name in BACKENDS else ''}To launch several, use one of: auto, {', '.join(LAUNCHABLE)}.",
        )
    cluster: Cluster = load(LAUNCHABLE[name])(size, environ)
    return cluster


def launch(
    command: Sequence[str], cluster: Cluster, *, output: str = "chief", log_dir: str | Path | None = None
) -> int:
    """Runs a command as the ranks of a cluster until all have ended; for the main thread only.

    If a rank fails, the others are ended within 5 s, and the last line printed names the first cause.

    Args:
        command: The program and its arguments.
        cluster: Tells the ranks where they are. It is closed at the end.
        output: `"chief"` shows the output of rank 0 only, `"all"` that of all ranks, each line with its rank.
        log_dir: Folder for the whole output of each rank, if any.

    Returns:
        0 if all ranks ended with 0; else the code of the rank that failed first, or 128 + the signal that
        killed it; 128 + the signal that stopped the launcher.

    Raises:
        ConfigurationError: If an option is invalid.

    Example:

    >>> launch([sys.executable, "train.py"], make_cluster("auto", 4, environment.current()))
    0
    """
    console = Console()
    outputs: list[RankOutput] = []
    try:
        if output not in MODES:
            known = ", ".join(MODES)
            raise ConfigurationError("Unknown kind of output.", f"output={output!r}", f"Use one of: {known}.")
        folder = Path(log_dir) if log_dir is not None else None
        shows_notes = environment.get(environment.TENSORFLOW_LOG_LEVEL) is not None
        for rank in range(cluster.size):
            outputs.append(RankOutput(rank, output, folder, console, shows_notes))
        with descendants.ended(cluster.job):
            return _Job(outputs, console, cluster).run([*command])
    finally:
        cluster.close()
        for rank_output in outputs:
            rank_output.close()


class _Job:
    """The ranks of one launch and how they ended."""

    def __init__(self, outputs: Sequence[RankOutput], console: Console, cluster: Cluster) -> None:
        self._outputs = outputs
        self._console = console
        self._cluster = cluster
        self._events: Events = queue.SimpleQueue()
        self._ranks: list[RankProcess] = []
        self._ended: list[Ended] = []
        self._stopped: list[Ended] = []  # ranks that did nothing when the job was ended

    def run(self, command: list[str]) -> int:
        stop = on_stop_signals(lambda signum: self._events.put(StopRequest(signum)))
        with stop, on_signals(USER_SIGNALS, lambda signum: self._events.put(SentOn(signum))):
            stopped_by = None
            try:
                for rank, output in enumerate(self._outputs):
                    environ = self._cluster.environment(rank)
                    self._ranks.append(RankProcess(rank, command, environ, output, self._events))
                stopped_by = self._monitor()
                ended_by_themselves = [*self._ended]
            finally:
                killed = self._end(stopped_by)
            return self._report(stopped_by, ended_by_themselves, killed)

    def _monitor(self) -> signal.Signals | None:
        """Waits until all ranks have ended or have to be ended; returns the signal that asked for it, if one did."""
        deadline = None
        while len(self._ended) < len(self._ranks):
            event = self._next_event(deadline)
            if event is None:
                break
            if isinstance(event, StopRequest):
                return event.signal
            if isinstance(event, SentOn):
                self._send_on(event.signal)
                continue
            if self._cluster.only_chief_runs:
                if event.rank == 0:
                    deadline = time.monotonic() + _HELPERS_SECONDS
                elif event.code and deadline is None:
                    self._console.print(describe_helper(event, self._outputs))
                continue
            if event.code == 0:
                continue
            if not self._lost_its_peer(event):
                break
            deadline = deadline or time.monotonic() + SETTLE_SECONDS
        return None

    def _send_on(self, signum: signal.Signals) -> None:
        """Sends a signal of the user's, or Slurm's `--signal`, to the ranks whose script handles it."""
        handling = [process for process in self._ranks if process.handles(signum)]
        for process in handling:
            process.send_to_rank_only(signum)
        if not handling:
            name = signal_name(signum)
            self._console.print(f"keras-dist: {name} was sent on to no rank: no script has a handler for it.")

    def _end(self, stopped_by: signal.Signals | None) -> list[int]:
        """Ends what still runs, by stronger and stronger signals; returns the ranks that had to be killed."""
        ended = {end.rank for end in self._ended}
        running = [process for process in self._ranks if process.rank not in ended]
        self._stopped = [Ended(process.rank, -signal.SIGSTOP) for process in running if process.is_stopped()]
        steps = [] if stopped_by is None else [(stopped_by, SAVE_SECONDS)]
        if stopped_by != signal.SIGTERM:
            steps.append((signal.SIGTERM, GRACE_SECONDS))
        for signum, seconds in steps:
            if self._wait_until_gone(signum, seconds):
                return []
        ended = {end.rank for end in self._ended}
        self._wait_until_gone(signal.SIGKILL, _KILL_SECONDS)
        return [process.rank for process in self._ranks if process.rank not in ended]

    def _wait_until_gone(self, signum: signal.Signals, seconds: float) -> bool:
        """Sends the signal to all ranks and waits for their end; kills them if the user asks to stop once more."""
        if self._all_gone():
            return True
        self._send(signum)
        deadline = time.monotonic() + seconds
        while not self._all_gone():
            if time.monotonic() > deadline:
                return False
            if isinstance(self._next_event(time.monotonic() + _POLL_SECONDS), StopRequest):
                self._send(signal.SIGKILL)
        return True

    def _send(self, signum: signal.Signals) -> None:
        for process in self._ranks:
            process.send(signum)

    def _all_gone(self) -> bool:
        return len(self._ended) == len(self._ranks) and all(process.is_gone() for process in self._ranks)

    def _next_event(self, deadline: float | None) -> Ended | StopRequest | SentOn | None:
        """Returns the next event, `None` at the deadline. Records the ends of ranks."""
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            self._ended.append(event)
        return event

    def _lost_its_peer(self, end: Ended) -> bool:
        """True if a rank failed only because another one had gone."""
        if end.code == -signal.SIGKILL:  # no rank does this to itself
            return False
        output = self._outputs[end.rank]
        output.drain(_DRAIN_SECONDS)
        return lost_peer(output.tail.text())

    def _report(self, stopped_by: signal.Signals | None, ended: Sequence[Ended], killed: Sequence[int]) -> int:
        for output in self._outputs:
            output.drain(_DRAIN_SECONDS)
        if stopped_by is not None:
            names = ", ".join(f"rank {rank}" for rank in killed)
            had_to_kill = f" Had to kill: {names}." if killed else ""
            self._console.print(f"keras-dist: stopped by {signal_name(stopped_by)}.{had_to_kill}")
            return 128 + stopped_by
        ended = [*ended, *self._stopped]
        if self._cluster.only_chief_runs:
            ended = [end for end in ended if end.rank == 0]
        cause = first_cause(ended, self._lost_its_peer)
        if cause is None:
            return 0
        self._console.print(describe(cause, ended, self._outputs, len(self._ranks)))
        return exit_code(cause, ended)
