"""The tasks of a cluster: their addresses, which of them are lost, how processes join, and their logs.

Workers and servers serve until the coordinator has gone; the coordinator connects.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from keras_dist import environment
from keras_dist.comm import watchdog
from keras_dist.comm.watchdog import answers, listens, only_for_its_network
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError, PeerLostError
from keras_dist.logging import announce

COORDINATOR, WORKER, SERVER = "chief", "worker", "ps"
_EXAMPLE = '{"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"], "ps": ["127.0.0.1:2224"]}'
# TensorFlow's words for a connection whose other end is gone or was replaced, or whose message was garbled.
_LOSS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_REPLACED = (
    "Unable to find a context_id", "unknown device", "remote_handle", "does not exist", "Primary device is not remote",
    "is neither a type of a primitive operation", "Client for target", "Unable to parse request",
)  # fmt: skip


def name_of(job: str, index: int) -> str:
    """Returns what messages call a task."""
    return f"{'server' if job == SERVER else job} {index}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of all tasks, `"host:port"` each."""

    coordinator: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]

    def jobs(self) -> dict[str, list[str]]:
        return {COORDINATOR: [self.coordinator], WORKER: [*self.workers], SERVER: [*self.servers]}

    def others(self) -> dict[str, str]:
        """Returns the addresses of all tasks but the coordinator, by name."""
        return {
            name_of(job, index): address
            for job, addresses in ((WORKER, self.workers), (SERVER, self.servers))
            for index, address in enumerate(addresses)
        }


def cluster_of(jobs: Mapping[str, Sequence[str]], received: str) -> Cluster:
    """Returns the cluster of a description as TensorFlow has it. `received` is where that comes from."""
    coordinator = jobs.get(COORDINATOR) or jobs.get("coordinator") or ()
    cluster = Cluster(next(iter(coordinator), ""), tuple(jobs.get(WORKER, ())), tuple(jobs.get(SERVER, ())))
    if len(coordinator) != 1 or not cluster.workers or not cluster.servers:
        found = ", ".join(f"{job}: {len(addresses)}" for job, addresses in jobs.items()) or "none"
        raise ConfigurationError(
            "Parameter servers need one 'chief' (the coordinator), at least one 'worker' and at least one 'ps'.",
            f"{found}, in {received}",
            f"For example {_EXAMPLE}",
        )
    return cluster


def read(path: str | os.PathLike[str]) -> Cluster:
    try:
        jobs = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "The file with the addresses of the cluster can't be read.",
            f"{os.fspath(path)} ({error})",
            f"`keras-dist run --workers 2 --ps 1 --serve` starts a cluster and writes it to cluster.json: {_EXAMPLE}",
        ) from error
    if not isinstance(jobs, dict) or not all(isinstance(addresses, list) for addresses in jobs.values()):
        raise ConfigurationError("The cluster must be a JSON object of lists.", os.fspath(path), f"Write {_EXAMPLE}")
    return cluster_of(jobs, os.fspath(path))


def may_be_loss(error: BaseException) -> bool:
    """True if an error may come from a process that was lost or replaced."""
    if isinstance(error, _LOSS):
        return True
    text = str(error)
    return isinstance(error, tf.errors.OpError) and any(sign in text for sign in _REPLACED)


def lost_server(cluster: Cluster) -> PeerLostError | None:
    """Returns the error that names a lost server, `None` if all are there."""
    for index, address in enumerate(cluster.servers):
        if not answers(address):
            how = "hangs, or is cut off" if listens(address) else "no longer answers"
        elif not tf_compat.is_connected(device(SERVER, index)):
            how = "was restarted, and holds nothing"
        else:
            continue
        return PeerLostError(
            "A parameter server is lost, and with it the variables that it held.",
            f"server {index} at {address} {how}",
            "Start all again: with keras.callbacks.BackupAndRestore training resumes from the last checkpoint.",
        )
    return None


def first_devices(workers: int) -> list[str]:
    """Returns the device of each worker that computes: its first GPU if it has one."""
    names = [found.name for found in tf.config.list_logical_devices()]
    gpus = [f"{device(WORKER, index)}/device:GPU:0" for index in range(workers)]
    return [gpu if gpu in names else gpu.replace("GPU", "CPU") for gpu in gpus]


def is_on_server(tensor: Any) -> bool:
    """True if a server holds a tensor, or computes it in the graph that is traced."""
    return f"/job:{SERVER}/" in str(tensor.device)


def worker_is_there(cluster: Cluster, index: int) -> bool:
    """True if a worker answers and is the process that was connected to. Asking one that hangs would hang too."""
    return answers(cluster.workers[index]) and tf_compat.is_connected(device(WORKER, index))


def device(job: str, index: int) -> str:
    """Returns TensorFlow's name of a task, which begins those of its devices."""
    return f"/job:{job}/replica:0/task:{index}"


HERE = device(COORDINATOR, 0) + "/device:CPU:0"

_TICK_SECONDS = 0.5
_LOOK_SECONDS = 0.1  # for the coordinator, which may be killed as soon as it has connected
_THREADS_OF_WORKER = 2
_UNANSWERED = 3  # tries in a row after which the coordinator counts as gone
_SERVERS: list[Any] = []  # they live as long as the process


def serve(cluster: Cluster, job: str, index: int, seconds: float) -> NoReturn:
    """Serves the coordinator, which has `seconds` to arrive, until it has gone. Then this process ends."""
    name, address = name_of(job, index), cluster.jobs()[job][index]
    _prepare_calls(cluster)
    # A step of each worker may wait here for the others: with fewer threads than workers all would wait for ever.
    threads = max(os.cpu_count() or 1, _THREADS_OF_WORKER * len(cluster.workers) + 1)
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0} if job == SERVER else None, inter_op_parallelism_threads=threads
    )
    spec = tf.train.ClusterSpec(cluster.jobs())
    try:
        # A coordinator that waits warns, but a standing cluster may wait for one without a limit.
        with only_for_its_network(address, warns=seconds == float("inf")):
            _SERVERS.append(tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config))
    except tf.errors.OpError as error:
        raise _cannot_listen(name, address, error) from error
    print(f"keras_dist: {name} serves {cluster.coordinator}", file=sys.stderr, flush=True)
    came = _wait_until_gone(cluster.coordinator, seconds)
    why = "has gone" if came else f"did not come within {seconds:g} s"
    print(f"keras_dist: {name} ends: the coordinator {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(0 if came else 1)  # TensorFlow's server can't be stopped, and the coordinator runs the rest of the script


def serve_task(path: str, job: str, index: str) -> NoReturn:
    """Serves the next coordinator of a standing cluster: the whole program of one of its processes."""
    keep_log(log_of(path, name_of(job, int(index))))
    serve(read(path), job, int(index), float("inf"))


def _cannot_listen(who: str, address: str, error: BaseException) -> ConfigurationError:
    return ConfigurationError(
        f"The {who} can't listen at its address.",
        f"{address} ({str(error).splitlines()[0]})",
        "Look for a process that still uses the port (an earlier run, another notebook on this cluster), or choose "
        "another port.",
    )


def _prepare_calls(cluster: Cluster) -> None:
    watchdog.bypass_proxies((cluster.coordinator, *cluster.others().values()))
    watchdog.let_calls_end()


def _wait_until_gone(address: str, seconds: float) -> bool:
    """Returns when the coordinator has gone; False if it never came."""
    deadline = time.monotonic() + seconds
    while not listens(address):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    unanswered = 0
    while unanswered < _UNANSWERED:
        time.sleep(_TICK_SECONDS)
        unanswered = 0 if listens(address) else unanswered + 1
    return True


def connect(cluster: Cluster, seconds: float) -> None:
    """Connects to all workers and servers, which have `seconds` to be there."""
    _prepare_calls(cluster)
    if listens(cluster.coordinator):
        raise _cannot_listen("coordinator", cluster.coordinator, OSError("another process listens there"))
    deadline = time.monotonic() + seconds
    missing = cluster.others()
    while missing := _silent(missing):
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"Not all workers and servers have come within {seconds:g} s.",
                f"missing: {_listed(missing)}",
                "Look at the output of the missing ones, check the addresses, and the firewalls between the hosts, or "
                f"set {environment.JOIN_TIMEOUT} (seconds) if they only need longer.",
            )
        time.sleep(_TICK_SECONDS)

    def join() -> None:
        spec = tf.train.ClusterSpec(cluster.jobs())
        tf.config.experimental_connect_to_cluster(spec, job_name=COORDINATOR, task_index=0, protocol="grpc")
        tf.config.list_logical_devices()  # TensorFlow connects when it is first asked for something

    def check() -> None:  # TensorFlow would wait for ever for a process that ends meanwhile, or hangs
        missing = _silent(cluster.others())
        if any(not listens(address) for address in missing.values()) or (missing and time.monotonic() > deadline):
            raise _have_gone(missing)

    try:
        with only_for_its_network(cluster.coordinator, warns=True):
            watchdog.call_in_thread(join, check)
    except tf.errors.OpError as error:
        if missing := _silent(cluster.others()):
            raise _have_gone(missing) from error
        raise _cannot_listen("coordinator", cluster.coordinator, error) from error


def _silent(tasks: Mapping[str, str]) -> dict[str, str]:
    return {name: address for name, address in tasks.items() if not answers(address)}


def _listed(tasks: Mapping[str, str]) -> str:
    return ", ".join(f"{name} at {address}" for name, address in tasks.items())


def _have_gone(missing: Mapping[str, str]) -> PeerLostError:
    return PeerLostError(
        "A worker or server was lost while the coordinator connected.",
        _listed(missing),
        "Look at its output, and start all again.",
    )


# --- The logs of a standing cluster: each process keeps its own; the coordinator, usually a notebook, shows them ---

_READ_SECONDS = 0.2
_END_SECONDS = 2.0
_STDOUT, _STDERR = 1, 2


def log_of(path: str, name: str) -> Path:
    """Returns the log of a process, beside the file with the addresses of its cluster."""
    return Path(path).resolve().with_suffix(f".{name.replace(' ', '-')}.log")


def keep_log(log: Path) -> None:
    """Copies what this process prints to its log, by another process, so that its last words are not lost."""
    with contextlib.suppress(OSError):  # there is no `tee`, or the log belongs to somebody else
        log.unlink(missing_ok=True)  # not emptied: readers must see that it was replaced
        tee = subprocess.Popen(["tee", log], stdin=subprocess.PIPE, stdout=_STDERR)
        if tee.stdin is not None:  # for the type checker
            for descriptor in (_STDOUT, _STDERR):
                os.dup2(tee.stdin.fileno(), descriptor)
            tee.stdin.close()


def show_logs(path: str, tasks: Mapping[str, str]) -> None:
    """Shows from now on what the processes of a cluster print, if their logs are here. `tasks`: addresses by name."""
    logs, elsewhere = [], []
    for name, address in tasks.items():
        try:
            logs.append(Log(name, log_of(path, name)))
        except OSError:
            elsewhere.append(f"{log_of(path, name).name} on {address.rpartition(':')[0]}")
    if elsewhere:
        announce(f"keras_dist: these logs are not on this machine, so they are not shown: {', '.join(elsewhere)}")
    has_ended = threading.Event()

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = has_ended.wait(_READ_SECONDS)
            if lines := [line for log in logs for line in log.new_lines()]:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    sys.stderr.write("".join(lines))
                    sys.stderr.flush()

    thread = threading.Thread(target=follow, name="keras_dist-logs", daemon=True)
    thread.start()

    @atexit.register
    def end() -> None:
        has_ended.set()
        thread.join(_END_SECONDS)


class Log:
    """The lines added to a log from now on, also by the process that takes this one's place."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def new_lines(self) -> list[str]:
        successor = None
        with contextlib.suppress(OSError):  # there is none at this moment
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                successor = self._path.open("rb")
        text = self._rest + self._file.read()
        if successor is not None:
            self._file.close()
            self._file = successor
            if text and not text.endswith(b"\n"):
                text += b"\n"
            text += successor.read()
        *lines, self._rest = text.split(b"\n")
        return [f"[{self._name}] {line.decode(errors='replace')}\n" for line in lines]
