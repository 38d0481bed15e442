"""Parameter servers: one process coordinates and feeds, workers compute, servers hold the variables.

Keras's own `fit` runs on the coordinator, its steps run on the workers. In a custom loop the workers are replicas in
the coordinator's graph.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server import cluster as tasks
from keras_dist.backends.parameter_server import shards
from keras_dist.backends.parameter_server.cluster import COORDINATOR, HERE, SERVER, WORKER
from keras_dist.backends.parameter_server.coordinator import Coordinator, Workers, at_home
from keras_dist.backends.parameter_server.engine import AsyncEngine, SyncEngine, Tried
from keras_dist.backends.parameter_server.functions import prepare_optimizer
from keras_dist.comm.backend import Priority, join_seconds
from keras_dist.compat import keras_fit, keras_layers, keras_model
from keras_dist.compat.keras_model import attach
from keras_dist.data.shares import Shares, examples_of, shard_dataset
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.logging import logger
from keras_dist.step.optimizer import build_optimizer, parts_of, variable_of, variables_of
from keras_dist.training.call import Call
from keras_dist.training.loop import Loop, ReplicaLoop
from keras_dist.training.model import ReplicaModel
from keras_dist.training.options import Options, act_between_batches
from keras_dist.training.trial import FirstRows, batch_of_shares, descending, state_of

_SMALL = 2**24  # numbers of a variable


class CoordinatorModel(ReplicaModel):
    """A model that computes on the workers, and whose variables are on the servers.

    Its data are the script's own batches, or as many of them together as there are workers.
    """

    _backend: Coordinator
    _spec: Any = None  # what the step that is tried out is traced for

    def __init__(self, model: keras.Model, backend: Coordinator, options: Options) -> None:
        super().__init__(model, backend, options)
        self._engine: SyncEngine | None = None
        self._traced_for: Sequence[Any] = []
        self._is_settled = False  # two steps in a row found what the engine was made for

    def _compile(self, call: Call) -> None:
        self._engine = None
        super()._compile(call)

    def _prepare_optimizers(self) -> list[Any]:
        self._check_strategy()
        with self._explained():
            self._backend.place(self._model.weights)  # metrics and random states stay in this process
            return super()._prepare_optimizers()

    def _prepare_optimizer(self, optimizer: Any) -> None:
        for part in parts_of(optimizer) if self._backend.mode == "async" else ():
            if part.gradient_accumulation_steps:
                raise NotSupportedError(
                    "Workers that don't wait for each other can't accumulate gradients in one place.",
                    f"gradient_accumulation_steps={part.gradient_accumulation_steps} in mode='async'",
                    "Leave it out, or use kd.ParameterServer(mode='sync').",
                )
        prepare_optimizer(optimizer, self._backend)

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        together = not (self._model.run_eagerly or act_between_batches(call.get("callbacks")))
        with super()._running(call), keras_fit.epoch_iterators(functools.partial(self._exchange, together)):
            for argument in ("x", "validation_data"):
                given = call.get(argument)
                if not isinstance(given, shards.DatasetFunction):
                    continue
                if call.name not in ("fit", "evaluate"):
                    raise shards.not_read_here(f"kd.shard(function) in model.{call.name}")
                weights = call.get("class_weight") if argument == "x" else None
                if weights is not None:
                    call.set("class_weight", None)
                    given = given.weighted(weights)
                call.set(argument, given.stand_in())  # a dataset that Keras knows
            try:
                yield
            except BaseException:
                if self._engine is not None:
                    self._engine.forget()
                raise
            finally:
                self._drain()

    def _exchange(self, together: bool, epoch_iterator: Any) -> None:
        """Makes Keras iterate over the data that workers read, where it was given a stand-in."""
        on_workers = shards.stood_for(keras_fit.distributed_dataset(epoch_iterator))
        if on_workers is not None:
            per_epoch, at_once = epoch_iterator.steps_per_epoch, epoch_iterator.steps_per_execution
            limit = per_epoch and -(-per_epoch // at_once) * at_once
            keras_fit.set_dataset(epoch_iterator, shards.Pass(on_workers, limit, together))
        # At the end of an epoch Keras waits for all devices, and would meet the error of a worker that was lost.
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

    def _ready_engine(self) -> SyncEngine:
        """Returns the engine; a new one if what was traced no longer holds."""
        if self._engine is not None and self._is_settled and not self._model.run_eagerly:
            return self._engine
        model, optimizers = self._model, self._prepare_optimizers()
        # Which weights are trained is decided by `compile`, as in plain Keras, and a schedule by the trace.
        variables = [*model.variables, *model.metrics_variables]
        variables += [each for by in optimizers for each in variables_of(by) if each is not variable_of(by)]
        # The objects themselves, not their ids: the id of a variable that is gone may be given to another one.
        now = [*map(keras_model.backing, variables), *optimizers, model.run_eagerly, self.stopwatch]
        is_same = len(now) == len(self._traced_for) and all(map(operator.is_, now, self._traced_for))
        self._is_settled = self._engine is not None and is_same
        if self._engine is None or not is_same:
            engine = AsyncEngine if self._backend.mode == "async" else SyncEngine
            self._engine = engine(model, self._backend, self)
            self._traced_for = now
        return self._engine

    def _make_function(self, kind: str, call: Call) -> None:
        self._is_settled = False
        self._refuse_own_function(f"{kind}_function")
        if kind == "train" and self.exact:
            _check_repeats(self._model)
        self._trace_again(kind, call)

        def function(iterator: Any) -> Any:
            engine = self._ready_engine()
            return engine.train(iterator) if kind == "train" else engine.test(iterator)

        # Unless they are exact, each worker evaluates whole batches, as plain Keras does.
        is_on_shares = kind == "train" or self.exact
        checked = self._with_check(kind, self._noted(function)) if is_on_shares else function
        attach(self._model, f"{kind}_function", checked)

    def _trace_again(self, kind: str, call: Call) -> None:
        """Lets a step be traced again if Keras would: another part of the model may be frozen, or have changed."""
        if self._engine is not None and not self._is_kept(f"{kind}_function", call):
            self._engine.trace_again(kind)

    def _count_end_of_data(self, iterator: Any) -> None:
        if not isinstance(iterator, shards.Pass):  # of what workers read, only they know the length
            super()._count_end_of_data(iterator)

    def _check_own_code(self, kind: str, rows: FirstRows) -> None:
        """Tries steps out on copies of the variables here, except for large tables: of these a few rows are read."""
        if self._backend.workers.hang:
            logger().warning("a worker hangs, so a step of %sing is not compared with one process.", kind)
            return
        optimizers = self._optimizers()
        with descending(optimizers):
            variables = [*self._model.variables, *itertools.chain.from_iterable(map(state_of, optimizers))]
        small = [each for each in variables if keras_model.backing(each).shape.num_elements() <= _SMALL]
        rows.away = list(map(keras_model.backing, small))
        with at_home(small):
            super()._check_own_code(kind, rows)

    def _make_predict_function(self, call: Call) -> None:
        self._trace_again("predict", call)
        attach(self._model, "predict_function", self._with_check("predict", lambda b: self._ready_engine().predict(b)))

    def _collect_logs(self, call: Call) -> None:
        """Waits until all steps are done. No other rank has counted anything."""
        if self._engine is not None:
            call.change("logs", self._engine.last_logs)

    def _writing(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """What Keras itself writes it reads first; TensorFlow writes a SavedModel, where the variables are."""
        return at_home(self._model.variables) if call.name == "export" else contextlib.nullcontext()

    # --- The strategy that Keras uses ---

    def local(self) -> Any:
        """There is no model of this process alone: its variables are on the servers."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if (on_workers := shards.stood_for(dataset)) is not None:  # each worker reads a batch of its own anyway
            self.given, self.element_spec, self._groups_next = dataset, on_workers.element_spec, False
            self.distribute = None
            return dataset
        return super().experimental_distribute_dataset(dataset)

    def prepare(self, epoch_iterator: Any) -> None:
        if isinstance(keras_fit.distributed_dataset(epoch_iterator), tf.data.Dataset):
            super().prepare(epoch_iterator)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return dataset

    # --- Verification. With verify=True the engine asks for it: its steps are not run by Keras. ---

    def whole(self, batch: Tried) -> Any:
        self._spec = batch.spec
        return batch_of_shares(batch.read())

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        """Keras may compute something else if it knows the number of rows: it counts a batch, or each row of it."""
        if self._spec is not None and not tf.executing_eagerly():
            hidden = tf.compat.v1.placeholder_with_default
            whole = tf.nest.map_structure(
                lambda leaf, spec: hidden(leaf, spec.shape) if isinstance(leaf, tf.Tensor) else leaf, whole, self._spec
            )
        return super().plain(function, whole)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        if isinstance(batch, Tried):
            assert self._applied is not None
            return batch.run(self._applied)
        return super()._run(function, batch)  # a few rows, on replicas in this process

    def _step_on(self, shares: Shares, function: Callable[..., Any]) -> Callable[[int], Any]:
        step = super()._step_on(shares, function)

        def here(index: int) -> Any:
            with tf.device(HERE):
                return step(index)

        return here


def _check_repeats(model: keras.Model) -> None:
    """Raises `NotSupportedError` for `exact=True` with layers for which each step would be run again and again."""
    if normalizations := keras_layers.normalizations_of_a_share(model):
        names = ", ".join(repr(layer.name) for layer in normalizations[:3])
        raise NotSupportedError(
            "With parameter servers the shares of a batch cannot meet within a step. For exact=True a step would be "
            "run twice more for each BatchNormalization.",
            f"exact=True, and {len(normalizations)} of these layers: {names}{', ...' * (len(normalizations) > 3)}",
            "Leave exact=True out: the moving averages are then those of the shares, weighted by examples. Or use a "
            "backend that reduces within the step: horovod, multi_worker, mirrored.",
        )


class CoordinatorLoop(ReplicaLoop):
    """A step is one TensorFlow function, of which each worker runs its part. It needs no engine, and waits for all.

    The coordinator gives `kd.shard` a dataset function. That is traced for each worker, and may shard a dataset.
    """

    _backend: Coordinator

    def _sharded(self, source: shards.Function) -> Any:
        context = shards.INPUT_CONTEXT.get()
        if context is not None:
            return source(context)
        return shards.DatasetFunction(source, self._backend.workers.size, self._backend.num_replicas)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        context = shards.INPUT_CONTEXT.get()
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
