"""Clusters of processes on this machine: what lets the ranks of a backend find each other, and nobody else.

Of each backend that can be launched there is one: a store that serves the ranks' messages, and the environment of
each rank.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError

LOOPBACK = store.LOOPBACK
HOST = "localhost"
# What an outer launch left behind says nothing about these processes.
_OF_ANOTHER_CLUSTER = (
    environment.INITIALIZED_BY, environment.STORE, environment.TF_CONFIG, "HOROVOD_RANK", "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_RANK",
)  # fmt: skip


class _LoopbackCluster:
    """Lets `size` processes on this machine find each other, over the loopback interface.

    It starts no process: whoever starts them gives each one its `environment(rank)`.

    Args:
        size: Number of processes.
        environ: What the processes inherit, usually `environment.current()`.

    Raises:
        ConfigurationError: If `size` is less than one, or what the backend needs is not installed.
    """

    helps = False  # True if all but rank 0 only help it: they may be lost, and end when it does

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        if size < 1:
            raise ConfigurationError(
                "A cluster needs at least one process.", f"size={size}", "Use `-np 1` or more."
            )
        self.size = size  # of processes to start
        self._inherited = {name: value for name, value in environ.items() if name not in _OF_ANOTHER_CLUSTER}
        self._server = self._serve()

    def _serve(self) -> store.Server:
        """Returns the running store of this cluster."""
        return store.serve()

    def _own(self, rank: int) -> dict[str, str]:
        """Returns what tells one rank of this cluster its place."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """Port of the store, chosen by the kernel."""
        return self._server.port

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the whole environment of one rank.

        The number of threads is left alone: TensorFlow shares the cores well enough among ranks, and a cap
        set here would change the order of its sums, hence the numbers, behind the user's back.

        Args:
            rank: Index of the process, `0 <= rank < size`.
        """
        return {
            "PYTHONUNBUFFERED": "1",  # what a rank printed is there, even if it is killed
            "NCCL_SOCKET_IFNAME": "lo",
            **self._inherited,
            environment.LAUNCHER: "local",
            **self._own(rank),
        }

    def close(self) -> None:
        """Stops the store and frees its port. The processes are to be ended before."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalCluster(_LoopbackCluster):
    """A cluster for Horovod over Gloo. Its store is Horovod's own, which serves Gloo too.

    Example:

    >>> with LocalCluster(2, environment.current()) as cluster:
    ...     ranks = [subprocess.Popen(command, env=cluster.environment(rank)) for rank in range(2)]
    ...     codes = [rank.wait() for rank in ranks]
    """

    def _serve(self) -> store.Server:
        return store.Server(_rendezvous_server(self.size))

    def _own(self, rank: int) -> dict[str, str]:
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


class MultiWorkerCluster(_LoopbackCluster):
    """A cluster for TensorFlow's own collectives. Needs no Horovod."""

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        super().__init__(size, environ)
        self._workers = [f"{LOOPBACK}:{port}" for port in _free_ports(size)]

    def _own(self, rank: int) -> dict[str, str]:
        task = {"cluster": {"worker": self._workers}, "task": {"type": "worker", "index": rank}}
        return {environment.TF_CONFIG: json.dumps(task), environment.STORE: f"{LOOPBACK}:{self.port}"}


class ParameterServerCluster(_LoopbackCluster):
    """A coordinator, workers and servers. Only the coordinator, rank 0, runs the script; the others serve it.

    Args:
        size: Number of workers.
        environ: What the processes inherit.
        servers: Number of servers.
    """

    helps = True

    def __init__(self, size: int, environ: Mapping[str, str], servers: int = 1) -> None:
        if servers < 1:
            raise ConfigurationError("A cluster needs at least one server.", f"--ps {servers}", "Use `--ps 1` or more.")
        super().__init__(size, environ)
        ports = _free_ports(1 + size + servers)
        addresses = [f"{LOOPBACK}:{port}" for port in ports]
        self.jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + size], "ps": addresses[1 + size :]}
        self._tasks = [(job, index) for job, tasks in self.jobs.items() for index in range(len(tasks))]
        self.size = len(self._tasks)

    def _own(self, rank: int) -> dict[str, str]:
        job, index = self._tasks[rank]
        config = {"cluster": self.jobs, "task": {"type": job, "index": index}}
        return {environment.TF_CONFIG: json.dumps(config), environment.STORE: f"{LOOPBACK}:{self.port}"}


def _free_ports(count: int) -> list[int]:
    """Returns ports that are free, and that the kernel gives to nobody who asks for any.

    The ranks bind them seconds later: a port of the kernel's own range might be another program's by then.
    """
    lowest = _kernels_first_port()
    candidates = range(lowest // 2, lowest) if lowest > 4096 else range(49152, 65536)
    free: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(free) == count:
            break
        if _is_free(port):
            free.append(port)
    return free


def _kernels_first_port() -> int:
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
        import socketserver

        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise ConfigurationError(
            "Horovod is not installed.",
            f"ImportError: {error}",
            "Build it with `keras-dist install-horovod`, or do without: `keras-dist run --backend multi_worker`.",
        ) from error

    # Not Horovod's `RendezvousServer`: it listens on every interface of the machine.
    class LoopbackServer(RendezvousHTTPServer):
        request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s

        def server_bind(self) -> None:
            # Past HTTPServer's own, which asks the name server who 127.0.0.1 is and may wait for it.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = LOOPBACK, self.server_address[1]

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A rank that dies in the middle of a request is the launcher's to report, not ours."""

    server = LoopbackServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.init(get_host_assignments([HostInfo(HOST, size)], size))
    return server
