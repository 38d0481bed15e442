"""The wrappers around a model's methods on the coordinator: Keras's own `fit` runs here, its steps on the workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_dist.backends.parameter_server.backend import ParameterServer
from keras_dist.backends.parameter_server.engine import Engine
from keras_dist.backends.parameter_server.functions import Functions, attach_recorder, check_async
from keras_dist.backends.parameter_server.placement import Placement
from keras_dist.backends.parameter_server.reading import OnWorkers, exchange
from keras_dist.backends.parameter_server.strategy import Reader
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_compat, keras_placement
from keras_dist.compat.keras_compat import attach
from keras_dist.errors import ConfigurationError
from keras_dist.state.checkpoint import write_model
from keras_dist.step import learning_rate, losses
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import build_optimizer, optimizers_of
from keras_dist.training import building, refusals
from keras_dist.training.arguments import argument_of, with_argument
from keras_dist.training.in_step import prepare
from keras_dist.training.options import Options

_ATTACHED = "_keras_dist"
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_WRITERS = ("save", "save_weights", "export")
_READ_BY_WORKERS = ("fit", "evaluate")
_WRAPPED = (
    *_CALLS, *_WRITERS, "compile", "compute_loss", *keras_placement.MAKE_FUNCTIONS, keras_compat.SYMBOLIC_BUILD,
    keras_compat.METRICS_RESULT,
)  # fmt: skip


def coordinate(target: Any, backend: Backend, options: Options) -> None:
    """Makes a model compute on the workers and keep its variables on the servers, in place.

    Args:
        target: The user's model.
        backend: Who computes.
        options: What `kd.distribute` was asked for.

    Raises:
        ConfigurationError: If it is an optimizer.
    """
    assert isinstance(backend, ParameterServer)
    if not isinstance(target, keras.Model):
        raise ConfigurationError(
            "With parameter servers a model is distributed, not an optimizer.",
            type(target).__name__,
            "Call kd.distribute(model) and model.fit; a loop of your own needs another backend.",
        )
    existing = getattr(target, _ATTACHED, None)
    if existing is not None:
        existing.options.check_again(options)
        return
    coordinated = CoordinatedModel(target, backend, options)
    attach(target, _ATTACHED, coordinated)
    coordinated.attach()


class CoordinatedModel:
    """What makes one model compute on the workers.

    Args:
        model: The user's model.
        backend: Who computes.
        options: What `kd.distribute` was asked for.
    """

    def __init__(self, model: keras.Model, backend: ParameterServer, options: Options) -> None:
        self.options = options
        self._model = model
        self._backend = backend
        self._placement = Placement(backend.servers())
        self._reader = Reader(model, backend, options.data)
        self._plain: dict[str, Callable[..., Any]] = {}
        self._plain_apply: dict[int, Callable[..., Any]] = {}
        self._engine: Engine | None = None
        self._traced_for: Sequence[Any] = []
        # Asynchronous steps are of one batch of one worker in any case.
        self._groups = options.batch == "per_replica" and backend.mode == "sync"
        self._depth = 0
        self._waits = False

    def attach(self) -> None:
        """Sets the wrappers, and moves what is there already."""
        if keras_compat.explicit_jit(self._model):
            refusals.refuse_jit()
        refusals.check_model(self._model)
        keras_compat.set_strategy(self._model, self._reader)
        keras_compat.reset_functions(self._model)
        for name in _WRAPPED:
            self._plain[name] = getattr(self._model, name)
            attach(self._model, name, self._wrapper(name))
        self._place()

    def _wrapper(self, name: str) -> Callable[..., Any]:
        common = self._call if name in _CALLS else self._write if name in _WRITERS else None
        own = functools.partial(common, name) if common else getattr(self, "_" + name.removeprefix("_"))

        @functools.wraps(self._plain[name])
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        return wrapper

    def _place(self) -> None:
        optimizers = optimizers_of(self._model)
        if self._backend.mode == "async":
            check_async(optimizers)
        with self._explained():
            self._placement.place_model(self._model)
            for optimizer in optimizers:
                if (rule := self.options.scale_learning_rate) is not None:
                    learning_rate.scale(optimizer, rule, self._backend.num_replicas)
                self._plain_apply[id(optimizer)] = attach_recorder(optimizer)
                self._placement.place_optimizer(optimizer)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        jit = argument_of(self._plain["compile"], "jit_compile", args, kwargs)
        if jit is True:
            refusals.refuse_jit()
        self._plain["compile"](*args, **kwargs)
        refusals.note_jit(self._model, jit, True)
        self._engine = None
        self._place()

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of TensorFlow's network into ours, which name who was lost."""
        try:
            yield
        except Exception as error:
            explained = self._backend.translate(error)
            if explained is error:
                raise
            raise explained from error

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        for argument in ("x", "validation_data"):
            args, kwargs = self._with_stand_in(name, argument, args, kwargs)
        self._depth += 1
        self._waits = name == "train_on_batch"
        grouping = self._reader.grouping(name == "fit" and self._groups)
        if name == "fit":
            prepare(argument_of(self._plain[name], "callbacks", args, kwargs), self._backend)
        try:
            with self._explained(), keras_compat.epoch_iterators(self._prepare), grouping:
                return self._plain[name](*args, **kwargs)
        except BaseException:
            if self._engine is not None:
                self._engine.forget()
            raise
        finally:
            self._depth -= 1
            if self._engine is not None and not self._depth:
                self._engine.drain()

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a file whole or not at all: this process may be killed at any moment, and goes on from it."""
        # What Keras itself writes it reads first; a SavedModel is written by TensorFlow.
        place = self._placement.at_home(self._model.variables) if name == "export" else contextlib.nullcontext()
        with self._explained(), place:
            return write_model(self._plain[name], name, args, kwargs)

    def _with_stand_in(self, name: str, argument: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Puts a data set that Keras knows in the place of what workers read."""
        plain = self._plain[name]
        given = argument_of(plain, argument, args, kwargs)
        refusals.refuse_bare_function(given)
        if not isinstance(given, OnWorkers):
            return args, kwargs
        if name not in _READ_BY_WORKERS:
            iter(given)  # raises
        weights = argument_of(plain, "class_weight", args, kwargs) if argument == "x" else None
        if weights is not None:
            args, kwargs = with_argument(plain, "class_weight", args, kwargs, lambda _: None)
        return with_argument(plain, argument, args, kwargs, lambda _: given.weighted(weights).stand_in())

    def _prepare(self, epoch_iterator: Any) -> None:
        """At the end of an epoch Keras waits for all devices, and would meet the error of a worker that was lost."""
        exchange(epoch_iterator)
        attach(epoch_iterator, "tf_sync", self._drain)

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.drain()

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds model and optimizer before anything is traced, and moves their variables to the servers."""
        refusals.check_model(self._model)
        if iterator is not None:
            self._reader.prepare(iterator)
        building.build(self._model, iterator, data_batch)
        self._build_optimizers()
        self._place()

    def _build_optimizers(self) -> None:
        optimizer = getattr(self._model, "optimizer", None)
        if isinstance(optimizer, keras.Optimizer) and not optimizer.built and self._model.built:
            self._place()
            build_optimizer(optimizer, self._model.trainable_variables)

    def _ready_engine(self) -> Engine:
        """Returns the engine; a new one if what was traced no longer holds."""
        model, optimizers = self._model, optimizers_of(self._model)
        self._place()
        variables = [*model.trainable_variables, *model.variables, *model.metrics_variables]
        variables += [variable for optimizer in optimizers for variable in optimizer.variables]
        # The objects themselves, not their ids: those of variables that are gone may be given to others.
        now = [*map(keras_placement.backing, variables), *optimizers, model.run_eagerly]
        if self._engine is None or not _same(self._traced_for, now):
            self._engine = Engine(model, self._backend, Functions(model, self._plain_apply))
            self._traced_for = now
        return self._engine

    # --- What Keras calls inside ---

    def _make_train_function(self, force: bool = False) -> None:
        def train(iterator: Any) -> Any:
            engine = self._ready_engine()
            engine.waits = self._waits
            return engine.train(iterator)

        attach(self._model, "train_function", train)

    def _make_test_function(self, force: bool = False) -> None:
        def test(iterator: Any) -> Any:
            return self._ready_engine().test(iterator)

        attach(self._model, "test_function", test)

    def _make_predict_function(self, force: bool = False) -> None:
        attach(self._model, "predict_function", lambda batches: self._ready_engine().predict(batches))

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        loss, step = self._plain["compute_loss"](*args, **kwargs), step_module.current()
        if step is None or not tf.is_tensor(loss) or loss.shape.rank in (0, None):
            return loss
        return losses.of_each_example(step, loss)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Returns the logs of an epoch, once all its steps are done."""
        if self._engine is not None:
            logs = self._engine.last_logs(logs)
        return self._plain[keras_compat.METRICS_RESULT](logs)


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
