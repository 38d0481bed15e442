"""Private names of the random state of Keras and TensorFlow. Keras 3.13 to 3.15, TensorFlow 2.21, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.random import seed_generator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

global_state = keras_backend.common.global_state


def is_seed(variable: Any) -> bool:
    """True if a variable is the state of a random generator."""
    return bool(variable.name == "seed_generator_state")


def seed_generators(model: keras.Model) -> Iterator[Any]:
    """Yields the seed generators of a model's random layers, and the global one if it exists."""
    for layer in model._flatten_layers():
        yield from layer._seed_generators
    if (generator := global_seed_generator()) is not None:
        yield generator


# How far the random streams of two replicas are apart.
SEED_OFFSET = 1_000_003


def stream_offset(replica: Any, dtype: Any) -> Any:
    """Returns the difference between a seed generator's state on a replica and in one process.

    A state is `[seed, counter]`. The chief, or the first replica, has the random stream of one process.

    Args:
        replica: int, or integer scalar tensor: the index of the rank or replica.
        dtype: Of the state.
    """
    if tf.is_tensor(replica):
        replica = tf.cast(replica, dtype)
        return tf.stack([replica * SEED_OFFSET, tf.zeros_like(replica)])
    return np.asarray([replica * SEED_OFFSET, 0]).astype(tf.as_dtype(dtype).as_numpy_dtype)


@contextlib.contextmanager
def replica_streams(replica: Callable[[], Any]) -> Iterator[None]:
    """Lets the random layers and functions of Keras draw other numbers on each replica, in this context.

    The state of a generator that they draw from is shifted. What stays in the generator is the state of one process.

    Args:
        replica: Returns the index of the current replica, `None` outside of a step. The first one draws what one
            process draws.
    """
    next_seed = seed_generator.SeedGenerator.next

    def shifted(self: Any, ordered: bool = True) -> Any:
        seed, index = next_seed(self, ordered), replica()
        is_first = index is None or (isinstance(index, int) and index == 0)
        return seed if is_first else seed + stream_offset(index, seed.dtype)

    seed_generator.SeedGenerator.next = shifted
    try:
        yield
    finally:
        seed_generator.SeedGenerator.next = next_seed


@contextlib.contextmanager
def replica_operations(replica: Callable[[], Any]) -> Iterator[None]:
    """Lets the operations of `tf.random` draw other numbers on each replica, in this context. Their seed is shifted.

    Args:
        replica: As of `replica_streams`. The seed of an operation cannot depend on a tensor.
    """
    get_seed = random_seed.get_seed

    def shifted(op_seed: Any) -> Any:
        seeds, index = get_seed(op_seed), replica()
        if seeds[0] is None or not isinstance(index, int):
            return seeds
        return (seeds[0] + index * SEED_OFFSET) % 2**31, seeds[1]

    random_seed.get_seed = shifted
    try:
        yield
    finally:
        random_seed.get_seed = get_seed


def global_seed_generator() -> Any:
    """Returns the generator of `keras.random.*` calls without a seed, `None` if it does not exist yet."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def global_seed() -> Any:
    """Returns the state of the global generator. If it does not exist yet, returns the script's seed or `None`."""
    generator = global_seed_generator()
    if generator is None:
        return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    return np.asarray(generator.state.value).tolist()


def set_global_seed(seed: int) -> None:
    """Seeds the global generator. Creates it if it does not exist yet."""
    set_global_state([seed, 0])


def set_global_state(state: list[int]) -> None:
    """Sets the state of the global generator, seed and counter. Creates it if it does not exist yet."""
    seed_generator.global_seed_generator().state.assign(state)


def tensorflow_seed() -> int | None:
    """Returns the global seed of TensorFlow, `None` if it is not set."""
    seed: int | None = context.global_seed()
    return seed
