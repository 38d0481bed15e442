"""What is refused at once, because it cannot give the results of one process, and what is not distributed at all."""

import atexit
import contextlib
import inspect
import os
import sys
import types
import weakref
from collections.abc import Iterable, MutableSet, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model
from keras_dist.errors import ConfigurationError, DistributionError, NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import outside_of_a_step

_PACKAGES = [sys.modules[name] for name in ("keras_dist", "keras", "tensorflow", "optree") if name in sys.modules]
_NOT_OF_SCRIPTS = (*(os.path.dirname(str(package.__file__)) + os.sep for package in _PACKAGES), contextlib.__file__)


def in_few_lines(error: DistributionError) -> DistributionError:
    """Leaves the frames that are not the script's out of one of our errors, as Keras does with its own.

    `keras.config.disable_traceback_filtering()` shows them.
    """
    if keras.config.is_traceback_filtering_enabled():
        error.__cause__ = None  # hides the context, too
        error.__traceback__ = _of_script(error.__traceback__)
    return error


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    if trace is None:
        return None
    following = _of_script(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_NOT_OF_SCRIPTS):
        return following
    return types.TracebackType(following, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def check_model(model: keras.Model) -> None:
    """Raises `NotSupportedError` if a model needs whole batches: each rank sees only its share."""
    for layer in keras_model.flatten_layers(model):
        if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
            raise NotSupportedError(
                "A stateful RNN keeps a state for each position in the batch. Splitting the batch would mix them up.",
                f"layer {layer.name!r} with stateful=True",
                "Set stateful=False, or train in one process.",
            )
    if (reason := keras_model.why_batch_size_is_fixed(model)) is not None:
        shapes = ", ".join(f"input {tensor.name!r} with batch_shape={tuple(tensor.shape)}" for tensor in model.inputs)
        raise NotSupportedError(
            f"The model computes batches of one size only, but each rank gets only its share of a batch: {reason}.",
            shapes,
            "Leave the batch size out of the model: keras.Input(shape=(...)), and -1 in the first place of a reshape.",
        )


def check_draws(random: Sequence[tuple[str, str]]) -> None:
    """Raises `NotSupportedError` for `exact=True` if a step draws by operations of TensorFlow: `random`, with lines."""
    if random:
        raise NotSupportedError(
            "exact=True gives random numbers of Keras those of one process, not those of `tf.random`.",
            ", ".join(dict.fromkeys(f"{kind} at {line}" for kind, line in random)),
            "Draw by `keras.random` with a SeedGenerator, or leave `exact` out.",
        )


def check_strategy(own: Any, variables: Iterable[Any]) -> None:
    """Raises `ConfigurationError` if the script's own `tf.distribute.Strategy` is active, or has made variables."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy is not own:
        raise _other_strategy(f"{type(strategy).__name__}, whose scope is open")
    for variable in variables:
        value = keras_model.backing(variable)
        if isinstance(value, tf.distribute.DistributedValues) and value.distribute_strategy is not own:
            raise _other_strategy(f"{variable.path!r}, a variable of {type(value.distribute_strategy).__name__}")


def _other_strategy(received: str) -> ConfigurationError:
    return ConfigurationError(
        "The script has a strategy of tf.distribute, but keras_dist distributes the model itself.",
        received,
        "Remove the strategy and its `with strategy.scope():`, and build and compile the model without them. "
        "kd.init() and kd.distribute(model) take their place.",
    )


def check_optimizer(optimizer: Any) -> None:
    """Raises `ConfigurationError` if Horovod has wrapped an optimizer: its class does not work in Keras 3."""
    if any(part.__module__.startswith("horovod.") for part in type(optimizer).__mro__):
        raise ConfigurationError(
            "The script has an optimizer of Horovod's own Keras layer, but keras_dist distributes the optimizer.",
            f"an optimizer {type(optimizer).__name__!r}, which hvd.DistributedOptimizer has wrapped",
            "Pass the Keras optimizer without hvd.DistributedOptimizer(...). See docs/migrating.md.",
        )


def own_function(model: keras.Model, name: str) -> NotSupportedError:
    """Returns the error for a `make_train_function` of the script's own that calls `train_step` by itself."""
    step = name.removesuffix("function") + "step"
    return NotSupportedError(
        "A function that runs a step by itself, and not by the model's strategy, cannot be distributed.",
        f"{type(model).__name__}.make_{name}",
        f"Override `{step}` instead. Or call `self.distribute_strategy.run(self.{step}, args=(data,))` in it, which "
        "parameter servers and a TPU do not support.",
    )


def refuse_bare_function(source: Any) -> None:
    if inspect.isroutine(source):
        raise ConfigurationError(
            "A function that returns a dataset needs kd.shard, which passes it the shard to read.",
            f"the function {source.__qualname__}",
            f"Pass kd.shard({source.__name__}).",
        )


ATTACHED = "_keras_dist"  # the attribute of a distributed model
_REMEDY = "Add `model = kd.distribute(model)` before `model.compile`"
DISTRIBUTED: MutableSet[keras.Model] = weakref.WeakSet()


def watch(backend: Backend) -> None:
    """Looks at everything that the script trains.

    The chief warns once, at the first `fit` of a model that is not distributed, or when the job ends. A loop of the
    script's own that updates a distributed model, but shares nothing, gets an error.
    """
    if backend.num_replicas == 1 and not backend.has_processes:
        return
    look = _Look(backend)
    keras_fit.before_training(look.before_training)
    keras_model.before_updates(look.before_update)
    if backend.topology.is_chief:
        atexit.register(look.at_exit)


class _Look:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_warned = False
        self._in_fit: MutableSet[Any] = weakref.WeakSet()  # optimizers of models that Keras trains, as warned

    def before_training(self, model: keras.Model) -> None:
        if hasattr(model, ATTACHED):
            return
        if (optimizer := getattr(model, "optimizer", None)) is not None:
            self._in_fit.add(optimizer)
        if not self._is_warned:
            self._warn(
                "the model %r is not distributed, so %s. %s. If this is intended, ignore this line.",
                model.name, self._consequence(), _REMEDY,
            )  # fmt: skip

    def before_update(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """An optimizer that is distributed has its own check, and one that a step applies is distributed there."""
        if self._backend.num_replicas == 1 or step_module.current() is not None or optimizer in self._in_fit:
            return
        updated = set(map(id, variables))
        if any(id(variable) in updated for model in DISTRIBUTED for variable in model.trainable_variables):
            raise outside_of_a_step(f"the update of a distributed model by the optimizer {optimizer.name!r}")

    def at_exit(self) -> None:
        """A job that failed has another message, and ranks may divide the work themselves, by `kd.rank()`."""
        if not (self._is_warned or self._backend.is_used or hasattr(sys, "last_value")):
            remedy = f"{_REMEDY}; in a custom loop `optimizer = kd.distribute(optimizer)`"
            self._warn("nothing was distributed, so %s. %s.", self._consequence(), remedy)

    def _consequence(self) -> str:
        size = self._backend.topology.size
        return f"each of the {size} ranks does the whole work alone" if size > 1 else "the replicas share no work"

    def _warn(self, text: str, *args: object) -> None:
        self._is_warned = True
        if self._backend.topology.is_chief:
            logger().warning(text, *args)
