"""Random numbers of Keras and TensorFlow. Keras 3.13 to 3.15, TensorFlow 2.21, 2026-11."""

import contextlib
import contextvars
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend import random as functions
from keras.src.random import seed_generator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from tensorflow.python.eager import context
from tensorflow.python.framework import ops, random_seed

from keras_dist.compat.tf_compat import context_value, patched, variables_made_by

global_state = keras_backend.common.global_state


def is_seed(variable: Any) -> bool:
    return bool(variable.name == "seed_generator_state")


def seed_generators(model: keras.Model) -> Iterator[Any]:
    """Yields the seed generators of a model's random layers, and the global one if it exists."""
    for layer in model._flatten_layers():
        yield from layer._seed_generators
    if (generator := global_seed_generator()) is not None:
        yield generator


def observed(observe: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Calls `observe(state)` before each draw from a seed generator, in this context."""
    next_seed = seed_generator.SeedGenerator.next

    def observing(self: Any, ordered: bool = True) -> Any:
        observe(self.state)
        return next_seed(self, ordered)

    return patched(seed_generator.SeedGenerator, next=observing)


def skip(state: Any) -> None:
    """Advances the state of a seed generator, as a draw does."""
    state.assign(np.asarray(state.value) + np.asarray([0, 1], dtype=state.dtype))


# How far the random streams of two replicas are apart.
SEED_OFFSET = 1_000_003


def stream_offset(replica: Any, dtype: Any) -> Any:
    """Returns the difference between a seed generator's state on a rank or replica, by its index, and in one process.

    A state is `[seed, counter]`. The chief, or the first replica (int or scalar tensor), has the stream of one process.
    """
    if tf.is_tensor(replica):
        replica = tf.cast(replica, dtype)
        return tf.stack([replica * SEED_OFFSET, tf.zeros_like(replica)])
    return np.asarray([replica * SEED_OFFSET, 0]).astype(tf.as_dtype(dtype).as_numpy_dtype)


def replica_streams(replica: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Lets the random layers and functions of Keras draw other numbers on each replica, in this context.

    The state of a generator that they draw from is shifted. What stays in the generator is the state of one process.
    `replica` returns the index of the current replica, `None` outside of a step. The first one draws as one process.
    """
    next_seed = seed_generator.SeedGenerator.next

    def shifted(self: Any, ordered: bool = True) -> Any:
        seed, index = next_seed(self, ordered), replica()
        is_first = index is None or (isinstance(index, int) and index == 0)
        return seed if is_first else seed + stream_offset(index, seed.dtype)

    return patched(seed_generator.SeedGenerator, next=shifted)


def replica_operations(replica: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Lets the operations of `tf.random` draw other numbers on each replica, in this context. Their seed is shifted.

    `replica` is as of `replica_streams`. The seed of an operation cannot depend on a tensor.
    """
    get_seed = random_seed.get_seed

    def shifted(op_seed: Any) -> Any:
        seeds, index = get_seed(op_seed), replica()
        if seeds[0] is None or not isinstance(index, int):
            return seeds
        return (seeds[0] + index * SEED_OFFSET) % 2**31, seeds[1]

    return patched(random_seed, get_seed=shifted)


def global_seed_generator() -> Any:
    """Returns the generator of `keras.random.*` calls without a seed, `None` if it does not exist yet."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def global_seed() -> Any:
    """Returns the state of the global generator. If it does not exist yet, returns the script's seed or `None`."""
    generator = global_seed_generator()
    if generator is None:
        return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    return np.asarray(generator.state.value).tolist()


def set_global_state(state: list[int]) -> None:
    """Sets the state of the global generator, seed and counter. Creates it if it does not exist yet."""
    seed_generator.global_seed_generator().state.assign(state)


def tensorflow_seed() -> int | None:
    return context.global_seed()


# Those whose first argument is the shape of what they return.
OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")


@contextlib.contextmanager
def replaced(replacements: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Calls other functions in place of Keras's, in this context. Variables are initialized by Keras's own.

    `replacements` are by the name of the function. Each gets the plain one as its first argument.
    """

    def calling(plain: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if _INITIALIZING.get() else replacement(plain, *args, **kwargs)

        return call

    def initializing(plain_method: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            with context_value(_INITIALIZING, True):
                return plain_method(*args, **kwargs)

        return initialize

    methods = ("_initialize_with_initializer", "_deferred_initialize")
    made = {name: initializing(getattr(keras.Variable, name)) for name in methods}
    calls = {name: calling(getattr(functions, name), replacement) for name, replacement in replacements.items()}
    with patched(functions, **calls), patched(keras.Variable, **made):
        yield


# True while a variable gets its first value: what a step creates is the same on all replicas.
_INITIALIZING: contextvars.ContextVar[bool] = contextvars.ContextVar("keras_dist_initializing", default=False)


def layers_that_mix_examples(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of Keras that pair random examples of a batch."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.MixUp | keras.layers.CutMix)]


# In the name of an operation that draws an order which another run can't draw again.
DRAWN_ORDER = "keras_dist_drawn_order"
_plain_seeds, _plain_shuffle = random_seed.get_seed, tf.random.shuffle


def draw_alike(seed: int | None) -> None:
    """Lets operations without any seed draw the same numbers on all ranks that pass the same seed, `None` undoes it.

    `tf.random.set_seed` would change operations that have a seed of their own, too. It would also let each iteration
    over a dataset draw the same numbers. So here the functions of `Dataset.map` stay without a seed, and
    `tf.random.shuffle` in them, by which Keras shuffles arrays, draws another order in each iteration.
    """
    drawn = None if seed is None else _Drawn(seed)
    random_seed.get_seed = _plain_seeds if drawn is None else drawn.get_seed
    tf.random.shuffle = _plain_shuffle if drawn is None else drawn.shuffle


@contextlib.contextmanager
def kept_draws() -> Iterator[None]:
    """After this context, eager operations draw the numbers that they would have drawn without it."""
    drawn = getattr(random_seed.get_seed, "__self__", None)
    generators = [getattr(context.context(), "_rng", None), getattr(drawn, "_of_eager", None)]
    before = [(generator, generator.getstate()) for generator in generators if generator is not None]
    for generator, _ in before:
        generator.seed("keras_dist")  # other seeds: TensorFlow keeps what draws, and it would continue from here
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

    of_module, of_generator = (
        {name: same_rows(name, getattr(owner, name)) for name in _NAMES} for owner in (tf.random, tf.random.Generator)
    )
    of_module |= {f"stateless_{name}": same_rows(name, plain) for name, plain in stateless.items()}
    of_module["categorical"] = categorical(tf.random.categorical)
    of_nn = patched(tf.nn.experimental, stateless_dropout=dropout)
    with patched(tf.random, **of_module), patched(tf.random.Generator, **of_generator), of_nn:
        yield


class _Drawn:
    """Replaces two functions of TensorFlow."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_eager = random.Random(seed)
        self._numbers: MutableMapping[tf.Graph, int] = weakref.WeakKeyDictionary()  # of operations, as TensorFlow's

    def get_seed(self, op_seed: int | None) -> tuple[int | None, int | None]:
        if op_seed is not None or _has_global_seed() or _is_in_map():
            return _plain_seeds(op_seed)
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
    return (context.global_seed() if tf.executing_eagerly() else ops.get_default_graph().seed) is not None


def _is_in_map() -> bool:
    """True in the function of `Dataset.map`, and in the branches and functions that it calls."""
    graph = ops.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        if graph.name.startswith("Dataset_map"):
            return True
        graph = graph.outer_graph
    return False
