"""Every private name of Keras that the library uses, each with the reason. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them moves, or when it is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from keras.src.trainers.trainer import model_supports_jit
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

global_state = keras_backend.common.global_state


def attach(target: Any, name: str, value: Any) -> None:
    """Sets an attribute of one model or optimizer, past Keras's tracking of attributes.

    A wrapper set on the instance leaves the class, and so saving, loading, cloning and pickling, as they were.
    """
    object.__setattr__(target, name, value)


# A resumed epoch (BackupAndRestore) and the seam of a real update, between accumulation and clipping.
INITIAL_EPOCH = "_initial_epoch"
CLIP_GRADIENTS = "_clip_gradients"
# The parts of `Trainer` that `fit` and `evaluate` go through.
SYMBOLIC_BUILD = "_maybe_symbolic_build"
METRICS_RESULT = "_get_metrics_result_or_logs"
EVALUATE_IN_FIT = "_use_cached_eval_dataset"
EVALUATE_ITERATOR = "_eval_epoch_iterator"
FUNCTIONS = ("train_function", "test_function", "predict_function")


def distributed_dataset(epoch_iterator: Any) -> tf.data.Dataset:
    """Returns what `fit` iterates over."""
    return epoch_iterator._distributed_dataset


def set_dataset(epoch_iterator: Any, dataset: tf.data.Dataset) -> None:
    """Makes `fit` iterate over another data set."""
    epoch_iterator._distributed_dataset = dataset


def set_steps(epoch_iterator: Any, steps: int | None) -> None:
    """Makes an epoch have this many steps, `None` for as many as there are data."""

    class Adapter(type(epoch_iterator.data_adapter)):  # type: ignore[misc]
        num_batches = property(lambda self: steps)

    epoch_iterator.data_adapter.__class__ = Adapter
    epoch_iterator._num_batches = steps


@contextlib.contextmanager
def epoch_iterators(prepare: Callable[[Any], None]) -> Iterator[None]:
    """Hands each epoch iterator that Keras makes, while this is entered, to `prepare`: `predict` shows it to nobody."""
    plain = tensorflow_trainer.TFEpochIterator

    class Prepared(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            prepare(self)

    tensorflow_trainer.TFEpochIterator = Prepared
    try:
        yield
    finally:
        tensorflow_trainer.TFEpochIterator = plain


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list that `evaluate` and its like return by default."""
    return model._flatten_metrics_in_order(logs)


def set_strategy(model: keras.Model, strategy: Any) -> None:
    """Makes `strategy` what `model.distribute_strategy` returns.

    Keras reads it in `fit`, `evaluate` and `predict` to distribute each data set and to run each step, below
    whatever a subclass overrides; and it turns `jit_compile="auto"` off, so that no collective lands in XLA.
    """
    attach(model, "_distribute_strategy", strategy)


class StrategyExtension:
    """What keras_tuner asks `model.distribute_strategy.extended` for, before it saves a trial's weights."""

    def _in_multi_worker_mode(self) -> bool:
        """False: each path is the script's own, and `save_weights` writes once."""
        return False


def reset_functions(model: keras.Model) -> None:
    """Drops compiled functions, which were traced before the model was distributed."""
    for name in FUNCTIONS:
        attach(model, name, None)


@contextlib.contextmanager
def other_functions(model: keras.Model) -> Iterator[None]:
    """Puts compiled functions aside while this is entered: traced for all ranks, they are no use to one, nor back."""
    names = (*FUNCTIONS, EVALUATE_ITERATOR)
    kept = {name: getattr(model, name, None) for name in names}
    reset_functions(model)
    try:
        yield
    finally:
        for name, value in kept.items():
            attach(model, name, value)


def build(model: keras.Model, batch_spec: Any) -> None:
    """Builds a model's weights and metrics from the specification of a batch, without a batch of data.

    Like `Trainer._symbolic_build`, which would also build an optimizer that the model may never use (a GAN).
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_symbolic, batch_spec))
    spec_of = keras_backend.compute_output_spec
    y_pred = spec_of(model, x, training=False)
    if (metrics := getattr(model, "_compile_metrics", None)) is not None and not metrics.built:
        spec_of(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if (loss := getattr(model, "_compile_loss", None)) is not None and not loss.built:
        spec_of(model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False)


def _symbolic(spec: Any) -> Any:
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    sparse, ragged = isinstance(spec, tf.SparseTensorSpec), isinstance(spec, tf.RaggedTensorSpec)
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse, ragged=ragged)


def is_built(model: keras.Model) -> bool:
    """True if all layers of the model have their weights, and its metrics their state.

    A model without a `call` (a GAN) is never built itself.
    """
    compiled = (getattr(model, "_compile_metrics", None), getattr(model, "_compile_loss", None))
    layers = model._flatten_layers(include_self=type(model).call is not keras.Model.call)
    return all(part.built for part in (*layers, *compiled) if part is not None)


def flatten_layers(model: keras.Model) -> list[Any]:
    """Returns the model and all layers in it."""
    return list(model._flatten_layers())


def seed_generators(model: keras.Model) -> Iterator[Any]:
    """Yields the seed generators of a model's random layers, and the global one if it exists."""
    for layer in model._flatten_layers():
        yield from layer._seed_generators
    if (generator := global_seed_generator()) is not None:
        yield generator


def global_seed_generator() -> Any:
    """Returns the generator behind `keras.random.*` without a seed, `None` if it isn't made yet."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def global_seed() -> Any:
    """Returns the state of the global generator, or what it will be made from: the script's seed, or `None`."""
    generator = global_seed_generator()
    if generator is None:
        return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    return np.asarray(generator.state.value).tolist()


def set_global_seed(seed: int) -> None:
    """Seeds the global generator, which is made if need be."""
    seed_generator.global_seed_generator().state.assign([seed, 0])


def state_variables(model: keras.Model) -> list[Any]:
    """Returns variables that hold what a step has seen of the data: metrics, and layers' statistics.

    Without the states of random generators and layers' counters of steps: those advance on every rank, whatever
    it was given.
    """
    seeds = {id(generator.state) for generator in seed_generators(model)}
    statistics = [v for v in model.non_trainable_variables if keras_backend.is_float_dtype(v.dtype)]
    return [variable for variable in [*statistics, *model.metrics_variables] if id(variable) not in seeds]


def explicit_jit(model: keras.Model) -> bool:
    """True if a compiled model was compiled for XLA."""
    return bool(getattr(model, "compiled", False) and model._jit_compile)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns what Keras's `compile` was given, as it was; nothing for a model with a `compile` of its own."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None else dict(config.config)


def would_jit(model: keras.Model) -> bool:
    """True if Keras by itself (`"auto"`) would compile this model's step for XLA in one process."""
    has_accelerator = any(device.device_type != "CPU" for device in tf.config.list_physical_devices())
    return has_accelerator and not model.run_eagerly and model_supports_jit(model)


def logs_are_metrics(model: keras.Model, logs: Any) -> bool:
    """True if a step returned the model's own metrics, False if it made up its logs itself."""
    return isinstance(logs, dict) and set(logs) == set(model.get_metrics_result())


def tensorflow_seed() -> int | None:
    """Returns the global seed of TensorFlow, `None` if nobody has set it."""
    from tensorflow.python.eager import context

    seed: int | None = context.global_seed()
    return seed


@contextlib.contextmanager
def loss_denominators(
    rescale: Callable[..., Any], prepare: Callable[[Any], Any] = lambda values: values
) -> Iterator[None]:
    """Lets `rescale` see every reduction of a Keras loss while this is entered.

    `Loss.__call__` reduces by one function of its module, which alone knows values, weights and mask together.
    There is no other seam: the loss objects are the user's, and a mask may arise inside them (`ignore_class`).

    Args:
        rescale: Called with the reduced loss, and `values`, `weights` and `mask` as tensors or `None`, and the
            reduction's name; returns the loss to use.
        prepare: Called with `values` before they are reduced; returns those to use.
    """
    plain = loss_module.reduce_weighted_values

    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        values = prepare(values)
        loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return rescale(loss, values, sample_weight, mask, reduction)

    loss_module.reduce_weighted_values = reduce_weighted_values
    try:
        yield
    finally:
        loss_module.reduce_weighted_values = plain


@contextlib.contextmanager
def batch_statistics(sum_over_replicas: Callable[[Any], Any]) -> Iterator[None]:
    """Lets `BatchNormalization(synchronized=True)` see the whole batch while this is entered.

    Keras asks `tf.distribute` for the sums, which knows nothing of other processes.

    Args:
        sum_over_replicas: Adds a float tensor up over all replicas, and lets gradients through.
    """

    def moments(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
        own = [tf.reduce_sum(value, axis=axes, keepdims=True) for value in (x, tf.square(x), tf.ones_like(x))]
        total, squares, count = tf.unstack(sum_over_replicas(tf.stack(own)))
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    plain = tensorflow_nn._compute_moments_sync
    tensorflow_nn._compute_moments_sync = moments
    try:
        yield
    finally:
        tensorflow_nn._compute_moments_sync = plain


@contextlib.contextmanager
def output_losses_count(model: keras.Model, weight: Callable[[], Any]) -> Iterator[None]:
    """Lets a step count by `weight()` in the averages of the losses of single outputs, while this is entered.

    `CompileLoss` counts a batch by its static size, and where that isn't known, each batch as one. So the shares
    of a batch have to count as one together.

    Args:
        model: A model.
        weight: Returns a scalar tensor, the part of the batch that this share is.
    """
    with updated_with(output_losses(model), lambda given: weight() if given is None else given):
        yield


def output_losses(model: keras.Model) -> list[Any]:
    """Returns the metrics that average the losses of single outputs."""
    losses = getattr(model, "_compile_loss", None)
    return [metric for metric in getattr(losses, "metrics", ()) if metric is not None]


@contextlib.contextmanager
def updated_with(metrics: Sequence[Any], weigh: Callable[[Any], Any]) -> Iterator[None]:
    """Lets `weigh` choose the weight of what metrics count, given Keras's, while this is entered."""
    for metric in metrics:
        plain = metric.update_state

        def update_state(value: Any, sample_weight: Any = None, plain: Any = plain) -> Any:
            return plain(value, sample_weight=weigh(sample_weight))

        attach(metric, "update_state", update_state)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that layers have given a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)
