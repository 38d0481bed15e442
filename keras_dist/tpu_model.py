"""A model whose variables belong to a `tf.distribute` strategy with one process: TPUStrategy.

The strategy runs the replicas; here batches get one shape, gradients are added up before they are clipped, and what is
printed, predicted and saved is that of the real examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dist import tpu_data, tpu_step
from keras_dist.arguments import argument_of, with_argument
from keras_dist.backends import keras_compat
from keras_dist.backends.keras_compat import attach
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import logger
from keras_dist.optimizer import optimizers_of

_ATTACHED = "_keras_dist_tpu"
_BATCH_SIZE = 32  # Keras's


_Model = TypeVar("_Model")


def distribute_on_strategy(model: _Model, strategy: tf.distribute.Strategy) -> _Model:
    """Makes `compile`, `fit`, `evaluate` and `predict` exact under a strategy, in place. Twice is the same as once.

    Args:
        model: The user's model, made under the strategy.
        strategy: The strategy that its variables belong to.

    Raises:
        ConfigurationError: If the model was made outside of the strategy.
        NotSupportedError: If it is an optimizer, for a loop of the user's own.
    """
    if not isinstance(model, keras.Model):
        raise NotSupportedError(
            "A loop of your own is not distributed on a TPU.",
            f"the optimizer {type(model).__name__}",
            "Put the step into `train_step` of a keras.Model and use `fit`.",
        )
    if getattr(model, _ATTACHED, None) is not None:
        return model
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ConfigurationError(
                "The model was made before the TPU was connected, so its weights are not on it.",
                f"{variable.path}",
                "Move `kd.init()` above what makes the model. keras.utils.clear_session() drops the TPU, too: call "
                "it before `kd.init()`.",
            )
    wrappers = _Wrappers(model, strategy)
    attach(model, _ATTACHED, wrappers)
    wrappers.attach()
    return model


class _Wrappers:
    """What is set over the methods of one model."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        self._model = model
        self._strategy = strategy
        self._replicas = _Replicas(model, strategy)
        self._plain: dict[str, Callable[..., Any]] = {}

    def attach(self) -> None:
        keras_compat.set_strategy(self._model, self._replicas)
        keras_compat.reset_functions(self._model)
        wrapped = {
            "compile": self._compile, "fit": self._fit, "evaluate": self._evaluate, "predict": self._predict,
            keras_compat.SYMBOLIC_BUILD: lambda *args, **kwargs: None,
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
        args, kwargs = with_argument(plain, "jit_compile", args, kwargs, lambda _: False)
        with self._strategy.scope():
            plain(*args, **kwargs)
        self._switch_jit_off(asked)
        self._prepare_optimizers()

    def _switch_jit_off(self, asked: Any) -> None:
        if asked is True:
            logger().warning("jit_compile=True is off on a TPU: TPUStrategy compiles the whole step by itself.")
        self._model.jit_compile = False

    def _prepare_optimizers(self) -> None:
        if self._strategy.num_replicas_in_sync > 1:
            for optimizer in optimizers_of(self._model):
                _reduce_first(optimizer)

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain["fit"]
        x, size, validation, other_size = (
            argument_of(plain, name, args, kwargs)
            for name in ("x", "batch_size", "validation_data", "validation_batch_size")
        )
        first = validation[0] if isinstance(validation, tuple | list) else validation
        self._replicas.sizes = [_size_of(x, size), _size_of(first, other_size or size)]
        with self._strategy.scope():
            return plain(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keras_compat.EVALUATE_IN_FIT):
            return self._plain["evaluate"](*args, **kwargs)
        return self._run("evaluate", args, kwargs)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict", args, kwargs)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = self._plain[name]
        x, size = (argument_of(plain, argument, args, kwargs) for argument in ("x", "batch_size"))
        self._replicas.sizes = [_size_of(x, size)]
        with self._strategy.scope():
            return plain(*args, **kwargs)


def _in_place_of(plain: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return call


def _size_of(x: Any, batch_size: int | None) -> int | None:
    """How many examples Keras puts into a batch of these data, `None` where the data set has to tell."""
    if x is None or isinstance(x, tf.data.Dataset | Iterator):
        return None
    if isinstance(x, keras.utils.PyDataset):
        return int(tf.nest.flatten(x[0])[0].shape[0])
    return batch_size or _BATCH_SIZE


class _Replicas:
    """What Keras sees in place of the strategy.

    Args:
        model: The model.
        strategy: The strategy.
    """

    num_replicas_in_sync = 1  # what `run` returns is put together already

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        self._model = model
        self._strategy = strategy
        self.sizes: list[int | None] = []
        self.extended = keras_compat.StrategyExtension()

    def scope(self) -> Any:
        return self._strategy.scope()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        """Returns the data set of the replicas' shares, all of one shape."""
        tpu_data.check_shapes(dataset)
        replicas = self._strategy.num_replicas_in_sync
        told = self.sizes.pop(0) if self.sizes else None
        known, are_full = tpu_data.batch_size_of(dataset)
        size = known or told
        if size is None:
            raise tpu_data.unknown_size(dataset)
        even = tpu_data.padded(dataset, size, replicas)
        self._build(even.element_spec[0], replicas)
        self._is_filled = not are_full or size % replicas != 0

        def of_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tpu_data.shares(even, replicas, context.input_pipeline_id, context.num_input_pipelines)

        return self._strategy.distribute_datasets_from_function(of_host)

    def _build(self, specs: Any, replicas: int) -> None:
        def share(spec: Any) -> Any:
            if not isinstance(spec, tf.TensorSpec):
                return spec
            return tf.TensorSpec([spec.shape[0] // replicas, *spec.shape[1:]], spec.dtype)

        with self._strategy.scope():
            if not keras_compat.is_built(self._model):
                keras_compat.build(self._model, tf.nest.map_structure(share, specs))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs one step of Keras on all replicas."""
        ((batch, rows, totals),) = args
        is_step = function in (self._model.train_step, self._model.test_step)
        filled = self._is_filled
        counts = is_step and (filled or self._strategy.num_replicas_in_sync > 1)
        if counts and filled:
            tpu_step.check_can_be_filled(self._model)

        share = tpu_step.Share()

        def replica(batch: Any, rows: Any, totals: Any) -> Any:
            if not counts:
                return function(batch)
            share.rows, share.total = rows, totals[0]
            return function(tpu_step.with_rows(batch, rows))

        with tpu_step.counting(self._model, share, filled) if counts else contextlib.nullcontext():
            outputs = self._strategy.run(replica, args=(batch, rows, totals))
        total = self._strategy.experimental_local_results(totals)[0][0]
        return tf.nest.map_structure(lambda leaf: self._together(leaf, is_step, total), outputs)

    def _together(self, leaf: Any, is_step: bool, total: Any) -> Any:
        parts = self._strategy.experimental_local_results(leaf)
        return parts[0] if is_step else tf.concat(parts, 0)[: tf.cast(total, tf.int32)]


def _reduce_first(optimizer: Any) -> None:
    """Adds gradients up over the replicas before the optimizer clips them, as one process would see them."""
    if getattr(optimizer, _ATTACHED, None) is not None:
        return
    plain = optimizer.apply

    def apply(grads: Any, *args: Any, **kwargs: Any) -> Any:
        grads, context = list(grads), tf.distribute.get_replica_context()
        present = [gradient for gradient in grads if gradient is not None]
        if context is None or not present:
            return plain(grads, *args, **kwargs)
        sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
        return plain([None if gradient is None else next(sums) for gradient in grads], *args, **kwargs)

    attach(optimizer, "apply", apply)
    keras_compat.leave_gradients(optimizer)
    attach(optimizer, _ATTACHED, True)
