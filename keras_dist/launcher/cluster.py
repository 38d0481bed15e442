"""Clusters of processes: what lets the ranks of a backend, and nobody else, find each other.

The processes are on this machine or on several nodes. Each backend that can be launched has a cluster: a store that
serves the ranks' messages, and the environment of each rank.
"""

import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Self

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.launcher.descendants import JOB
from keras_dist.launcher.nodes import LOOPBACK, Node, RemoteNode
from keras_dist.launcher.processes import rank_environment


class Cluster:
    """Lets processes find each other: `size` on this machine, over the loopback interface, or those of several nodes.

    It starts no process: the caller does, and gives each one its `environment(rank)`. `environ` is what they inherit.
    `nodes` are all nodes of the job, this one first.
    """

    only_chief_runs = False  # True if the other processes serve rank 0: they may be lost, and end when it ends

    def __init__(self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> None:
        self.nodes = [Node(size)] if nodes is None else nodes
        self._node_of = [node for node in self.nodes for _ in range(node.size)]  # of each rank; those of node 0 first
        self._places = [f"{rank}/{node.size}" for node in self.nodes for rank in range(node.size)]
        self.size = len(self._node_of)  # number of processes to start
        if self.size < 1:
            raise ConfigurationError("A cluster needs at least one process.", f"size={size}", "Use `-np 1` or more.")
        self.job = secrets.token_hex(8)  # by which everything that the processes start can be found
        self._environ = environ
        self._server = store.Server()
        self.nodes[0].port = self._server.port
        for node in self.nodes:
            if isinstance(node, RemoteNode):
                node.store = self._server

    def _variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that tell a rank its place in this cluster."""
        raise NotImplementedError

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that are added to the environment of a rank, on its node."""
        job = self.job + self._node_of[rank].suffix
        told = {environment.LAUNCHER: "local", environment.PLACE: self._places[rank], JOB: job}
        return {**told, **self._variables(rank)}

    def environment(self, rank: int) -> dict[str, str]:
        return rank_environment(self._environ, self.nodes[0].interface, self.variables(rank))

    def close(self) -> None:
        """Stops the store and frees its port. End the processes first."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class HorovodCluster(Cluster):
    """A cluster for Horovod over Gloo, which uses the store too."""

    def __init__(self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> None:
        if importlib.util.find_spec("horovod") is None:
            raise ConfigurationError(
                "Horovod is not installed.", "no package `horovod`",
                "Build it with `keras-dist install-horovod`, or use `keras-dist run --backend multi_worker`.",
            )
        if (controller := environ.get(environment.HOROVOD_CONTROLLER, "gloo")).lower() != "gloo":
            raise NotSupportedError(
                "`keras-dist run` starts ranks that send by Gloo.", f"HOROVOD_CONTROLLER={controller}",
                "Unset it. `mpirun -np 4 python train.py` starts ranks that send by Open MPI.",
            )
        super().__init__(size, environ, nodes)

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
    """A coordinator, `size` workers and servers: the ranks, in this order. Only the coordinator runs the script."""

    only_chief_runs = True

    def __init__(
        self, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None, servers: int = 1
    ) -> None:
        nodes = [Node(1 + size + servers)] if nodes is None else nodes
        if (count := sum(node.size for node in nodes)) != 1 + size + servers:
            raise ConfigurationError(
                "The nodes must have as many processes as the cluster: one coordinator, the workers and the servers.",
                f"{count} processes on all nodes, for 1 + {size} + {servers}",
                "Leave out -np, which spreads them evenly; after -H, let the numbers add up.",
            )
        super().__init__(count, environ, nodes)
        addresses = self.jobs["worker"]
        self.jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + size], "ps": addresses[1 + size :]}
