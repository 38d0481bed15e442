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


_NAMES = ("normal", "uniform", "truncated_normal")
# The types of the operations that `drawn_alike` replaces.
DRAWN_ALIKE = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "Multinomial") + tuple(
    f"Stateless{name}{version}"
    for name in ("RandomNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal")
    for version in ("", "V2")
)


@contextlib.contextmanager
def drawn_alike() -> Iterator[None]:
    """Lets eager calls of `tf.random`, and so of `keras.random` and Dropout, draw the same for each row of a tensor.

    So the rows of a share get what they get in the whole batch, wherever the script puts them. The n-th draw without a
    state of its own is the same in each such context, and on each replica, which has its own thread.
    """
    draws = threading.local()
    stateless = {name: getattr(tf.random, f"stateless_{name}") for name in _NAMES}
    plain_dropout = tf.nn.experimental.stateless_dropout

    def next_seed() -> tuple[int, int]:
        draws.number = getattr(draws, "number", -1) + 1
        return draws.number, 0

    def same_rows(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return plain(*args, **kwargs)
            given = dict(inspect.signature(plain).bind(*args, **kwargs).arguments)
            shape = tf.cast(given.pop("shape"), tf.int32).numpy()
            if plain is not stateless[name]:
                given = {key: value for key, value in given.items() if key not in ("self", "name")}
                given["seed"] = next_seed()
            return tf.broadcast_to(stateless[name]([1, *shape[1:]][: len(shape)], **given), shape)

        return draw

    def categorical(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def draw(logits: Any, num_samples: Any, dtype: Any = tf.int64, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return plain(logits, num_samples, dtype, **kwargs)
            logits = tf.convert_to_tensor(logits)
            shape = [num_samples, logits.shape[-1]]
            uniform = stateless["uniform"](shape, next_seed(), 1e-6, 1.0, logits.dtype)
            return tf.argmax(logits[:, None] - tf.math.log(-tf.math.log(uniform)), -1, dtype)

        return draw

    @functools.wraps(plain_dropout)
    def dropout(x: Any, rate: Any, seed: Any, rng_alg: Any = None, noise_shape: Any = None, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and len(x.shape):
            noise_shape = [1, *(x.shape if noise_shape is None else noise_shape)[1:]]
        return plain_dropout(x, rate, seed, rng_alg, noise_shape, **kwargs)

    replaced = [(tf.random, f"stateless_{name}", same_rows(name, stateless[name])) for name in _NAMES]
    for owner in (tf.random, tf.random.Generator):
        replaced += [(owner, name, same_rows(name, getattr(owner, name))) for name in _NAMES]
    replaced.append((tf.random, "categorical", categorical(tf.random.categorical)))
    replaced.append((tf.nn.experimental, "stateless_dropout", dropout))
    with contextlib.ExitStack() as stack:
        for owner, name, function in replaced:
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
