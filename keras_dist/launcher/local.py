"""Runs a command as several ranks, and again after a crash."""

from __future__ import annotations

import itertools
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keras_dist.backends import BACKENDS, load
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import Cluster
from keras_dist.launcher.job import Job, Restarts
from keras_dist.launcher.nodes import Node
from keras_dist.launcher.output import Console
from keras_dist.launcher.processes import Events, SentOn, StopRequest, on_signals, on_stop_signals

# The backends that can be launched here, in order of preference.
LAUNCHABLE = {name: entry.cluster for name, entry in BACKENDS.items() if entry.cluster is not None}
# Those whose processes are all ranks; the others are parameter servers and their workers.
WITH_RANKS = [name for name, cluster in LAUNCHABLE.items() if not load(cluster).only_chief_runs]


def without_dashes(target: Sequence[str]) -> Sequence[str]:
    """Returns what the user wants to run, without a `--` before it."""
    return target[1:] if target[:1] == ["--"] else target


def command_of(target: Sequence[str], python: str, *, is_module: bool) -> list[str]:
    """Returns the command that runs a script, a module or any other program, with its arguments."""
    if is_module:
        return [python, "-m", *target]
    return [python, *target] if target[0].endswith(".py") else [*target]


def make_cluster(backend: str, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> Cluster:
    """Returns a new cluster for the ranks of a backend.

    The backend `"auto"` is the first that can be launched, Horovod, which is the fastest. `size` is the number of ranks
    of this node; with parameter servers, the number of workers. `nodes` are all nodes of the job, this one first.
    """
    name = next(iter(LAUNCHABLE)) if backend == "auto" else backend
    if name not in LAUNCHABLE:
        one_process = f"This one is a single process: kd.init({name!r}) in the script, and `python train.py`. "
        raise ConfigurationError(
            "This backend can't be launched.", f"backend={backend!r}",
            f"{one_process if name in BACKENDS else ''}To launch several, use one of: auto, {', '.join(LAUNCHABLE)}.",
        )
    cluster: Cluster = load(LAUNCHABLE[name]).make(size, environ, nodes)
    return cluster


def launch(
    command: Sequence[str], new_cluster: Callable[[], Cluster], *, output: str, log_dir: Path | None,
    max_restarts: int, commit_seconds: float, console: Console | None = None, events: Events | None = None,
) -> int:  # fmt: skip
    """Runs a command as the ranks of a cluster until all have ended; for the main thread only.

    If a rank fails, the others are ended within 5 s, and the last line printed names the first cause.
    `new_cluster` returns the cluster of a start. `max_restarts` is how often all ranks are started again after a crash,
    as long as there are new commits. `events` gets what happens on other nodes, if there are some.

    Returns 0 if all ranks ended with 0; else the code of the rank that failed first, or 128 + the signal that killed
    it; 128 + the signal that stopped the launcher; 75 if the ranks were asked to stop and have committed.
    """
    console = Console() if console is None else console
    received: Events = queue.SimpleQueue() if events is None else events

    stop = on_stop_signals(lambda signum: received.put(StopRequest(signum)))
    pass_on = on_signals((signal.SIGUSR1, signal.SIGUSR2), lambda signum: received.put(SentOn(signum)))
    with stop, pass_on, Restarts(max_restarts, console) as restarts:
        for number in itertools.count():
            with new_cluster() as cluster:
                outcome = Job(cluster, console, received, commit_seconds).run(
                    command, restarts.variables, output=output, log_dir=log_dir, restart=number, folder=restarts.folder
                )
            if not restarts.starts_again(outcome):
                break
    return outcome.code
