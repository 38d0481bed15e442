"""`exact=True`: random layers and BatchNormalization compute what one process computes."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_dist as kd
from keras_dist.logging import announce_once
from tests.contract.harness import FLOAT32, Numbers, asking, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    compiled,
    computed,
    examples,
    fitted,
    numbers,
    some,
    stack,
    used,
)
from tests.contract.test_api import refused
from tests.contract.test_logs import Vae
from tests.contract.test_loop import Loop


def trained(distribute: Any, parts: Sequence[Any], shape: Sequence[int], count: int = COUNT, **options: Any) -> Numbers:
    """Trains layers and a head, by default in batches of 8, 8, 8 and 1 examples, then evaluates and predicts."""
    x = np.random.RandomState(5).uniform(size=(count, *shape)).astype(keras.config.floatx())
    y = numbers(count)[1]
    model = stack(*parts, layers.Flatten(), layers.Dense(1), shape=shape)
    model = compiled(asking(distribute, exact=True), model=model, optimizer=keras.optimizers.SGD(0.02), **options)
    return used(model, x, y)


contract("exact-dropout", sizes=(3,), covered_by=("exact-random-functions", "exact-batchnorm"))(
    lambda distribute: {
        "layers": trained(
            distribute,
            [
                layers.SpatialDropout1D(0.3, seed=1), layers.GaussianDropout(0.2, seed=2), layers.Dropout(0.3, seed=3),
                layers.AlphaDropout(0.2, seed=4), layers.Dropout(0.5, noise_shape=(None, 1, 4), seed=5),
            ],
            (5, 4), metrics=["mae"],
        ),
        "attention": trained(distribute, [Attention()], (5, 4)),
    }
)  # fmt: skip


class Attention(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.3, seed=6)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.attention(x, x, training=training)


@contract("exact-noise", sizes=(3,), covered_by=("exact-random-functions", "exact-batchnorm"))
def test_noise(distribute: Any) -> Numbers:
    """Noise for each example, and for each weight: the latter has no row for each example. Noise in `predict` too."""
    always = draw(lambda x, seed: keras.random.normal(keras.ops.shape(x), seed=seed), 2, always=True)
    return {
        "training": trained(distribute, [layers.GaussianNoise(0.5, seed=1), NoisyWeights()], (FEATURES,)),
        "always": trained(distribute, [always], (FEATURES,)),
    }


class NoisyWeights(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(FEATURES, BATCH))

    def call(self, x: Any, training: bool = False) -> Any:
        noise = keras.random.normal((FEATURES, BATCH), stddev=0.3, seed=self.generator) if training else 0.0
        return x @ (self.kernel + noise)


contract("exact-rnn-dropout", sizes=(3,), covered_by=("exact-random-functions", "exact-batchnorm"))(
    lambda distribute: trained(
        distribute,
        [
            layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3, return_sequences=True, seed=1),
            layers.Bidirectional(layers.GRU(2, dropout=0.3, seed=2)),
        ],
        (5, 4),
    )
)


class Cell(layers.Layer):
    """A cell of the script's own with Dropout, which draws in each step of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.state_size = self.output_size = 3
        self.dense, self.drop = layers.Dense(3, "tanh"), layers.Dropout(0.3, seed=4)

    def build(self, shape: Any) -> None:
        self.dense.build((None, shape[-1] + 3))

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        state = self.dense(keras.ops.concatenate([self.drop(x, training=training), states[0]], -1))
        return state, [state]


contract("exact-rnn-cell", also=("mirrored-2",), covered_by=("exact-random-functions", "exact-batchnorm"))(
    lambda distribute: trained(distribute, [layers.RNN(Cell())], (5, 4))
)
contract("exact-rnn-cell-unrolled", covered_by=("exact-random-functions", "exact-batchnorm"))(
    lambda distribute: trained(distribute, [layers.RNN(Cell(), unroll=True)], (5, 4))
)
contract("exact-augmentation", sizes=(3,), covered_by=("exact-random-functions",))(
    lambda distribute: trained(
        distribute,
        [
            layers.RandomFlip(seed=1), layers.RandomBrightness(0.2, value_range=(0, 1), seed=2),
            layers.RandomContrast(0.3, value_range=(0, 1), seed=3),
        ],
        (6, 6, 1),
    )
)  # fmt: skip
# Those that move pixels, which Keras computes in float32.
contract("exact-augmentation-float32", float32=True, tolerance=FLOAT32, covered_by=("exact-random-functions",))(
    lambda distribute: trained(
        distribute,
        [
            layers.RandomTranslation(0.2, 0.2, seed=1), layers.RandomZoom(0.2, seed=2),
            layers.RandomRotation(0.1, seed=3), layers.RandomErasing(value_range=(0, 1), seed=4),
        ],
        (6, 6, 3),
    )
)  # fmt: skip
# Layers that pair random examples of the batch.
contract("exact-mixing", float32=True, tolerance=FLOAT32, covered_by=("exact-random-functions",))(
    lambda distribute: trained(distribute, [layers.MixUp(seed=1), layers.CutMix(seed=2)], (6, 6, 1))
)


@contract("exact-batchnorm", sizes=(3,), also=("parameter_server-2",))
def test_batchnorm(distribute: Any) -> Numbers:
    parts = [layers.Conv1D(3, 2), layers.BatchNormalization(), layers.Flatten(), layers.Dense(4, "tanh")]
    return trained(distribute, [*parts, layers.BatchNormalization(), layers.Dropout(0.3, seed=1)], (5, 4))


class Sampling(Vae):
    def sampled(self, mean: Any, log_variance: Any) -> Any:
        batch, size = keras.ops.shape(mean)[0], keras.ops.shape(mean)[1]
        return mean + tf.exp(0.5 * log_variance) * keras.random.normal((batch, size), seed=self.seed_generator)


class OfTwoViews(keras.Model):
    """Concatenates two views of a batch, as a GAN does real and made images: both get noise, and a layer drops some."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = layers.Dense(1), layers.Dropout(0.3, seed=3)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x: Any, training: bool = False) -> Any:
        both = keras.ops.concatenate([x, -x], 0) / 10
        both += keras.random.normal(keras.ops.shape(both), seed=self.seed_generator)
        one, other = keras.ops.split(self.dense(self.drop(both, training=training)), 2)
        return one * other


contract("exact-concatenated", sizes=(3,))(
    lambda distribute: fitted(compiled(asking(distribute, exact=True), model=OfTwoViews()), *numbers(24))
)
contract("exact-vae-sampling", sizes=(3,), covered_by=("exact-random-functions",))(
    lambda distribute: fitted(compiled(asking(distribute, exact=True), model=Sampling(), loss=None), numbers(24)[0])
)


def draw(function: Callable[..., Any], seed: int, always: bool = False) -> layers.Layer:
    """Returns a layer that adds what a random function returns for its input."""

    class Draw(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.random.SeedGenerator(seed)

        def call(self, x: Any, training: bool = False) -> Any:
            return x + keras.ops.cast(function(x, self.generator), x.dtype) if training or always else x

    return Draw()


@contract("exact-random-functions")
def test_random_functions(distribute: Any) -> Numbers:
    random, shape = keras.random, keras.ops.shape
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "uniform": lambda x, seed: random.uniform(shape(x), seed=seed),
        "normal": lambda x, seed: random.truncated_normal(shape(x), seed=seed),
        "integers": lambda x, seed: random.randint(shape(x), 0, 3, seed=seed),
        "gamma": lambda x, seed: random.gamma(shape(x), 0.5 + keras.ops.abs(x), seed=seed),
        "beta": lambda x, seed: random.beta((shape(x)[0], 1), 2.0, 3.0, seed=seed),
        "binomial": lambda x, seed: random.binomial((shape(x)[0], 1), 5.0, 0.3, seed=seed),
        "categorical": lambda x, seed: random.categorical(x, 1, seed=seed),
    }
    chosen = some(functions, "normal", "gamma", "categorical").values()
    parts = [draw(function, seed) for seed, function in enumerate(chosen)]
    shuffled = draw(lambda x, seed: random.shuffle(x, seed=seed), 1)
    return {
        "draws": trained(distribute, parts, (FEATURES,), count=24),
        **computed({"shuffle": lambda: trained(distribute, [shuffled], (FEATURES,), count=24)}),
    }


def dropped() -> list[layers.Layer]:
    return [layers.Dropout(0.3, seed=3), layers.Dense(4, "tanh"), layers.BatchNormalization()]


contract("exact-run-eagerly", covered_by=("exact-random-functions", "exact-batchnorm", "fit-embedding-eagerly"))(
    lambda distribute: trained(distribute, dropped(), (FEATURES,), run_eagerly=True)
)


@contract("exact-in-loop", covered_by=("exact-random-functions", "exact-batchnorm", "loop"))
def test_in_loop(distribute: Any) -> Numbers:
    """The optimizer asks for it, or the model. Where nobody says it, the layers are named, once."""
    data, exactly = examples(24).batch(BATCH, drop_remainder=True), asking(distribute, exact=True)
    inexact = stack(layers.Dropout(0.5, name="drop"), layers.Dense(1))
    announce_once.cache_clear()
    with contextlib.redirect_stderr(errors := io.StringIO()):
        for _ in range(2):
            Loop(distribute, model=inexact).train(distribute, data)
        loop = Loop(exactly, model=stack(*dropped(), layers.Dense(1)))
        results = loop.train(distribute, data)
        loop = Loop(asking(distribute, exact=False), model=inexact)
        loop.train(distribute, data)
        loop = Loop(distribute, model=exactly(stack(*dropped(), layers.Dense(1))))
        of_model = loop.train(distribute, data)
    is_told = distribute is kd.distribute and kd.is_chief() and kd.num_replicas() > 1
    line = "layers that normalize by a share or draw other noise on each replica: 'drop'. exact=True prevents it, "
    assert re.findall("layers that normalize.*?, ", errors.getvalue()) == [line] * is_told
    return {**results, "of_model": of_model}


class OfTensorFlow(layers.Layer):
    """As in older guides."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


@contract("refuses-exact-draws", of=("serial", "horovod", "multi_worker", "mirrored", "central_storage"))
def test_refuses_draws(distribute: Any) -> Numbers:
    text = r"(?s)not those of `tf\.random`.*RandomStandardNormal at test_exact\.py:\d+.*leave `exact` out"
    return refused(kd.NotSupportedError, text, lambda: trained(distribute, [OfTensorFlow()], (FEATURES,)))
