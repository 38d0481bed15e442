"""The coordinator's side of parameter servers: what an engine, a model and data need to know of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.cluster import HERE, SERVER, Cluster, device, first_devices
from keras_dist.backends.parameter_server.exchange import ShareStep
from keras_dist.backends.parameter_server.placement import Placement
from keras_dist.backends.parameter_server.workers import Workers
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.step import step as step_module


class Coordinator(ReplicaBackend):
    """A backend whose process is the only rank, and lets workers compute. `start` calls `_lead`.

    In `fit` an engine gives them one call after another. In a custom loop they are the replicas of one graph.
    """

    _options: dict[str, Any]
    _cluster: Cluster
    workers: Workers
    placement: Placement

    def _lead(self, cluster: Cluster, workers: Workers) -> None:
        self._cluster, self.workers = cluster, workers
        self.placement = Placement(self.variable_devices())
        self._use(first_devices(workers.size), HERE, tf.distribute.ReductionToOneDevice())

    def describe_devices(self) -> str:
        return f"{len(self._cluster.workers)} workers, {len(self._cluster.servers)} servers, {self.mode}"

    @property
    def mode(self) -> str:
        """`"sync"` or `"async"`."""
        return str(self._options["mode"])

    @property
    def not_of_one_process(self) -> str | None:
        return None if self.mode == "sync" else "asynchronous workers change the weights at any moment"

    @property
    def max_staleness(self) -> int | None:
        """How many steps of others may come between reading weights and applying gradients to them."""
        bound: int | None = self._options["max_staleness"]
        return bound

    def variable_devices(self) -> Sequence[str]:
        """Returns the devices of the servers."""
        return [device(SERVER, index) for index in range(len(self._cluster.servers))]

    @property
    def has_processes(self) -> bool:
        return True

    @property
    def num_replicas(self) -> int:
        """How many shares a step has: an asynchronous one is on a whole batch."""
        return self.workers.size if self.mode == "sync" else 1

    # --- What a step calls ---

    def all_gather(self, tensor: Any, name: str) -> Any:
        step = _share_step()
        return super().all_gather(tensor, name) if step is None else step.all_gather(tensor, name)

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        step = _share_step()
        return super().all_reduce_exact(numbers, name) if step is None else step.all_reduce_exact(numbers, name)

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        if (step := _share_step()) is None:
            return super().all_reduce(gradients, row, name)
        return [step.all_reduce(gradient, name) for gradient in gradients], row[None, :]

    def translate(self, error: BaseException) -> BaseException:
        return self.workers.translate(error)


def _share_step() -> ShareStep | None:
    """Returns the step of `fit` that is being traced or run, `None` in a custom loop."""
    step = step_module.current()
    return step if isinstance(step, ShareStep) else None
