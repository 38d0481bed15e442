"""The wrappers around a model's methods on the coordinator: Keras's own `fit` runs here, its steps on the workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_dist import building, losses, refusals
from keras_dist import step as step_module
from keras_dist.arguments import argument_of
from keras_dist.backends import keras_compat, keras_placement
from keras_dist.backends.base import Backend
from keras_dist.backends.keras_compat import attach
from keras_dist.backends.parameter_server import ParameterServer
from keras_dist.coordinator.engine import Engine
from keras_dist.coordinator.functions import Functions, attach_recorder, check_async
from keras_dist.coordinator.placement import Placement
from keras_dist.errors import ConfigurationError
from keras_dist.optimizer import optimizers_of
from keras_dist.options import Options

_ATTACHED = "_keras_dist"
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_WRAPPED = (
    *_CALLS, "compile", "compute_loss", *keras_placement.MAKE_FUNCTIONS, keras_compat.SYMBOLIC_BUILD,
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
        self._plain: dict[str, Callable[..., Any]] = {}
        self._plain_apply: dict[int, Callable[..., Any]] = {}
        self._engine: Engine | None = None
        self._traced_for: Sequence[Any] = []
        self._depth = 0
        self._waits = False

    def attach(self) -> None:
        """Sets the wrappers, and moves what is there already."""
        if keras_compat.explicit_jit(self._model):
            refusals.refuse_jit()
        refusals.check_model(self._model)
        keras_compat.reset_functions(self._model)
        for name in _WRAPPED:
            self._plain[name] = getattr(self._model, name)
            attach(self._model, name, self._wrapper(name))
        self._place()

    def _wrapper(self, name: str) -> Callable[..., Any]:
        own = functools.partial(self._call, name) if name in _CALLS else getattr(self, "_" + name.removeprefix("_"))

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
        self._depth += 1
        self._waits = name == "train_on_batch"
        try:
            with self._explained(), keras_compat.epoch_iterators(self._let_wait):
                return self._plain[name](*args, **kwargs)
        except BaseException:
            if self._engine is not None:
                self._engine.forget()
            raise
        finally:
            self._depth -= 1
            if self._engine is not None and not self._depth:
                self._engine.drain()

    def _let_wait(self, epoch_iterator: Any) -> None:
        """At the end of an epoch Keras waits for all devices, and would meet the error of a worker that was lost."""
        attach(epoch_iterator, "tf_sync", self._drain)

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.drain()

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds model and optimizer before anything is traced, and moves their variables to the servers."""
        refusals.check_model(self._model)
        building.build(self._model, iterator, data_batch)
        self._build_optimizers()
        self._place()

    def _build_optimizers(self) -> None:
        optimizer = getattr(self._model, "optimizer", None)
        if isinstance(optimizer, keras.Optimizer) and not optimizer.built and self._model.built:
            self._place()
            optimizer.build(self._model.trainable_variables)

    def _ready_engine(self) -> Engine:
        """Returns the engine; a new one if what was traced no longer holds."""
        model, optimizers = self._model, optimizers_of(self._model)
        self._place()
        variables = [*model.trainable_variables, *model.variables, *model.metrics_variables]
        variables += [variable for optimizer in optimizers for variable in optimizer.variables]
        # The objects themselves, not their ids: those of variables that are gone may be given to others.
        now = [*map(keras_placement.backing, variables), *optimizers, model.run_eagerly]
        if self._engine is None or not _same(self._traced_for, now):
            self._engine = Engine(model, self._backend, Functions(model, self._placement, self._plain_apply))
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
