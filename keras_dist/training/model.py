"""A model that runs Keras's own steps in this process: on each rank, on several replicas, or alone."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model
from keras_dist.compat.keras_model import attach
from keras_dist.state import weights
from keras_dist.step.metrics import flat
from keras_dist.step.optimizer import distribute_optimizer, optimizers_of
from keras_dist.step.step import Seen, agreement_of, check_seen
from keras_dist.training import refusals
from keras_dist.training.call import Call
from keras_dist.training.loop import Loop, RankLoop
from keras_dist.training.options import Options
from keras_dist.training.resuming import Fitting
from keras_dist.training.strategy import RankStrategy
from keras_dist.training.wrapper import Wrapper

_AUTO = "_keras_dist_auto_executions"
# The models that `kd.distribute` got. They themselves stay as they are.
_backends: MutableMapping[keras.Model, Backend] = weakref.WeakKeyDictionary()


def _fit(model: keras.Model, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call("fit", types.MethodType(plain, model), args, kwargs)
    if (backend := _backends.get(model)) is None:
        return call()
    fitting = Fitting(model, backend, lambda: optimizers_of(model), getattr(model, _AUTO, None))

    def watch(epoch_iterator: Any) -> None:
        # Without a strategy Keras iterates over the dataset itself.
        fitting.watch(epoch_iterator, keras_fit.distributed_dataset(epoch_iterator), lambda rest: rest)

    with fitting.fit():
        given = call.get("callbacks")
        if (arranged := fitting.arrange(given, given)) is given:
            return call()
        call.set("callbacks", arranged)
        call.change("x", fitting.ordered)
        with keras_fit.epoch_iterators(watch):
            return call()


class LocalTraining(Backend):
    """A backend on which `fit` runs Keras's own steps in this process, on this process's shares."""

    def distribute(self, target: keras.Model | keras.optimizers.Optimizer, options: Options) -> None:
        if self.num_replicas == 1:
            if isinstance(target, keras.Model):  # its `fit` can commit and resume, and put steps together
                _backends[target] = self
                if not hasattr(target, _AUTO) and (auto := options.automatic_executions(target, self)) is not None:
                    attach(target, _AUTO, auto)
                keras_fit.wrap_fit(_fit)
        elif isinstance(target, keras.Model):
            ModelWrapper(target, self, options, self.strategy_of(target, options.data)).attach()
        else:
            options.scale(target, self.num_replicas)
            distribute_optimizer(target, self, agreement_of(self.topology.size))

    def strategy_of(self, model: keras.Model, data: str | None) -> RankStrategy:
        return RankStrategy(model, self, data)

    @functools.cached_property
    def loop(self) -> Loop:
        return Loop() if self.num_replicas == 1 else RankLoop(self)


class ModelWrapper(Wrapper):
    """Distributes a model that is computed in this process."""

    strategy: RankStrategy

    def __init__(self, model: keras.Model, backend: Backend, options: Options, strategy: RankStrategy) -> None:
        super().__init__(model, backend, options, strategy)
        self._agreement = agreement_of(backend.topology.size)
        self._state_is_broadcast = False

    def _explain(self, error: BaseException) -> BaseException:
        return super()._explain(self._agreement.explain(error))

    def _compile(self, call: Call) -> None:
        super()._compile(call)
        self._state_is_broadcast = False

    def _prepare_optimizer(self, optimizer: Any) -> None:
        distribute_optimizer(optimizer, self._backend, self._agreement)

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        with super()._running(call), contextlib.ExitStack() as stack:
            sources = (call.get("x"), call.get("validation_data"))
            if self.options.data is None and any(isinstance(source, types.GeneratorType) for source in sources):
                self.strategy.read_as("chief", "a Python generator")  # generators may differ by rank
            stack.callback(self.strategy.read_as, self.options.data)
            self.strategy.seen()  # what a call that failed has left
            if call.name in ("evaluate", "predict", "predict_on_batch"):
                self._synchronize(f"model.{call.name}")
            if call.name == "fit":  # before its data: an error shall name the call that the script has made
                self._backend.all_gather_object("model.fit (start)")
            if call.name == "predict":
                # For the watchdog, `predict` is one call: reading its data has collectives between the steps.
                stack.enter_context(self._in_call("model.predict (steps)"))
                stack.enter_context(keras_fit.epoch_iterators(self.strategy.prepare))
            if call.name in ("train_on_batch", "test_on_batch"):
                if not self._state_is_broadcast:  # before the first batch; each `fit` does it in `Synchronizer`
                    weights.broadcast_state(self._model, self._optimizers(), self._backend, f"model.{call.name}")
                    self._state_is_broadcast = True
                if not self._backend.topology.is_chief:
                    # Before 3.15 Keras does not reset them here. The chief's metrics hold the totals of all ranks.
                    self._model.reset_metrics()
            was_built = keras_model.is_built(self._model)
            yield
            if not was_built and call.name in ("evaluate", "predict", "predict_on_batch"):
                self._synchronize(f"model.{call.name} (of a model that was not built)")
            if call.name in ("predict", "predict_on_batch"):
                seen = self._backend.all_gather_object(f"model.{call.name} (end)", self.strategy.seen())
                check_seen([Seen(*each) for each in seen])

    def _synchronize(self, call: str) -> None:
        if keras_model.is_built(self._model):
            weights.synchronize(self._model, self._optimizers(), self._backend, call)
        else:
            self._backend.all_gather_object(call)

    # --- What Keras calls inside fit, evaluate and predict ---

    def _make_predict_function(self, call: Call) -> None:
        """Lets Ctrl-C stop all ranks before the same step."""
        if (function := self._made("predict_function", call)) is None:
            return

        def interruptible(iterator: Any) -> Any:
            self.strategy.interrupts.before_step()
            return function(iterator)

        attach(self._model, "predict_function", interruptible)

    def _make_function(self, kind: str, call: Call) -> None:
        """Reports steps to the watchdog, and compares the weights after the first training step."""
        name, backend, step = f"{kind}_function", self._backend, f"model.fit ({kind}ing steps)"
        if (function := self._made(name, call)) is None:
            return
        if keras_fit.is_overridden(self._model, f"make_{name}"):
            function = self._checked(name, function)
        function = self._noted(function)

        def watched(iterator: Any) -> Any:
            self.strategy.interrupts.before_step()
            backend.enter(step)
            had_data = True
            try:
                logs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                had_data = False
                raise
            finally:
                backend.leave(had_data)
            return self._logs_for_callbacks(kind, logs)

        is_first = kind == "train" and not self._was_verified

        def compared(iterator: Any) -> Any:
            nonlocal is_first
            outputs = watched(iterator)
            if is_first:
                is_first = False
                self.strategy.note_whole_batches()
                weights.compare(self._model, backend, "model.fit (first step)", self.strategy.seen())
            return outputs

        attach(self._model, name, self._with_check(kind, compared))

    def _logs_of_all(self, kind: str, logs: dict[str, Any]) -> dict[str, Any]:
        if self._backend.topology.size == 1:
            return logs
        logs, text = flat(logs), f"model.fit (the logs of a {kind}ing step)"
        with weights.of_all_ranks(self._model, self._backend, text, *self._others(kind, logs)) as averages:
            return {**super()._logs_of_all(kind, logs), **averages}

    def _others(self, kind: str, logs: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Returns the logs that come from no metric, and their weight on this rank."""
        others = {name: log for name, log in logs.items() if not self.strategy.logs.is_known(kind, name)}
        return others, self.strategy.last_count()

    def _checked(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Refuses a function of the script's own that, when it is traced, runs no step by the strategy."""
        is_checked = False

        def checked(iterator: Any) -> Any:
            nonlocal is_checked
            if is_checked:
                return function(iterator)
            self.strategy.has_run = False
            try:
                outputs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise
            except Exception as error:
                if self.strategy.has_run:
                    raise
                raise refusals.own_function(self._model, name) from error
            if not self.strategy.has_run:
                raise refusals.own_function(self._model, name)
            is_checked = True
            return outputs

        return checked

    def _metrics_result(self, call: Call) -> Any:
        # If one rank alone sets `stop_evaluating`, this text differs and all ranks raise an error.
        was_stopped = self._kind == "test" and getattr(self._model, "stop_evaluating", False)
        how = " that model.stop_evaluating stopped" if was_stopped else ""
        text, logs = f"the end of an epoch or an evaluation{how}", flat(call.get("logs") or {})
        others, weight = self._others(self._kind, logs)
        if self._kind == "train":
            self.strategy.loss_of_rank = weights.loss_of(self._model)
        averages = weights.synchronize_metrics(
            self._model, self._optimizers(), self._backend, text, others, weight, self.strategy.seen()
        )
        call.set("logs", {**logs, **averages})
        return super()._metrics_result(call)
