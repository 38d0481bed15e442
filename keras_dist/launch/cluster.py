"""Clusters of processes on this machine: what lets the ranks of a backend, and nobody else, find each other.

Each backend that can be launched has one: a store that serves the ranks' messages, and the environment of each rank.
"""

from __future__ import annotations

import itertools
import json
import random
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError
from keras_dist.launch.descendants import JOB

LOOPBACK = store.LOOPBACK
HOST = "localhost"
# These variables of an outer launch do not apply to the new processes.
_FROM_OUTER_LAUNCH = (
    environment.INITIALIZED_BY, environment.STORE, environment.COMMITTED, environment.TF_CONFIG, "HOROVOD_RANK",
    "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK",
)  # fmt: skip


class Cluster:
    """Lets `size` processes on this machine find each other, over the loopback interface.

    It starts no process: the caller does, and gives each one its `environment(rank)`.

    Args:
        size: Number of processes.
        environ: What the processes inherit, usually `environment.current()`.

    Raises:
        ConfigurationError: If `size` is less than one, or what the backend needs is not installed.
    """

    only_chief_runs = False  # True if the other processes serve rank 0: they may be lost, and end when it ends

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        if size < 1:
            raise ConfigurationError("A cluster needs at least one process.", f"size={size}", "Use `-np 1` or more.")
        self.size = size  # number of processes to start
        self.job = secrets.token_hex(8)  # by which all that the processes start can be found
        self._inherited = {name: value for name, value in environ.items() if name not in _FROM_OUTER_LAUNCH}
        self._server = self._serve()

    def _serve(self) -> store.Server:
        """Returns the running store of this cluster."""
        return store.serve()

    def _variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that tell one rank its place in this cluster."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """Port of the store, chosen by the kernel."""
        return self._server.port

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the whole environment of one rank.

        The number of threads stays as it is: TensorFlow shares the cores among ranks well enough, and a limit set
        here would silently change the order of its sums, hence the numbers.

        Args:
            rank: Index of the process, `0 <= rank < size`.
        """
        return {
            "PYTHONUNBUFFERED": "1",  # keeps what a rank printed before it was killed
            "NCCL_SOCKET_IFNAME": "lo",
            **self._inherited,
            environment.LAUNCHER: "local",
            JOB: self.job,
            **self._variables(rank),
        }

    def close(self) -> None:
        """Stops the store and frees its port. End the processes first."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class HorovodCluster(Cluster):
    """A cluster for Horovod over Gloo. Its store is Horovod's own, which Gloo uses too.

    Example:

    >>> with HorovodCluster(2, environment.current()) as cluster:
    ...     ranks = [subprocess.Popen(command, env=cluster.environment(rank)) for rank in range(2)]
    ...     codes = [rank.wait() for rank in ranks]
    """

    def _serve(self) -> store.Server:
        return store.Server(_rendezvous_server(self.size))

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_HOSTNAME": HOST,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(self.size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }


class _TFConfigCluster(Cluster):
    """A cluster that TensorFlow describes by TF_CONFIG."""

    jobs: Mapping[str, list[str]]  # the addresses of each job's tasks

    def _variables(self, rank: int) -> dict[str, str]:
        tasks = [(job, index) for job, addresses in self.jobs.items() for index in range(len(addresses))]
        job, index = tasks[rank]
        config = {"cluster": self.jobs, "task": {"type": job, "index": index}}
        return {environment.TF_CONFIG: json.dumps(config), environment.STORE: f"{LOOPBACK}:{self.port}"}


class MultiWorkerCluster(_TFConfigCluster):
    """A cluster for TensorFlow's own collectives. Needs no Horovod."""

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        super().__init__(size, environ)
        self.jobs = {"worker": _free_addresses(size)}


class ParameterServerCluster(_TFConfigCluster):
    """A coordinator, workers and servers. Only the coordinator, rank 0, runs the script; the others serve it.

    Args:
        size: Number of workers.
        environ: What the processes inherit.
        servers: Number of servers.
    """

    only_chief_runs = True

    def __init__(self, size: int, environ: Mapping[str, str], servers: int = 1) -> None:
        if servers < 1:
            raise ConfigurationError("A cluster needs at least one server.", f"--ps {servers}", "Use `--ps 1` or more.")
        super().__init__(size, environ)
        self.size = 1 + size + servers
        addresses = _free_addresses(self.size)
        self.jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + size], "ps": addresses[1 + size :]}


def _free_addresses(count: int) -> list[str]:
    """Returns loopback addresses with free ports, outside of the range from which the kernel assigns ports.

    The ranks bind them seconds later: by then, the kernel could have given a port of its range to another program.
    """
    lowest = _first_ephemeral_port()
    candidates = range(lowest // 2, lowest) if lowest > 4096 else range(49152, 65536)
    shuffled = random.SystemRandom().sample(candidates, len(candidates))
    return [f"{LOOPBACK}:{port}" for port in itertools.islice(filter(_is_free, shuffled), count)]


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # TensorFlow listens on all interfaces
        except OSError:
            return False
        return True


def _rendezvous_server(size: int) -> Any:
    """Returns Horovod's own key-value server, bound to the loopback interface and a free port."""
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise ConfigurationError(
            "Horovod is not installed.",
            f"ImportError: {error}",
            "Build it with `keras-dist install-horovod`, or use `keras-dist run --backend multi_worker`.",
        ) from error

    # Not Horovod's `RendezvousServer`: it listens on every interface of the machine.
    class LoopbackServer(store.MessageServer, RendezvousHTTPServer):
        pass

    server = LoopbackServer((LOOPBACK, 0), RendezvousHandler, False)
    server.init(get_host_assignments([HostInfo(HOST, size)], size))
    return server
