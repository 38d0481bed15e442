"""The seeds of TensorFlow's operations to which a script gives none. TensorFlow 2.21, 2026-11.

`tests/unit/test_tf_seeds.py` fails when one of these names changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops, random_seed

from keras_dist.compat.tf_compat import variables_made_by

# In the name of an operation that draws an order which another run can't draw again.
DRAWN_ORDER = "keras_dist_drawn_order"
_plain_seeds, _plain_shuffle = random_seed.get_seed, tf.random.shuffle


def draw_alike(seed: int | None) -> None:
    """Lets operations without any seed draw the same numbers on all ranks that pass the same seed.

    `tf.random.set_seed` would change operations that have a seed of their own, too. It would also let each iteration
    over a dataset draw the same numbers. So here the functions of `Dataset.map` stay without a seed, and
    `tf.random.shuffle` in them, by which Keras shuffles arrays, draws another order in each iteration.

    Args:
        seed: The seed, `None` for TensorFlow's own way.
    """
    drawn = None if seed is None else _Drawn(seed)
    random_seed.get_seed = _plain_seeds if drawn is None else drawn.get_seed
    tf.random.shuffle = _plain_shuffle if drawn is None else drawn.shuffle


@contextlib.contextmanager
def kept_draws() -> Iterator[None]:
    """Lets eager operations draw the numbers after this context that they would have drawn without it."""
    drawn = getattr(random_seed.get_seed, "__self__", None)
    generators = [getattr(context.context(), "_rng", None), getattr(drawn, "_of_eager", None)]
    before = [(generator, generator.getstate()) for generator in generators if generator is not None]
    for generator, _ in before:
        generator.seed("keras_dist")  # other seeds: TensorFlow keeps what draws, and it would go on from here
    try:
        yield
    finally:
        for generator, state in before:
            generator.setstate(state)


# The types of the operations that `drawn_alike` replaces.
DRAWN_ALIKE = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "Multinomial")


@contextlib.contextmanager
def drawn_alike() -> Iterator[None]:
    """Lets eager calls of `tf.random`, in this context, draw the same for each row of a batch.

    So the rows of a share get what they get in the whole batch. The n-th draw is the same in each such context, and on
    each replica, which has its own thread.
    """
    draws = threading.local()

    def seed() -> tuple[int, int]:
        draws.number = getattr(draws, "number", -1) + 1
        return draws.number, 0

    def same_rows(plain: Callable[..., Any], stateless: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return plain(*args, **kwargs)
            given = inspect.signature(plain).bind(*args, **kwargs).arguments
            given = {name: value for name, value in given.items() if name not in ("self", "seed", "name")}
            shape = tf.cast(given.pop("shape"), tf.int32).numpy()
            return tf.broadcast_to(stateless([1, *shape[1:]][: len(shape)], seed(), **given), shape)

        return draw

    plain_categorical = tf.random.categorical

    @functools.wraps(plain_categorical)
    def categorical(logits: Any, num_samples: Any, dtype: Any = tf.int64, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return plain_categorical(logits, num_samples, dtype, **kwargs)
        logits = tf.convert_to_tensor(logits)
        uniform = tf.random.stateless_uniform([num_samples, logits.shape[-1]], seed(), 1e-6, 1.0, logits.dtype)
        return tf.argmax(logits[:, None] - tf.math.log(-tf.math.log(uniform)), -1, dtype)

    names = ("normal", "uniform", "truncated_normal")
    replaced = [
        (owner, name, same_rows(getattr(owner, name), getattr(tf.random, f"stateless_{name}")))
        for owner in (tf.random, tf.random.Generator)
        for name in names
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in [*replaced, (tf.random, "categorical", categorical)]:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield


class _Drawn:
    """What takes the place of two functions of TensorFlow."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_eager = random.Random(seed)
        self._numbers: MutableMapping[tf.Graph, int] = weakref.WeakKeyDictionary()  # of operations, as TensorFlow's

    def get_seed(self, op_seed: int | None) -> tuple[int | None, int | None]:
        if op_seed is not None or _has_global_seed() or _is_in_map():
            seeds: tuple[int | None, int | None] = _plain_seeds(op_seed)
            return seeds
        if tf.executing_eagerly():
            return self._seed, self._of_eager.getrandbits(31)
        graph = ops.get_default_graph()
        number = self._numbers[graph] = self._numbers.get(graph, -1) + 1
        return self._seed, number

    def shuffle(self, value: Any, seed: int | None = None, name: str | None = None) -> Any:
        if seed is not None or _has_global_seed() or not _is_in_map():
            return _plain_shuffle(value, seed, name)
        with tf.init_scope(), variables_made_by():  # a `tf.function` refuses to make some
            times = tf.Variable(0, trainable=False, dtype=tf.int64)
        number = times.assign_add(1)
        return tf.random.experimental.stateless_shuffle(value, [self._seed, number], name=DRAWN_ORDER)


def _has_global_seed() -> bool:
    global_seed = context.global_seed() if tf.executing_eagerly() else ops.get_default_graph().seed
    return global_seed is not None


def _is_in_map() -> bool:
    """True in the function of `Dataset.map`, and in the branches and functions that it calls."""
    graph = ops.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        if graph.name.startswith("Dataset_map"):
            return True
        graph = graph.outer_graph
    return False
