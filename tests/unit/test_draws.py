"""Random numbers of the whole batch on a share, and the private names of Keras for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import random as functions

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
