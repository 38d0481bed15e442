"""The wrappers around a model's `compile`, `fit`, `evaluate`, `predict` and `save`.

They are attributes of the one model, set over the methods of its class, so the class, its configuration and
its files stay those of a plain model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_compat
from keras_dist.compat.keras_compat import attach
from keras_dist.state import weights
from keras_dist.state.checkpoint import write_model, write_on_chief
from keras_dist.step import losses
from keras_dist.step import step as step_module
from keras_dist.step.agreement import agreement_of
from keras_dist.step.optimizer import distribute_optimizer, optimizers_of
from keras_dist.training import building, refusals
from keras_dist.training.arguments import argument_of, with_argument
from keras_dist.training.in_step import arrange, arrange_for_evaluation
from keras_dist.training.options import Options

_ATTACHED = "_keras_dist"
_WRAPPED = (
    "compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
    "save", "save_weights", "export", "compute_loss", "make_train_function", "make_test_function",
    "make_predict_function",
    keras_compat.SYMBOLIC_BUILD, keras_compat.METRICS_RESULT,
)  # fmt: skip


def distribute_model(model: keras.Model, backend: Backend, options: Options) -> keras.Model:
    """Makes `compile`, `fit`, `evaluate`, `predict` and `save` of this model span all ranks, in place.

    Args:
        model: The user's model.
        backend: How the ranks talk.
        options: What `kd.distribute` was asked for.
    """
    existing = getattr(model, _ATTACHED, None)
    if existing is not None:
        existing.options.check_again(options)
    else:
        distributed = DistributedModel(model, backend, options)
        attach(model, _ATTACHED, distributed)
        distributed.attach()
    return model


class DistributedModel:
    """What makes one model a distributed one.

    Args:
        model: The user's model.
        backend: How the ranks talk.
        options: What `kd.distribute` was asked for.
    """

    def __init__(self, model: keras.Model, backend: Backend, options: Options) -> None:
        self.options = options
        self._model = model
        self._backend = backend
        self._data = options.data
        from keras_dist.backends.local.strategy import replica_of

        self._replica = replica_of(model, backend, options.data)
        self._agreement = agreement_of(backend.topology.size)
        self._plain: dict[str, Callable[..., Any]] = {}
        self._checked = False
        self._last_kind = ""  # of step: "train", "test" or "predict"

    def attach(self) -> None:
        """Sets the wrappers, and distributes what `compile` has made already."""
        if keras_compat.explicit_jit(self._model):
            self._switch_jit_off()
        refusals.check_model(self._model)
        self._backend.check_variables(self._model.variables)
        keras_compat.set_strategy(self._model, self._replica)
        keras_compat.reset_functions(self._model)
        for name in _WRAPPED:
            self._plain[name] = getattr(self._model, name)
            attach(self._model, name, self._wrapper(name))
        self._distribute_optimizers()

    def _wrapper(self, name: str) -> Callable[..., Any]:
        plain, distributed = self._plain[name], getattr(self, "_" + name.removeprefix("_"))

        @functools.wraps(plain)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._replica.is_local:
                return self._locally(name, *args, **kwargs)
            return distributed(*args, **kwargs)

        return wrapper

    def _locally(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the plain model, in a callback that only the chief runs."""
        if name in ("save", "save_weights"):
            return write_model(self._plain[name], name, args, kwargs)
        if name in ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "fit"):
            with keras_compat.other_functions(self._model):
                return self._plain[name](*args, **kwargs)
        return self._plain[name](*args, **kwargs)

    # --- compile ---

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        jit = argument_of(self._plain["compile"], "jit_compile", args, kwargs)
        if jit is True:
            refusals.refuse_jit()
        self._plain["compile"](*args, **kwargs)
        refusals.note_jit(self._model, jit, self._backend.topology.is_chief)
        self._checked = False
        self._distribute_optimizers()

    def _switch_jit_off(self) -> None:
        """A model that was compiled before it was distributed: asked for, or Keras's default on a GPU."""
        if not keras_compat.would_jit(self._model):
            refusals.refuse_jit()
        refusals.note_jit_is_off(self._backend.topology.is_chief)
        self._model.jit_compile = False

    def _distribute_optimizers(self) -> list[Any]:
        optimizers = optimizers_of(self._model)
        for optimizer in optimizers:
            distribute_optimizer(optimizer, self._backend, self._agreement, self.options.scale_learning_rate)
        return optimizers

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _reading(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Python generators are read by the chief, unless the user says otherwise: each rank has another one."""
        given = [argument_of(self._plain[name], argument, args, kwargs) for argument in ("x", "validation_data")]
        for source in given:
            refusals.refuse_bare_function(source)
        if self._data is None and any(isinstance(source, types.GeneratorType) for source in given):
            self._replica.read_as("chief", "a Python generator")
        try:
            yield
        finally:
            self._replica.read_as(self._data)

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = self._distribute_optimizers()
        args, kwargs = self._for_this_rank(
            "fit", args, kwargs, lambda given: arrange(given, self._backend, self._replica, optimizers)
        )
        grouping = self._replica.grouping(self.options.batch == "per_replica")
        with self._replica.interrupts.deferred(), self._explained(), self._reading("fit", args, kwargs), grouping:
            return self._plain["fit"](*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keras_compat.EVALUATE_IN_FIT):  # called by `fit`, which has settled and arranged everything
            return self._plain["evaluate"](*args, **kwargs)
        return self._run("evaluate", args, kwargs)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict", args, kwargs)

    @contextlib.contextmanager
    def _in_call(self, call: str) -> Iterator[None]:
        self._backend.enter(call)
        try:
            yield
        finally:
            self._backend.leave()

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._for_this_rank(
            name, args, kwargs, lambda given: arrange_for_evaluation(given, self._backend, self._replica)
        )
        with (
            self._replica.interrupts.deferred(),
            self._explained(),
            self._reading(name, args, kwargs),
            self._replica.grouping(False),
        ):
            self._settle(f"model.{name}")
            if name == "evaluate":
                return self._plain[name](*args, **kwargs)
            # Prediction is one call for the watchdog: ranks also meet between its steps, to read.
            with self._in_call("model.predict (steps)"), keras_compat.epoch_iterators(self._replica.prepare):
                return self._plain[name](*args, **kwargs)

    def _train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_batch("train_on_batch", args, kwargs)

    def _test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_batch("test_on_batch", args, kwargs)

    def _on_batch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The metrics of one batch are those of all ranks' shares."""
        return_dict = argument_of(self._plain[name], "return_dict", args, kwargs)
        args, kwargs = with_argument(self._plain[name], "return_dict", args, kwargs, lambda _: True)
        with self._explained():
            self._start_alike_once(f"model.{name}")
            if not self._backend.topology.is_chief:  # Keras before 3.15 counts on: what all have counted the chief has
                self._model.reset_metrics()
            logs = self._plain[name](*args, **kwargs)
            logs = self._get_metrics_result_or_logs(logs)
        logs = {key: float(value) for key, value in logs.items()}
        return logs if return_dict else keras_compat.flatten_metrics(self._model, logs)

    def _predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained():
            self._settle("model.predict_on_batch")
            return self._plain["predict_on_batch"](*args, **kwargs)

    def _for_this_rank(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrange_callbacks: Callable[[Any], list[Any]],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arranges the callbacks, and keeps everybody but the chief quiet."""
        plain = self._plain[name]
        args, kwargs = with_argument(plain, "callbacks", args, kwargs, arrange_callbacks)
        if not self._backend.topology.is_chief:
            args, kwargs = with_argument(plain, "verbose", args, kwargs, lambda _: 0)
        return args, kwargs

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of collectives into ours, which name rank and cause."""
        try:
            yield
        except Exception as error:
            explained = self._backend.translate(self._agreement.explain(error))
            if explained is error:
                raise
            raise explained from error

    def _settle(self, call: str) -> None:
        if keras_compat.is_built(self._model):
            weights.settle(self._model, self._backend, call)
        else:
            self._backend.all_gather_object(call)

    def _start_alike_once(self, call: str) -> None:
        """`fit` starts all ranks alike each time; a loop over batches does so with its first one."""
        if not self._checked:
            weights.start_alike(self._model, optimizers_of(self._model), self._backend, call)
            self._checked = True

    # --- What Keras calls inside fit, evaluate and predict ---

    def _make_train_function(self, force: bool = False) -> None:
        self._make_function("train", force)

    def _make_test_function(self, force: bool = False) -> None:
        self._make_function("test", force)

    def _make_predict_function(self, force: bool = False) -> None:
        """Lets Ctrl-C stop all ranks before the same step. For the watchdog `predict` is one call."""
        if self._model.predict_function is not None and not force:
            return
        self._plain["make_predict_function"](force)
        function = self._model.predict_function

        def interruptible(iterator: Any) -> Any:
            self._replica.interrupts.before_step()
            return function(iterator)

        attach(self._model, "predict_function", interruptible)

    def _make_function(self, kind: str, force: bool) -> None:
        """Lets the watchdog know that this rank is in a step, and checks the weights after the first."""
        name, backend = f"{kind}_function", self._backend
        if getattr(self._model, name) is not None and not force:
            return
        self._plain[f"make_{name}"](force)
        function, call = getattr(self._model, name), f"model.fit ({kind}ing steps)"

        def watched(iterator: Any) -> Any:
            self._last_kind = kind
            self._replica.interrupts.before_step()
            backend.enter(call)
            had_data = True
            try:
                return function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                had_data = False
                raise
            finally:
                backend.leave(had_data)

        def first(iterator: Any) -> Any:
            outputs = watched(iterator)
            attach(self._model, name, watched)
            weights.settle(self._model, backend, "model.fit (first step)")
            return outputs

        attach(self._model, name, first if kind == "train" else watched)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss, step = self._plain["compute_loss"](*args, **kwargs), step_module.current()
        if step is None or not tf.is_tensor(loss) or loss.shape.rank in (0, None):
            return loss
        return losses.of_each_example(step, loss)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model before the first step, so that all ranks can start with the chief's weights."""
        refusals.check_model(self._model)
        if iterator is not None:
            self._replica.prepare(iterator)
        building.build(self._model, iterator, data_batch)
        self._backend.check_variables(self._model.variables)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Returns the logs of an epoch, or of an evaluation, over the examples of all ranks."""
        are_metrics = keras_compat.logs_are_metrics(self._model, logs)
        own = None if are_metrics or not isinstance(logs, dict) else {key: float(v) for key, v in logs.items()}
        # A rank that has stopped an evaluation by itself has seen fewer examples than the others: they are told.
        was_stopped = self._last_kind == "test" and getattr(self._model, "stop_evaluating", False)
        how = " that model.stop_evaluating has stopped" if was_stopped else ""
        call = f"the end of an epoch or an evaluation{how}"
        averaged = weights.settle_metrics(self._model, self._backend, call, own, self._replica.last_count())
        return self._plain[keras_compat.METRICS_RESULT](logs) if averaged is None else averaged

    # --- save ---

    def _save(self, *args: Any, **kwargs: Any) -> Any:
        return self._save_on_chief("save", args, kwargs)

    def _save_weights(self, *args: Any, **kwargs: Any) -> Any:
        return self._save_on_chief("save_weights", args, kwargs)

    def _export(self, *args: Any, **kwargs: Any) -> Any:
        return self._save_on_chief("export", args, kwargs)

    def _save_on_chief(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = args[0] if args else kwargs.get("filepath")
        call = f"model.{name}({os.fspath(path)!r})" if isinstance(path, str | os.PathLike) else f"model.{name}(...)"
        with self._explained():
            self._settle(call)

        def write() -> Any:
            with self._replica.local():
                return write_model(self._plain[name], name, args, kwargs)

        return write_on_chief(self._backend, call, write)
