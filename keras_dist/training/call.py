"""A call of a model's method, whose arguments can be changed, and the building of a model before its first step."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_fit, keras_model
from keras_dist.data.shares import Shares, any_batch_size
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.step import Step
from keras_dist.training.trial import as_tensors


@dataclasses.dataclass(eq=False)
class Call:
    """A call that a wrapper can inspect and change before it makes it."""

    name: str
    function: Callable[..., Any]  # the plain method
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def get(self, name: str) -> Any:
        if name in (given := self.given()):
            return given[name]
        parameter = inspect.signature(self.function).parameters.get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """Replaces an argument by `change(argument)`."""
        if name in self._positional[: len(self.args)]:
            index = self._positional.index(name)
            self.args = (*self.args[:index], change(self.args[index]), *self.args[index + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: change(self.kwargs.get(name))}

    def set(self, name: str, value: Any) -> None:
        self.change(name, lambda _: value)

    def given(self) -> dict[str, Any]:
        return {**dict(zip(self._positional, self.args, strict=False)), **self.kwargs}

    @functools.cached_property
    def _positional(self) -> list[str]:
        """The names of the arguments by position. What `*args` takes is passed to Keras's own method."""
        parameters = inspect.signature(self.function).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        passes_on = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return own + keras_fit.argument_names(self.name)[len(own) :] if passes_on else own


def batches_of(model: keras.Model, call: Call) -> int | None:
    """Returns how many batches of its data a call of `fit`, `evaluate` or `predict` reads, if it was told."""
    is_fit = call.name == "fit"
    steps = call.get("steps_per_epoch" if is_fit else "steps")
    epochs = call.get("epochs") if is_fit else 1
    if not (steps and epochs) or keras_fit.is_overridden(model, call.name):
        return None
    executions = -(-steps // model.steps_per_execution)
    return executions * model.steps_per_execution * (epochs - (call.get("initial_epoch") or 0))


def build(model: keras.Model, step: Callable[[Any], Any], spec: Any, batch: Any) -> None:
    """Builds a model from the specification of its data, or a batch if there is no dataset, if it is not built yet."""
    if keras_model.is_built(model):
        return
    if spec is not None:
        spec = spec.parts[0].data if isinstance(spec, Shares) else spec
    else:
        spec = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else any_batch_size(tf.type_spec_from_value(leaf)), as_tensors(batch)
        )
    try:
        if keras_model.has_call(model):
            keras_model.build(model, spec)
        else:  # layers that `call` cannot build (a GAN): the trace creates the variables, and never runs
            _trace(step, spec)
    except Exception as error:
        # Keras then builds the model while it traces the first step. The ranks' weights are compared after that step.
        logger().debug("the model cannot be built from a specification of its input: %s", error)


def build_optimizers(model: keras.Model, optimizers: Sequence[Any], spec: Any) -> None:
    """Creates the variables of a built model's optimizers, before another run's values of them are loaded."""
    if all(optimizer.built for optimizer in optimizers):
        return
    if [*optimizers] == [model.optimizer]:
        model.optimizer.build(model.trainable_variables)
    else:  # the trace shows which weights each of several trains (a GAN)
        _trace(model.train_step, spec)


def _trace(step: Callable[[Any], Any], spec: Any) -> None:
    def run(data: Any) -> Any:
        # Optimizers and `kd.all_reduce` refuse to reduce outside of a step.
        with step_module.entered(Step(tf.constant(1), tf.constant(1), tf.constant(0.0), is_plain=True)):
            return step(data)

    spec = tf.nest.map_structure(lambda part: None if isinstance(part, tf.OptionalSpec) else part, spec)
    tf.function(run, autograph=False).get_concrete_function(spec)
