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

global_state = keras_backend.common.global_state


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
def replica_streams(replica: Callable[[], Any], rank: int) -> Iterator[None]:
    """Lets random layers and functions draw other numbers on each replica, in this context.

    A generator's state stays that of one process: what it draws is shifted. `tf.random.*` draws from a seed of the
    graph; in eager execution from one of the process. Replicas of one process draw one after the other from it.

    Args:
        replica: Returns the index of the current replica, `None` outside of a step.
        rank: Index of this process.
    """
    plain = seed_generator.SeedGenerator.next

    def shifted(self: Any, ordered: bool = True) -> Any:
        seed, index = plain(self, ordered), replica()
        # The first one draws what one process draws.
        is_first = index is None or (isinstance(index, int) and index == 0)
        return seed if is_first else seed + stream_offset(index, seed.dtype)

    eager = tf.executing_eagerly()
    holder, name = (context.context(), "_seed") if eager else (tf.compat.v1.get_default_graph(), "seed")
    before = getattr(holder, name)
    if before is not None and rank:
        setattr(holder, name, before + rank * SEED_OFFSET)
    seed_generator.SeedGenerator.next = shifted
    try:
        yield
    finally:
        seed_generator.SeedGenerator.next = plain
        setattr(holder, name, before)


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
    seed_generator.global_seed_generator().state.assign([seed, 0])


def tensorflow_seed() -> int | None:
    """Returns the global seed of TensorFlow, `None` if it is not set."""
    seed: int | None = context.global_seed()
    return seed
