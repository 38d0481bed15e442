"""Private names of Keras's `fit`, `evaluate` and `predict`. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer

from keras_dist.compat.keras_model import attach

# The epoch that a run resumes at (BackupAndRestore).
INITIAL_EPOCH = "_initial_epoch"
# The methods and attributes of `Trainer` that `fit` and `evaluate` use.
SYMBOLIC_BUILD = "_maybe_symbolic_build"
METRICS_RESULT = "_get_metrics_result_or_logs"
EVALUATE_IN_FIT = "_use_cached_eval_dataset"
EVALUATE_ITERATOR = "_eval_epoch_iterator"
FUNCTIONS = ("train_function", "test_function", "predict_function")


def distributed_dataset(epoch_iterator: Any) -> tf.data.Dataset:
    """Returns the dataset that `fit` iterates over."""
    return epoch_iterator._distributed_dataset


def set_dataset(epoch_iterator: Any, dataset: tf.data.Dataset) -> None:
    """Makes `fit` iterate over another dataset."""
    epoch_iterator._distributed_dataset = dataset


def set_steps(epoch_iterator: Any, steps: int | None) -> None:
    """Sets the number of steps in an epoch. With `None` it ends with the data."""

    class Adapter(type(epoch_iterator.data_adapter)):  # type: ignore[misc]
        num_batches = property(lambda self: steps)

    epoch_iterator.data_adapter.__class__ = Adapter
    epoch_iterator._num_batches = steps


@contextlib.contextmanager
def epoch_iterators(prepare: Callable[[Any], None]) -> Iterator[None]:
    """Passes each epoch iterator that Keras creates in this context to `prepare`: `predict` exposes it nowhere else."""
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


def set_strategy(model: keras.Model, strategy: Any) -> None:
    """Sets what `model.distribute_strategy` returns.

    `fit`, `evaluate` and `predict` use it to distribute each dataset and to run each step, below the methods that a
    subclass overrides. It also turns `jit_compile="auto"` off, as XLA cannot compile collectives.
    """
    attach(model, "_distribute_strategy", strategy)


class StrategyExtension:
    """What keras_tuner reads from `model.distribute_strategy.extended` before it saves a trial's weights."""

    def _in_multi_worker_mode(self) -> bool:
        return False  # all ranks pass the same path, and `save_weights` writes once


def is_overridden(model: keras.Model, method: str) -> bool:
    """True if a model's class has a method of its own in place of one of Keras's trainer."""
    owner = next(cls for cls in type(model).__mro__ if method in vars(cls))
    return owner is not keras.Model and not issubclass(tensorflow_trainer.TensorFlowTrainer, owner)


def before_training(look: Callable[[keras.Model], object]) -> None:
    """Passes every model to `look` before its `fit` and `train_on_batch`, from now on."""
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(model: keras.Model, force: bool = False) -> Any:
        look(model)
        return plain(model, force)

    keras.Model.make_train_function = make_train_function


def reset_functions(model: keras.Model) -> None:
    """Drops traced functions, so that Keras traces them again."""
    for name in FUNCTIONS:
        attach(model, name, None)


@contextlib.contextmanager
def without_functions(model: keras.Model) -> Iterator[None]:
    """Hides traced functions in this context, where the model runs on one rank: they were traced for all ranks."""
    names = (*FUNCTIONS, EVALUATE_ITERATOR)
    kept = {name: getattr(model, name, None) for name in names}
    reset_functions(model)
    try:
        yield
    finally:
        for name, value in kept.items():
            attach(model, name, value)
