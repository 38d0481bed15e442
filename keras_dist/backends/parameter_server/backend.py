"""Parameter servers: one process coordinates and feeds, workers compute, servers hold the variables.

Keras's own `fit` runs on the coordinator, its steps run on the workers. In a custom loop the workers are replicas in
the coordinator's graph.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server import cluster as tasks
from keras_dist.backends.parameter_server.cluster import COORDINATOR, SERVER, WORKER
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.functions import prepare_optimizer
from keras_dist.backends.parameter_server.model import CoordinatorModel
from keras_dist.backends.parameter_server.shards import INPUT_CONTEXT, DatasetFunction, Function
from keras_dist.backends.parameter_server.workers import Workers
from keras_dist.comm.backend import Priority, join_seconds
from keras_dist.data.shares import examples_of, shard_dataset
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.training.loop import Loop, ReplicaLoop
from keras_dist.training.options import Options


class CoordinatorLoop(ReplicaLoop):
    """A step is one TensorFlow function, of which each worker runs its part. It needs no engine, and waits for all.

    The coordinator gives `kd.shard` a dataset function. That is traced for each worker, and may shard a dataset.
    """

    _backend: Coordinator

    def _sharded(self, source: Function) -> Any:
        context = INPUT_CONTEXT.get()
        if context is not None:
            return source(context)
        return DatasetFunction(source, self._backend.workers.size, self._backend.num_replicas)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        context = INPUT_CONTEXT.get()
        if context is None:
            check_mode(self._backend, "kd.shard(dataset)")
            return super()._split(dataset)
        # A share may be empty. It is read all the same: the shares of a batch are read in the same step.
        return shard_dataset(dataset, context.input_pipeline_id, context.num_input_pipelines).map(examples_of)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        check_mode(self._backend, "kd.run")
        return super().run(function, args)


def check_mode(backend: Coordinator, call: str) -> None:
    """Raises `NotSupportedError` in asynchronous mode, for what belongs to a custom training loop."""
    if backend.mode == "async":
        raise NotSupportedError(
            "A custom training loop waits for the result of each step, so its workers can't run ahead of each other.",
            f"{call} with kd.ParameterServer(mode='async')",
            "Use mode='sync', or put the step into `train_step` of a keras.Model and use `fit`.",
        )


class ParameterServer(Coordinator):
    """Trains on workers, with the variables on servers. One process, the coordinator, runs the script.

    `keras-dist run --workers 4 --ps 2 train.py` starts the processes, or `TF_CONFIG` describes them (jobs `chief`,
    `worker`, `ps`), or they run already (`cluster`). All run the same script: on a worker or a server `kd.init()` never
    returns, and the process ends with code 0 when the coordinator has gone.

    Args:
        mode: `"sync"`: each batch is split over the workers, and the numbers are those of one process. `"async"`: each
            worker computes on a whole batch and applies its gradients at once, to weights that others have changed
            meanwhile.
        max_staleness: For `"async"`: how many steps of others may change the weights between the moments when a step
            reads them and when it applies its gradients; `None` for any number. With 0 or 1 one worker works at a time.
        cluster: Name of a JSON file with the addresses of a standing cluster: `{"chief": ["host:port"], "worker":
            [...], "ps": [...]}`. Then this process is its coordinator.
        hang_seconds: A worker that takes longer for a step is given up, and another one makes the step.

    Raises:
        ConfigurationError: If an option has no meaning.

    Example:

    ```python
    kd.init(kd.ParameterServer(mode="async", max_staleness=8))
    ```
    """

    name = "parameter_server"
    keeps_metrics = False

    def __init__(
        self,
        mode: Literal["async", "sync"] = "sync",
        max_staleness: int | None = None,
        cluster: str | os.PathLike[str] | None = None,
        hang_seconds: float = 600.0,
    ) -> None:
        check_choice("option", "mode", mode, ("async", "sync"))
        if max_staleness is not None and (mode != "async" or isinstance(max_staleness, bool) or max_staleness < 0):
            raise ConfigurationError(
                "`max_staleness` is a number of steps, and for mode='async'.",
                f"max_staleness={max_staleness!r}, mode={mode!r}",
                "Leave it out for no bound; with mode='sync' no gradient is stale.",
            )
        if not hang_seconds > 0:
            raise ConfigurationError(
                "`hang_seconds` must be positive.", f"hang_seconds={hang_seconds!r}", "The default is 600."
            )
        path = None if cluster is None else os.fspath(cluster)
        self._options: dict[str, Any] = {
            "mode": mode, "max_staleness": max_staleness, "cluster": path, "hang_seconds": hang_seconds,
        }  # fmt: skip

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        if launch is None or not launch.jobs.get(SERVER):
            return Priority(0, "no TF_CONFIG with parameter servers found")
        return Priority(20, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        seconds = join_seconds()
        path = self._options["cluster"]
        if path is not None:
            job, index, cluster = COORDINATOR, 0, tasks.read(path)
        elif launch is not None and launch.jobs.get(SERVER):
            job, index, cluster = *launch.task, tasks.cluster_of(launch.jobs, launch.launcher)
        else:
            raise ConfigurationError(
                "The backend 'parameter_server' needs a cluster of workers and servers.",
                "no TF_CONFIG with the job 'ps'",
                "Start the script with `keras-dist run --workers 2 --ps 1 script.py`, set TF_CONFIG for each process, "
                "or name a standing cluster: kd.ParameterServer(cluster='cluster.json').",
            )
        if job in (WORKER, SERVER):
            tasks.serve(cluster, job, index, seconds)
        tasks.connect(cluster, seconds)
        if path is not None:
            tasks.show_logs(path, cluster.others())
        self._lead(cluster, Workers(cluster, seconds, self._options["hang_seconds"]))

    def distribute(self, target: keras.Model | keras.optimizers.Optimizer, options: Options) -> None:
        if isinstance(target, keras.Model):
            CoordinatorModel(target, self, options).attach()
        else:
            check_mode(self, f"kd.distribute({type(target).__name__}(...))")
            options.scale(target, self.num_replicas)
            prepare_optimizer(target, self)

    @functools.cached_property
    def loop(self) -> Loop:
        return CoordinatorLoop(self)
