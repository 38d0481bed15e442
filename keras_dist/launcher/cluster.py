"""Clusters of processes: what lets the ranks of a backend, and nobody else, find each other.

The processes are on this machine or on several nodes. Each backend that can be launched has a cluster: a store that
serves the ranks' messages, and the environment of each rank.

A process can join others by MPI only if it was described to a server of PMIx, which `mpirun` is. So for ranks that send
by Open MPI, `mpirun` starts one `sleep` for each, and the launcher starts the ranks itself, each with the environment
of one of these placeholders: output, logs, failures and restarts are those of every other cluster. `mpirun` removes the
segments of shared memory of ranks that have died, and ends with the cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.descendants import JOB
from keras_dist.launcher.nodes import LOOPBACK, Node, RemoteNode
from keras_dist.launcher.processes import inherited, rank_environment


class Cluster:
    """Lets processes find each other: `size` on this machine, over the loopback interface, or those of several nodes.

    It starts no process: the caller does, and gives each one its `environment(rank)`. `environ` is what they inherit.
    `nodes` are all nodes of the job, this one first.
    """

    only_chief_runs = False  # True if the other processes serve rank 0: they may be lost, and end when it ends

    def __init__(self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> None:
        self.nodes = [Node(size)] if nodes is None else nodes
        self._node_of = [node for node in self.nodes for _ in range(node.size)]  # of each rank; those of node 0 first
        self.size = len(self._node_of)  # number of processes to start
        if self.size < 1:
            raise ConfigurationError("A cluster needs at least one process.", f"size={size}", "Use `-np 1` or more.")
        self.job = secrets.token_hex(8)  # by which all that the processes start can be found
        self._environ = environ
        self._server = store.Server()
        self.nodes[0].port = self._server.port
        for node in self.nodes:
            if isinstance(node, RemoteNode):
                node.values = self._server.values

    @classmethod
    def make(cls, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> Cluster:
        """Returns a new cluster of this kind, or of the one that the environment asks for."""
        return cls(size, environ, nodes)

    def _variables(self, rank: int) -> dict[str, str]:
        """Returns what tells a rank its place in this cluster."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        return self._server.port

    def variables(self, rank: int) -> dict[str, str]:
        """Returns what is added to the environment of a rank, on its node."""
        return {environment.LAUNCHER: "local", JOB: self.job + self._node_of[rank].suffix, **self._variables(rank)}

    def environment(self, rank: int) -> dict[str, str]:
        return rank_environment(self._environ, self.nodes[0].interface, self.variables(rank))

    def close(self) -> None:
        """Stops the store and frees its port. End the processes first."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


MPI_PACKAGES = "sudo apt-get install -y openmpi-bin libopenmpi-dev"
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.01
_OPTIONS = (
    "--bind-to", "none",  # kd.init() gives each rank its cores
    "--mca", "pml", "ob1", "--mca", "btl", "self,vader",  # shared memory only
    "--mca", "oob_tcp_if_include", "lo",
    "--mca", "odls_base_sigkill_timeout", "0",  # the placeholders have nothing to save
)  # fmt: skip


class MPICluster(Cluster):
    """A cluster for Horovod over Open MPI. Nothing of it leaves this machine."""

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        if not built_with_mpi():
            raise ConfigurationError(
                "The installed Horovod was built without MPI.", "HOROVOD_CONTROLLER=mpi",
                "Build it with `keras-dist install-horovod --mpi`, or leave the variable out.",
            )
        if shutil.which("mpirun", path=environ.get("PATH")) is None:
            raise ConfigurationError("`mpirun` is not on the PATH.", "HOROVOD_CONTROLLER=mpi", MPI_PACKAGES)
        super().__init__(size, environ)
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        place = ["--host", f"{LOOPBACK}:{self.size}", "-np", str(self.size)]
        # Killed by SIGKILL it would leave files behind. If the launcher dies, `descendants` ends it.
        self._mpirun = subprocess.Popen(
            ["mpirun", *root, *_OPTIONS, *place, "sleep", "infinity"], env={**inherited(environ), JOB: self.job},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            self._places = self._wait_for_places()
        except BaseException:
            self.close()
            raise

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            # Ranks that wait let others compute: without it a rank that shares its core takes the time of another.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **self._places[rank],
            "HOROVOD_CONTROLLER": "mpi",
            "HOROVOD_CPU_OPERATIONS": "mpi",
            environment.STORE: f"{LOOPBACK}:{self.port}",
        }

    def close(self) -> None:
        self._mpirun.terminate()
        try:
            self._mpirun.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            self._mpirun.communicate()
        super().close()

    def _wait_for_places(self) -> list[dict[str, str]]:
        deadline = time.monotonic() + _START_SECONDS
        children = Path(f"/proc/{self._mpirun.pid}/task/{self._mpirun.pid}/children")
        found: dict[int, dict[str, str]] = {}
        while self._mpirun.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # one has ended
                for child in children.read_text().split():
                    entries = Path(f"/proc/{child}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
                    variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                    if "OMPI_COMM_WORLD_RANK" in variables:
                        found[int(variables["OMPI_COMM_WORLD_RANK"])] = variables
            if len(found) == self.size:
                return [found[rank] for rank in range(self.size)]
            time.sleep(_POLL_SECONDS)
        self._mpirun.kill()
        output, _ = self._mpirun.communicate()
        raise ConfigurationError(
            "`mpirun` could not describe the ranks.",
            output.decode(errors="replace").strip() or f"nothing within {_START_SECONDS:g} s",
            "Use Gloo: HOROVOD_CONTROLLER=gloo.",
        )


def built_with_mpi() -> bool:
    """True if the installed Horovod is linked with MPI. Importing it would take seconds."""
    try:
        found = importlib.util.find_spec("horovod.tensorflow")
    except ImportError:  # it is not installed
        return False
    folders = found.submodule_search_locations if found is not None else None
    libraries = [library for folder in folders or () for library in Path(folder).glob("mpi_lib*.so")]
    return any(b"\0libmpi" in library.read_bytes() for library in libraries)


class HorovodCluster(Cluster):
    """A cluster for Horovod over Gloo, which uses the store too."""

    @classmethod
    def make(cls, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> Cluster:
        if importlib.util.find_spec("horovod") is None:
            raise ConfigurationError(
                "Horovod is not installed.", "no package `horovod`",
                "Build it with `keras-dist install-horovod`, or use `keras-dist run --backend multi_worker`.",
            )
        controller = environ.get(environment.HOROVOD_CONTROLLER, "gloo").lower()
        if controller == "mpi" and nodes is None:
            return MPICluster(size, environ)
        if controller != "gloo":
            raise ConfigurationError(
                "HOROVOD_CONTROLLER says how the ranks send.",
                repr(controller) + ("" if nodes is None else f" on {len(nodes)} nodes"),
                "Set it to gloo or mpi, or unset it. Over MPI, `keras-dist run` starts ranks on one machine only; "
                "`mpirun` starts them on several.",
            )
        return cls(size, environ, nodes)

    def _variables(self, rank: int) -> dict[str, str]:
        node = self._node_of[rank]
        hosts = [node.address for node in self._node_of]  # of each rank; a host may be two nodes
        local_rank, local_size = hosts[:rank].count(node.address), hosts.count(node.address)
        across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": node.interface,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(node.port),
            "HOROVOD_HOSTNAME": node.address,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_LOCAL_SIZE": str(local_size),
            "HOROVOD_CROSS_RANK": str(across.index(node.address)),
            "HOROVOD_CROSS_SIZE": str(len(across)),
        }


class MultiWorkerCluster(Cluster):
    """A cluster for TensorFlow's own collectives, which TF_CONFIG describes. Needs no Horovod."""

    jobs: Mapping[str, list[str]]  # the addresses of each job's tasks

    def __init__(self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> None:
        super().__init__(size, environ, nodes)
        self.jobs = {"worker": [address for node in self.nodes for address in node.free_addresses(node.size)]}

    def _variables(self, rank: int) -> dict[str, str]:
        tasks = [{"type": job, "index": index} for job, tasks in self.jobs.items() for index in range(len(tasks))]
        config = json.dumps({"cluster": self.jobs, "task": tasks[rank]})
        return {environment.TF_CONFIG: config, environment.STORE: f"{LOOPBACK}:{self._node_of[rank].port}"}


class ParameterServerCluster(MultiWorkerCluster):
    """A coordinator, `size` workers, and servers. Only the coordinator, rank 0, runs the script."""

    only_chief_runs = True

    def __init__(
        self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None, servers: int = 1
    ) -> None:
        if min(size, servers) < 1:
            received = f"--workers {size} --ps {servers}"
            raise ConfigurationError("A cluster needs at least one worker and one server.", received, "Use 1 or more.")
        super().__init__(1 + size + servers, environ)  # the command line refuses several nodes
        addresses = self.jobs["worker"]
        self.jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + size], "ps": addresses[1 + size :]}
