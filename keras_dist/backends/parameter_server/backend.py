"""Parameter servers: one process coordinates and feeds, workers compute, servers hold the variables.

Keras's own `fit` runs on the coordinator, its steps run on the workers. In a custom loop the workers are replicas in
the coordinator's graph.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server import coordinator
from keras_dist.backends.parameter_server.cluster import COORDINATOR, SERVER, WORKER, cluster_of, connect, read, serve
from keras_dist.backends.parameter_server.coordinator import Coordinator, CoordinatorStrategy, OnWorkers
from keras_dist.backends.parameter_server.engine import AsyncEngine, Engine, SyncEngine
from keras_dist.backends.parameter_server.functions import Functions, prepare_optimizer
from keras_dist.backends.parameter_server.shards import INPUT_CONTEXT, Function
from keras_dist.backends.parameter_server.workers import Workers
from keras_dist.comm.backend import Affinity, join_seconds
from keras_dist.compat import keras_fit, keras_model
from keras_dist.compat.keras_model import attach
from keras_dist.data.shares import examples_of, shard_dataset
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.step.optimizer import build_optimizer, parts_of
from keras_dist.training.call import Call
from keras_dist.training.loop import Loop, ReplicaLoop
from keras_dist.training.options import Options
from keras_dist.training.own_code import FirstRows
from keras_dist.training.wrapper import Wrapper

_SMALL = 2**24  # numbers of a variable


class CoordinatorWrapper(Wrapper):
    """What makes one model compute on the workers, and keep its variables on the servers."""

    _backend: Coordinator
    strategy: CoordinatorStrategy

    def __init__(self, model: keras.Model, backend: Coordinator, options: Options) -> None:
        super().__init__(model, backend, options, CoordinatorStrategy(model, backend, options.data))
        self._plain_apply: dict[int, Callable[..., Any]] = {}
        self._engine: Engine | None = None
        self._traced_for: Sequence[Any] = []
        self._depth = 0
        self._waits = False

    def _compile(self, call: Call) -> None:
        self._engine = None
        super()._compile(call)

    def _prepare_optimizers(self) -> list[Any]:
        self._check_strategy()
        with self._explained():
            self._backend.placement.place_model(self._model)
            return super()._prepare_optimizers()

    def _prepare_optimizer(self, optimizer: Any) -> None:
        for part in parts_of(optimizer) if self._backend.mode == "async" else ():
            if part.gradient_accumulation_steps:
                raise NotSupportedError(
                    "Workers that don't wait for each other can't accumulate gradients in one place.",
                    f"gradient_accumulation_steps={part.gradient_accumulation_steps} in mode='async'",
                    "Leave it out, or use kd.ParameterServer(mode='sync').",
                )
        self._plain_apply[id(optimizer)] = prepare_optimizer(optimizer, self._backend)

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        with super()._running(call), keras_fit.epoch_iterators(self._prepare):
            for argument in ("x", "validation_data"):
                given = call.get(argument)
                if not isinstance(given, OnWorkers):
                    continue
                if call.name not in ("fit", "evaluate"):
                    raise coordinator.not_read_here(f"kd.shard(function) in model.{call.name}")
                weights = call.get("class_weight") if argument == "x" else None
                if weights is not None:
                    call.set("class_weight", None)
                call.set(argument, given.weighted(weights).stand_in())  # a dataset that Keras knows
            self._depth += 1
            self._waits = call.name == "train_on_batch"
            try:
                yield
            except BaseException:
                if self._engine is not None:
                    self._engine.forget()
                raise
            finally:
                self._depth -= 1
                if not self._depth:
                    self._drain()

    def _prepare(self, epoch_iterator: Any) -> None:
        """At the end of an epoch Keras waits for all devices, and would meet the error of a worker that was lost."""
        coordinator.exchange(epoch_iterator)
        attach(epoch_iterator, "tf_sync", self._drain)

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.drain()

    def _symbolic_build(self, call: Call) -> None:
        """Builds the optimizer too, before anything is traced, and moves all variables to the servers."""
        super()._symbolic_build(call)
        optimizer = getattr(self._model, "optimizer", None)
        if isinstance(optimizer, keras.Optimizer) and not optimizer.built and self._model.built:
            self._prepare_optimizers()
            build_optimizer(optimizer, self._model.trainable_variables)
        self._prepare_optimizers()

    def _ready_engine(self) -> Engine:
        """Returns the engine; a new one if what was traced no longer holds."""
        model, optimizers = self._model, self._prepare_optimizers()
        variables = [*model.trainable_variables, *model.variables, *model.metrics_variables]
        variables += [variable for optimizer in optimizers for variable in optimizer.variables]
        # The objects themselves, not their ids: the id of a variable that is gone may be given to another one.
        now = [*map(keras_model.backing, variables), *optimizers, model.run_eagerly]
        is_same = len(now) == len(self._traced_for) and all(map(operator.is_, now, self._traced_for))
        if self._engine is None or not is_same:
            engine = AsyncEngine if self._backend.mode == "async" else SyncEngine
            functions = Functions(model, self._backend, self._plain_apply, self.strategy)
            self._engine = engine(model, self._backend, functions)
            self._traced_for = now
        return self._engine

    def _make_function(self, kind: str, call: Call) -> None:
        self._refuse_own_function(f"{kind}_function")
        function: Callable[[Any], Any] = functools.partial(self._run_steps, kind)
        if kind == "train" or self.strategy.exact:  # else each worker evaluates whole batches, as plain Keras does
            function = self._with_check(kind, self._noted(function))
        attach(self._model, f"{kind}_function", function)

    def _run_steps(self, kind: str, iterator: Any) -> Any:
        engine = self._ready_engine()
        return engine.train(iterator, self._waits) if kind == "train" else engine.test(iterator)

    def _check_own_code(self, kind: str, rows: FirstRows) -> None:
        """Tries steps out on copies of the variables here, except for large tables: of these a few rows are read."""
        variables = [*self._model.variables, *(each for found in self._optimizers() for each in found.variables)]
        small = [each for each in variables if keras_model.backing(each).shape.num_elements() <= _SMALL]
        with self._backend.placement.at_home(small):
            super()._check_own_code(kind, rows)

    def _make_predict_function(self, call: Call) -> None:
        attach(self._model, "predict_function", lambda batches: self._ready_engine().predict(batches))

    def _metrics_result(self, call: Call) -> Any:
        """Returns the logs of an epoch, once all its steps are done."""
        if self._engine is not None:
            call.change("logs", self._engine.last_logs)
        return super()._metrics_result(call)

    def _writing(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """What Keras itself writes it reads first; TensorFlow writes a SavedModel, where the variables are."""
        if call.name == "export":
            return self._backend.placement.at_home(self._model.variables)
        return contextlib.nullcontext()


class CoordinatorLoop(ReplicaLoop):
    """A step is one TensorFlow function, of which each worker runs its part. It needs no engine, and waits for all.

    The coordinator gives `kd.shard` a dataset function. That is traced for each worker, and may shard a dataset.
    """

    _backend: Coordinator

    def _sharded(self, source: Function) -> Any:
        context = INPUT_CONTEXT.get()
        return OnWorkers(source, self._backend) if context is None else source(context)

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
    def affinity(cls, launch: Launch | None) -> Affinity:
        if launch is None or not launch.jobs.get(SERVER):
            return Affinity(0, "no TF_CONFIG with parameter servers found")
        return Affinity(20, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        seconds = join_seconds()
        path = self._options["cluster"]
        if path is not None:
            job, index, cluster = COORDINATOR, 0, read(path)
        elif launch is not None and launch.jobs.get(SERVER):
            job, index, cluster = *launch.task, cluster_of(launch.jobs, launch.launcher)
        else:
            raise ConfigurationError(
                "The backend 'parameter_server' needs a cluster of workers and servers.",
                "no TF_CONFIG with the job 'ps'",
                "Start the script with `keras-dist run --workers 2 --ps 1 script.py`, set TF_CONFIG for each process, "
                "or name a standing cluster: kd.ParameterServer(cluster='cluster.json').",
            )
        if job in (WORKER, SERVER):
            serve(cluster, job, index, seconds)
        connect(cluster, seconds)
        self._lead(cluster, Workers(cluster, seconds, self._options["hang_seconds"]))

    def distribute(self, target: keras.Model | keras.optimizers.Optimizer, options: Options) -> None:
        if isinstance(target, keras.Model):
            CoordinatorWrapper(target, self, options).attach()
        else:
            check_mode(self, f"kd.distribute({type(target).__name__}(...))")
            options.scale(target, self.num_replicas)
            prepare_optimizer(target, self)

    @property
    def keeps_metrics(self) -> bool:
        return False

    @functools.cached_property
    def loop(self) -> Loop:
        return CoordinatorLoop(self)
