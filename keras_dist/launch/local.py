"""Runs a command as several ranks on this machine, and again after a crash."""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.backends import BACKENDS, load
from keras_dist.errors import ConfigurationError
from keras_dist.launch import descendants
from keras_dist.launch.cluster import Cluster
from keras_dist.launch.job import COMMIT_SECONDS, Job, Outcome
from keras_dist.launch.output import MODES, Console, RankOutput
from keras_dist.launch.processes import Events, SentOn, StopRequest, on_signals, on_stop_signals
from keras_dist.launch.restarts import Restarts

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

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
    command: Sequence[str],
    new_cluster: Callable[[], Cluster],
    *,
    output: str = "chief",
    log_dir: str | Path | None = None,
    max_restarts: int = 0,
    commit_seconds: float = COMMIT_SECONDS,
) -> int:
    """Runs a command as the ranks of a cluster until all have ended; for the main thread only.

    If a rank fails, the others are ended within 5 s, and the last line printed names the first cause.

    Args:
        command: The program and its arguments.
        new_cluster: Returns a cluster, which tells the ranks where they are. Each start gets a new one.
        output: `"chief"` shows the output of rank 0 only, `"all"` that of all ranks, each line with its rank.
        log_dir: Folder for the whole output of each rank, if any.
        max_restarts: How often all ranks are started again after a crash, as long as there are new commits.
        commit_seconds: How long ranks that handle SIGTERM may take to commit and end when they are asked to stop.

    Returns:
        0 if all ranks ended with 0; else the code of the rank that failed first, or 128 + the signal that
        killed it; 128 + the signal that stopped the launcher; 75 if the ranks were asked to stop and have committed.

    Raises:
        ConfigurationError: If an option is invalid.

    Example:

    >>> launch([sys.executable, "train.py"], lambda: make_cluster("auto", 4, environment.current()))
    0
    """
    if output not in MODES:
        raise ConfigurationError("Unknown kind of output.", f"output={output!r}", f"Use one of: {', '.join(MODES)}.")
    folder = Path(log_dir) if log_dir is not None else None
    shows_notes = environment.get(environment.TENSORFLOW_LOG_LEVEL) is not None
    console = Console()
    events: Events = queue.SimpleQueue()

    def start(number: int, restarts: Restarts) -> Outcome:
        with contextlib.ExitStack() as closing:
            cluster = closing.enter_context(new_cluster())
            outputs = []
            for rank in range(cluster.size):
                outputs.append(RankOutput(rank, output, folder, console, shows_notes, number))
                closing.callback(outputs[-1].close)
            closing.enter_context(descendants.ended(cluster.job, restarts.folder))
            return Job(cluster, outputs, console, events, commit_seconds).run(command, restarts.variables)

    stop = on_stop_signals(lambda signum: events.put(StopRequest(signum)))
    pass_on = on_signals(USER_SIGNALS, lambda signum: events.put(SentOn(signum)))
    with stop, pass_on, Restarts(max_restarts, console) as restarts:
        for number in itertools.count():
            outcome = start(number, restarts)
            if not restarts.starts_again(outcome):
                break
    return outcome.code
