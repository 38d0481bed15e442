"""Private names of Keras for parameter servers: where the value of a variable is, and what a data set becomes.

Keras 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them moves.
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
    """Returns the `tf.Variable` that holds a Keras variable's value, whatever scope is entered."""
    return variable._value


def set_backing(variable: Any, value: tf.Variable) -> None:
    """Makes another `tf.Variable` hold a Keras variable's value: Keras itself has no way to move one."""
    attach(variable, "_value", value)


@contextlib.contextmanager
def outside_stateless_scope() -> Iterator[None]:
    """Lets variables be made while a `StatelessScope` is entered."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


# What an optimizer makes slots with, and counts its steps with; beside the public `iterations`, which may be derived.
STEP_COUNTER = "_iterations"
MAKE_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def weighted(dataset: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """Returns a data set as `fit(class_weight=...)` would read it: there Keras never sees it."""
    return dataset.map(make_class_weight_map_fn(class_weight))
