"""Random numbers of the whole batch on a share; operations without a seed draw alike on ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import random as functions
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from keras_dist.compat import keras_random
from keras_dist.data.shares import share_bounds
from keras_dist.step import step as step_module
from keras_dist.step.gathering import whole_draws
from keras_dist.step.step import RowRange, Step

TOTAL, SIZE, FEATURES = 7, 3, 4


class NoExchange:
    """Nothing may be gathered."""


def on_share(draw: Callable[[Any], Any], rank: int) -> np.ndarray:
    """Calls a function on the share of a rank, in a graph that doesn't know how many rows it has."""
    start, stop = share_bounds(TOTAL, rank, SIZE)
    x = np.zeros([TOTAL, FEATURES], "float32")[start:stop]

    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES])])
    def run(x: Any) -> Any:
        step = Step(tf.shape(x)[0], tf.constant(TOTAL), tf.constant(0.0), data=x)
        step.place = RowRange(tf.constant(start), tf.constant(TOTAL))
        with step_module.entered(step), whole_draws(NoExchange()):  # type: ignore[arg-type]
            return draw(x)

    return np.asarray(run(x))


@pytest.mark.parametrize("shape", [(FEATURES, 2), (TOTAL // SIZE, 2), (1, FEATURES), ()])
def test_what_has_no_row_for_each_example_is_the_same_on_all_shares(shape: tuple[int, ...]) -> None:
    def draw(x: Any) -> Any:
        return keras.random.normal(shape, seed=3)

    for rank in range(SIZE):
        np.testing.assert_array_equal(on_share(draw, rank), np.asarray(draw(None)))


def test_a_share_keeps_what_is_infinite() -> None:
    """The mask is applied by `where`, as in Keras: 0 times infinity is no number."""
    dropped = on_share(lambda x: keras.random.dropout(x + np.inf, 0.5, seed=3), 0)
    assert np.isin(dropped, [0, np.inf]).all()


def test_layers_find_keras_random_functions_where_they_are_replaced() -> None:
    """If this fails, Keras's layers no longer draw by `keras.src.backend.random`."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        def replacement(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return plain(*args, **kwargs)

        return replacement

    names = [*keras_random.OF_SHAPE, "dropout", "categorical", "shuffle"]
    images, x = tf.zeros([2, 4, 4, 3]), tf.zeros([2, 3])
    with keras_random.replaced({name: noted(name) for name in names}):
        for layer in (keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0), keras.layers.AlphaDropout(0.5)):
            layer(x, training=True)
        keras.layers.RandomFlip()(images, training=True)
        keras.random.shuffle(x)
        keras.random.categorical(x, 1)
    assert called == ["dropout", "normal", "uniform", "uniform", "shuffle", "categorical"]
    assert all(getattr(functions, name).__module__ == functions.__name__ for name in names)
    mixing = keras.Sequential([keras.layers.MixUp(), keras.layers.Dropout(0.1), keras.layers.CutMix()])
    assert [type(layer).__name__ for layer in keras_random.layers_that_mix_examples(mixing)] == ["MixUp", "CutMix"]


def test_weights_that_a_step_creates_are_drawn_as_they_are() -> None:
    """A kernel may have as many rows as the share has examples."""
    x = tf.zeros([FEATURES, FEATURES])
    step = Step(tf.constant(FEATURES), tf.constant(TOTAL), tf.constant(0.0), data=x)
    step.place = RowRange(tf.constant(TOTAL - FEATURES), tf.constant(TOTAL))

    def kernel() -> Any:
        layer = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotNormal(seed=1))
        layer(x)
        return layer.kernel.numpy()

    plain = kernel()
    with step_module.entered(step), whole_draws(NoExchange()):  # type: ignore[arg-type]
        np.testing.assert_array_equal(kernel(), plain)


Dataset = tf.data.Dataset


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(context.context(), "_seed", None)
    yield
    keras_random.draw_alike(None)


def drawn() -> list[float]:
    context.context().clear_kernel_cache()  # an eager operation with the same seed goes on, as in one process
    in_function = tf.function(lambda: tf.random.normal([2]) + tf.random.uniform([2]))
    kept = Dataset.range(40).filter(lambda i: tf.random.uniform([]) < 0.5)
    shuffled = Dataset.range(20).shuffle(20)
    parts: list[Any] = [tf.random.uniform([2]), tf.random.shuffle(tf.range(20)), in_function(), [*kept], [*shuffled]]
    return [float(number) for part in parts for number in np.ravel(part)]


def test_the_same_seed_draws_alike() -> None:
    found = []
    for seed in (5, 5, 6):
        keras_random.draw_alike(seed)
        found.append(drawn())
    assert found[0] == found[1] != found[2]


def test_a_shuffle_in_a_map_draws_another_order_each_time() -> None:
    """By this Keras shuffles arrays. With TensorFlow's own seed each epoch has the same order."""

    def epochs() -> list[list[int]]:
        order = Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(30)))
        return [np.ravel([*order]).tolist() for _ in range(3)]

    keras_random.draw_alike(5)
    first = epochs()
    assert all(sorted(epoch) == [*range(30)] for epoch in first)
    assert first[0] != first[1] != first[2] != first[0]
    keras_random.draw_alike(5)
    assert epochs() == first
    keras_random.draw_alike(None)
    tf.random.set_seed(4)
    same = epochs()
    assert same[0] == same[1]  # once they differ, plain seeds will do


def test_tensorflow_asks_this_function_for_seeds() -> None:
    """Once a process can publicly seed only what has no seed, this can go."""
    asked = []

    def get_seed(op_seed: Any) -> Any:
        asked.append(op_seed)
        return keras_random._plain_seeds(op_seed)

    random_seed.get_seed = get_seed
    tf.random.uniform([], seed=3)
    Dataset.range(2).shuffle(2)
    assert asked == [3, None]
