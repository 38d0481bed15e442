"""A model on the coordinator: Keras's own `fit` runs here, its steps run on the workers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_dist.backends.parameter_server.coordinator import (
    Coordinator,
    CoordinatorStrategy,
    OnWorkers,
    exchange,
    not_read_here,
)
from keras_dist.backends.parameter_server.engine import AsyncEngine, Engine, SyncEngine
from keras_dist.backends.parameter_server.functions import Functions, prepare_optimizer
from keras_dist.compat import keras_fit, keras_model
from keras_dist.compat.keras_model import attach
from keras_dist.errors import NotSupportedError
from keras_dist.step.optimizer import build_optimizer, parts_of
from keras_dist.training.call import Call
from keras_dist.training.options import Options
from keras_dist.training.wrapper import Wrapper


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
                    raise not_read_here(f"kd.shard(function) in model.{call.name}")
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
        exchange(epoch_iterator)
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

    def _make_train_function(self, call: Call) -> None:
        def train(iterator: Any) -> Any:
            engine = self._ready_engine()
            engine.waits = self._waits
            logs = engine.train(iterator)
            self._check_own_code("train")
            return logs

        self._refuse_own_function("train_function")
        self._keep_first_rows("train")
        attach(self._model, "train_function", train)

    def _make_test_function(self, call: Call) -> None:
        def test(iterator: Any) -> Any:
            logs = self._ready_engine().test(iterator)
            self._check_own_code("test")
            return logs

        self._refuse_own_function("test_function")
        if self.strategy.exact:  # else each worker evaluates whole batches, as plain Keras does
            self._keep_first_rows("test")
        attach(self._model, "test_function", test)

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
