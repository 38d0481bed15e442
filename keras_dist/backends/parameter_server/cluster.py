"""The tasks of a cluster: their addresses, and which of them are lost."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_dist.comm.connections import answers, listens
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError, PeerLostError

COORDINATOR, WORKER, SERVER = "chief", "worker", "ps"
_EXAMPLE = '{"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"], "ps": ["127.0.0.1:2224"]}'
# What TensorFlow says when the other end of a connection has gone, or was replaced.
_LOSS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_REPLACED = (
    "Unable to find a context_id", "unknown device", "remote_handle", "does not exist", "Primary device is not remote",
    "is neither a type of a primitive operation", "Client for target",
)  # fmt: skip


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
        """Returns the addresses of all tasks but the coordinator, by name."""
        return {
            **{f"worker {index}": address for index, address in enumerate(self.workers)},
            **{f"server {index}": address for index, address in enumerate(self.servers)},
        }


def cluster_of(jobs: Mapping[str, Sequence[str]], received: str) -> Cluster:
    """Returns the cluster of a description as TensorFlow has it.

    Args:
        jobs: Addresses by job: `"chief"` (or `"coordinator"`), `"worker"` and `"ps"`.
        received: Where they come from, for the message.

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
        ConfigurationError: If it can't be read, or doesn't describe a cluster.
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


# --- Tasks that are lost ---


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
