"""A model whose variables belong to a `tf.distribute` strategy with one process: TPUStrategy.

The strategy runs the replicas; here batches get one shape, gradients are added up before they are clipped, and what is
printed, predicted and saved is that of the real examples.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dist.backends.tpu import executions, step
from keras_dist.backends.tpu.executions import Executions
from keras_dist.backends.tpu.strategy import Replicas
from keras_dist.compat import keras_compat, keras_strategy
from keras_dist.compat.keras_compat import attach
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import learning_rate
from keras_dist.step.optimizer import optimizers_of
from keras_dist.training.arguments import argument_of, takes, with_argument
from keras_dist.training.options import Options

_ATTACHED = "_keras_dist_tpu"
_NO_OPTIONS = Options()


_Model = TypeVar("_Model")


def distribute_on_strategy(
    model: _Model, strategy: tf.distribute.Strategy, options: Options = _NO_OPTIONS
) -> _Model:
    """Makes `compile`, `fit`, `evaluate` and `predict` exact under a strategy, in place. Twice is the same as once.

    Args:
        model: The user's model, made under the strategy.
        strategy: The strategy that its variables belong to.
        options: What `kd.distribute` was asked for.

    Raises:
        ConfigurationError: If the model was made outside of the strategy, or distributed with other options.
        NotSupportedError: If it is an optimizer, for a loop of the user's own, or options are asked for that a TPU
            doesn't have.
    """
    if not isinstance(model, keras.Model):
        raise NotSupportedError(
            "A loop of your own is not distributed on a TPU.",
            f"the optimizer {type(model).__name__}",
            "Put the step into `train_step` of a keras.Model and use `fit`.",
        )
    if (existing := getattr(model, _ATTACHED, None)) is not None:
        existing.options.check_again(options)
        return model
    if options.data not in (None, "split"):
        raise NotSupportedError(
            "On a TPU one process reads all data, also for a pod slice.",
            f"data={options.data!r}",
            "Leave `data` out, and pass all data.",
        )
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ConfigurationError(
                "The model was made before the TPU was connected, so its weights are not on it.",
                f"{variable.path}",
                "Move `kd.init()` above what makes the model.",
            )
    _advise_on_precision(keras.config.dtype_policy().name)
    wrappers = _Wrappers(model, strategy, options)
    attach(model, _ATTACHED, wrappers)
    wrappers.attach()
    return model


class _Wrappers:
    """What is set over the methods of one model."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, options: Options) -> None:
        self.options = options
        self._model = model
        self._strategy = strategy
        self._replicas = Replicas(model, strategy, options.batch == "per_replica")
        self._executions = Executions(model)
        self._plain: dict[str, Callable[..., Any]] = {}

    def attach(self) -> None:
        keras_compat.set_strategy(self._model, self._replicas)
        keras_compat.reset_functions(self._model)
        wrapped = {
            "compile": self._compile, "fit": self._fit, "evaluate": self._evaluate, "predict": self._predict,
            "train_on_batch": self._train_on_batch, "test_on_batch": self._test_on_batch,
            keras_compat.SYMBOLIC_BUILD: self._maybe_symbolic_build,
        }  # fmt: skip
        for name, wrapper in wrapped.items():
            self._plain[name] = getattr(self._model, name)
            attach(self._model, name, _in_place_of(self._plain[name], wrapper))
        if getattr(self._model, "compiled", False):
            self._switch_jit_off(self._model.jit_compile)
            self._prepare_optimizers()

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        plain = self._plain["compile"]
        asked = argument_of(plain, "jit_compile", args, kwargs)
        is_given = "steps_per_execution" in inspect.signature(plain).bind_partial(*args, **kwargs).arguments
        if takes(plain, "jit_compile"):
            args, kwargs = with_argument(plain, "jit_compile", args, kwargs, lambda _: False)
        with self._strategy.scope():
            plain(*args, **kwargs)
        self._executions.compiled(is_given)
        self._switch_jit_off(asked)
        self._prepare_optimizers()

    def _switch_jit_off(self, asked: Any) -> None:
        if asked is True:
            logger().warning("jit_compile=True is off on a TPU: TPUStrategy compiles the whole step by itself.")
        self._model.jit_compile = False

    def _prepare_optimizers(self) -> None:
        replicas = self._strategy.num_replicas_in_sync
        if replicas > 1:
            for optimizer in optimizers_of(self._model):
                if self.options.scale_learning_rate is not None:
                    learning_rate.scale(optimizer, self.options.scale_learning_rate, replicas)
                _reduce_first(optimizer)

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain["fit"]
        callbacks, *exactly = (
            argument_of(plain, name, args, kwargs) for name in ("callbacks", "steps_per_epoch", "validation_steps")
        )
        with contextlib.ExitStack() as stack:

            def choose(epoch_iterator: Any) -> None:
                if self._executions.may_choose(callbacks):
                    exactly[0] = epoch_iterator.steps_per_epoch
                    number = executions.number_of(epoch_iterator.data_adapter.num_batches, exactly)
                    epoch_iterator.steps_per_execution = number
                    stack.enter_context(self._executions.of(number))
                    executions.say(number)

            stack.enter_context(self._running("train", "test", first=choose))
            return plain(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keras_compat.EVALUATE_IN_FIT):
            return self._plain["evaluate"](*args, **kwargs)
        with self._executions.of(self._executions.asked), self._running("test"):
            return self._plain["evaluate"](*args, **kwargs)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._executions.of(self._executions.asked), self._running("predict"):
            return self._plain["predict"](*args, **kwargs)

    def _train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_batch("train_on_batch", args, kwargs)

    def _test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_batch("test_on_batch", args, kwargs)

    def _on_batch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The metrics of one batch are those of all replicas' shares."""
        self._refuse_eager()
        plain = self._plain[name]
        return_dict = argument_of(plain, "return_dict", args, kwargs)
        args, kwargs = with_argument(plain, "return_dict", args, kwargs, lambda _: True)
        with self._strategy.scope():
            logs = getattr(self._model, keras_compat.METRICS_RESULT)(plain(*args, **kwargs))
        logs = {key: float(value) for key, value in logs.items()}
        return logs if return_dict else keras_compat.flatten_metrics(self._model, logs)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is not None:
            self._replicas.build_for_batch(data_batch)

    def _refuse_eager(self) -> None:
        if self._model.run_eagerly:
            raise NotSupportedError(
                "A TPU runs whole steps, which have to be traced.",
                "run_eagerly=True",
                "Leave it out; to look into a step, run it without a TPU first: kd.init('serial').",
            )

    @contextlib.contextmanager
    def _running(self, *kinds: str, first: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Prepares each data set that Keras makes, the first one for steps of the first kind."""
        self._refuse_eager()
        with self._strategy.scope(), self._replicas.preparing(*kinds, first=first):
            yield


@functools.cache
def _advise_on_precision(policy: str) -> None:
    if policy == "float32":
        logger().warning(
            "the model computes in float32. keras.mixed_precision.set_global_policy('mixed_bfloat16'), before it is "
            "made, is faster on a TPU and takes less memory; its numbers differ in the third digit."
        )


def _in_place_of(plain: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return call


def _reduce_first(optimizer: Any) -> None:
    """Adds gradients up over the replicas before the optimizer clips them, as one process would see them."""
    if getattr(optimizer, _ATTACHED, None) is not None:
        return
    plain = optimizer.apply

    def apply(grads: Any, *args: Any, **kwargs: Any) -> Any:
        grads = list(grads)
        sums = iter(step.gradients_of_batch([gradient for gradient in grads if gradient is not None]))
        return plain([None if gradient is None else next(sums) for gradient in grads], *args, **kwargs)

    attach(optimizer, "apply", apply)
    keras_strategy.leave_gradients(optimizer)
    attach(optimizer, _ATTACHED, True)
