"""The processes of parameter-server training: who they are, how they find each other, and when they end."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from keras_dist import environment
from keras_dist.comm.connections import (
    answers,
    bypass_proxies,
    call_in_thread,
    let_calls_end,
    listening_sockets,
    listens,
)
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError, PeerLostError
from keras_dist.logging import logger

COORDINATOR, WORKER, SERVER = "chief", "worker", "ps"
NAMES = {COORDINATOR: "coordinator", WORKER: "worker", SERVER: "server"}
_TICK_SECONDS = 0.5
_LOOK_SECONDS = 0.1  # for the coordinator, which may be killed as soon as it has come
_THREADS_OF_WORKER = 2
_UNANSWERED = 3  # so often in a row, and the coordinator has gone
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_LOOPBACK_DEVICE = b"lo"
_EXAMPLE = '{"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"], "ps": ["127.0.0.1:2224"]}'


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of all tasks, `"host:port"` each.

    Args:
        coordinator: Of the process that runs the script.
        workers: Of the processes that compute.
        servers: Of the processes that hold the variables.
    """

    coordinator: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]

    def jobs(self) -> dict[str, list[str]]:
        """Returns the cluster as TensorFlow knows it."""
        return {COORDINATOR: [self.coordinator], WORKER: [*self.workers], SERVER: [*self.servers]}

    def others(self) -> dict[str, str]:
        """Returns the addresses of all but the coordinator, by what they are."""
        return {
            **{f"worker {index}": address for index, address in enumerate(self.workers)},
            **{f"server {index}": address for index, address in enumerate(self.servers)},
        }


def cluster_of(jobs: Mapping[str, Sequence[str]], received: str) -> Cluster:
    """Returns the cluster that a description in TensorFlow's words means.

    Args:
        jobs: Addresses by job: `"chief"` (or `"coordinator"`), `"worker"` and `"ps"`.
        received: Where it comes from, for the message.

    Raises:
        ConfigurationError: If a job is missing.
    """
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
    """Reads a cluster's addresses from a JSON file.

    Raises:
        ConfigurationError: If there is no such file, or it isn't one.
    """
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


# --- A worker or a server ---


def serve(cluster: Cluster, job: str, index: int, seconds: float) -> NoReturn:
    """Serves the coordinator until it has gone, then ends this process, with exit code 0.

    Args:
        cluster: The addresses of all.
        job: `"worker"` or `"ps"`.
        index: Which one.
        seconds: How long the coordinator may take to arrive.
    """
    _start(cluster, job, index)
    say(f"{NAMES[job]} {index} serves {cluster.coordinator}")
    came = _wait_while_there(cluster.coordinator, seconds)
    say(f"{NAMES[job]} {index} ends: the coordinator {'has gone' if came else f'did not come within {seconds:g} s'}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if came else 1)  # TensorFlow's server can't be stopped, and the rest of the script isn't for this role


def serve_task(path: str, job: str, index: str) -> NoReturn:
    """Serves the next coordinator of a standing cluster: the whole program of one of its processes."""
    serve(read(path), job, int(index), float("inf"))


def say(text: str) -> None:
    """Tells whoever started this process, in the manner of `kd.init()`."""
    print(f"keras_dist: {text}", file=sys.stderr, flush=True)


def _start(cluster: Cluster, job: str, index: int) -> None:
    address = cluster.jobs()[job][index]
    _prepare_calls(cluster)
    # A step of each worker may wait here for others: with fewer threads than workers nobody would go on.
    threads = max(os.cpu_count() or 1, _THREADS_OF_WORKER * len(cluster.workers) + 1)
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0} if job == SERVER else None, inter_op_parallelism_threads=threads
    )
    before = listening_sockets()
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.jobs()), job_name=job, task_index=index, protocol="grpc", config=config
        )
    except tf.errors.OpError as error:
        raise cannot_listen(f"{NAMES[job]} {index}", address, error) from error
    _SERVERS.append(server)  # it lives as long as the process
    restrict(before, address)


_SERVERS: list[Any] = []


def cannot_listen(who: str, address: str, error: BaseException) -> ConfigurationError:
    """Returns the error of a task whose port is taken."""
    return ConfigurationError(
        f"The {who} can't listen at its address.",
        f"{address} ({str(error).splitlines()[0]})",
        "Look for a process that still has the port (an earlier run, another notebook on this cluster), or name "
        "another one.",
    )


def _prepare_calls(cluster: Cluster) -> None:
    bypass_proxies((cluster.coordinator, *cluster.others().values()))
    let_calls_end()


def _wait_while_there(address: str, seconds: float) -> bool:
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


# --- Who may connect ---


def restrict(before: set[int], address: str) -> None:
    """Lets only this machine connect to TensorFlow's server, if its address is one of the loopback interface.

    TensorFlow listens on all interfaces, whatever the address says, and asks nobody for a password.

    Args:
        before: The listening sockets of this process before TensorFlow's.
        address: Of this task.
    """
    host = address.rpartition(":")[0]
    if host not in _LOOPBACK_HOSTS:
        logger().warning(
            "TensorFlow's server listens at port %s on all interfaces, without authentication: whoever reaches it can "
            "run anything here. Let only the cluster reach it (a firewall, a Kubernetes NetworkPolicy).",
            address.rpartition(":")[2],
        )
        return
    for descriptor in listening_sockets() - before:
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
            except (OSError, AttributeError) as error:  # Linux before 5.7, or another system
                logger().warning("TensorFlow's server listens on all interfaces, and can't be restricted: %s", error)


# --- The coordinator ---


def connect(cluster: Cluster, seconds: float) -> None:
    """Joins all workers and servers, as soon as they are there.

    Args:
        cluster: The addresses of all.
        seconds: How long they may take.

    Raises:
        PeerLostError: If some don't listen in time; names them.
        ConfigurationError: If the coordinator's own address is taken.
    """
    _prepare_calls(cluster)
    before = listening_sockets()
    if listens(cluster.coordinator):
        raise cannot_listen("coordinator", cluster.coordinator, OSError("somebody listens there already"))
    deadline = time.monotonic() + seconds
    missing = cluster.others()
    while missing := _silent(missing):
        if time.monotonic() > deadline:
            raise _have_not_come(missing, seconds)
        time.sleep(_TICK_SECONDS)
    try:
        _connect_while_all_are_there(cluster, deadline)
    except tf.errors.OpError as error:
        if missing := _silent(cluster.others()):
            raise _have_gone(missing) from error
        raise cannot_listen("coordinator", cluster.coordinator, error) from error
    restrict(before, cluster.coordinator)


def _connect_while_all_are_there(cluster: Cluster, deadline: float) -> None:
    """Lets TensorFlow connect: for a process that is gone meanwhile, or hangs, it waits for ever."""

    def join() -> None:
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster.jobs()), job_name=COORDINATOR, task_index=0, protocol="grpc"
        )
        tf.config.list_logical_devices()  # TensorFlow connects when it is first asked for something

    def check() -> None:
        missing = _silent(cluster.others())
        if any(not listens(address) for address in missing.values()) or (missing and time.monotonic() > deadline):
            raise _have_gone(missing)

    call_in_thread(join, check)


def _silent(tasks: Mapping[str, str]) -> dict[str, str]:
    """Returns the tasks that don't answer."""
    return {name: address for name, address in tasks.items() if not answers(address)}


def _listed(tasks: Mapping[str, str]) -> str:
    return ", ".join(f"{name} at {address}" for name, address in tasks.items())


def _have_gone(missing: Mapping[str, str]) -> PeerLostError:
    return PeerLostError(
        "A worker or server has gone while the coordinator connected.",
        _listed(missing),
        "Look at its output, and start all again.",
    )


def _have_not_come(missing: Mapping[str, str], seconds: float) -> PeerLostError:
    return PeerLostError(
        f"Not all workers and servers have come within {seconds:g} s.",
        f"missing: {_listed(missing)}",
        "Look at the output of the missing ones, check the addresses, and the firewalls between the hosts, or "
        f"set {environment.JOIN_TIMEOUT} (seconds) if they only need longer.",
    )


def lost_server(cluster: Cluster) -> PeerLostError | None:
    """Returns the error that names a server which is lost, `None` if all are there."""
    for index, address in enumerate(cluster.servers):
        if not answers(address):
            how = "hangs, or is cut off" if listens(address) else "does not answer any more"
        elif not tf_compat.knows_this_process(device(SERVER, index)):
            how = "was started anew, and holds nothing"
        else:
            continue
        return PeerLostError(
            "A parameter server has gone, and with it the variables that it held.",
            f"server {index} at {address} {how}",
            "Start all again: with keras.callbacks.BackupAndRestore training goes on from the last checkpoint.",
        )
    return None


def worker_is_there(cluster: Cluster, index: int) -> bool:
    """True if a worker is the process that was connected to. TensorFlow would wait for one that hangs."""
    return answers(cluster.workers[index]) and tf_compat.knows_this_process(device(WORKER, index))


def device(job: str, index: int) -> str:
    """Returns the name of a task, as a device."""
    return f"/job:{job}/replica:0/task:{index}"
