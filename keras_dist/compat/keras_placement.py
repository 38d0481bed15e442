"""Private names of Keras for parameter servers: the placement of variables, and class weights. Keras 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

from keras_dist.compat.keras_model import attach

global_state = keras_backend.common.global_state


def backing(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, in any scope."""
    return variable._value


def set_backing(variable: Any, value: tf.Variable) -> None:
    """Replaces the `tf.Variable` of a Keras variable. Keras has no public way to move one to another device."""
    attach(variable, "_value", value)


def stateless_scope() -> Any:
    """Returns the innermost `keras.StatelessScope` that is open in this thread, or `None`."""
    return global_state.get_global_attribute("stateless_scope")


@contextlib.contextmanager
def outside_stateless_scope() -> Iterator[None]:
    """Allows creating variables inside a `StatelessScope`."""
    scope = stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


# An optimizer's step counter. The public `iterations` may be computed from it.
STEP_COUNTER = "_iterations"
MAKE_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def weighted(dataset: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """Returns a dataset with the sample weights of `fit(class_weight=...)`, for data that Keras itself never reads."""
    return dataset.map(make_class_weight_map_fn(class_weight))
