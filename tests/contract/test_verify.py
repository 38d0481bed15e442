"""`verify=True`: changes no number, and finds what a script gets wrong, with variable and cause."""

import contextlib
import gc
import io
import re
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dist as kd
from keras_dist.logging import announce_once
from tests.contract.harness import Numbers, asking, contract
from tests.contract.parts import (
    BATCH,
    FEATURES,
    Tracked,
    compiled,
    dataset,
    descend,
    fitted,
    mlp,
    numbers,
    predictions,
    some,
    stack,
    used,
)
from tests.contract.test_api import refused
from tests.contract.test_loop import Loop
from tests.contract.test_sources import trained_bag

COUNT = 24  # full batches: a TPU refuses others in custom steps
OF_RANKS = ("serial", "horovod", "multi_worker")
CHECKED = (*OF_RANKS, "mirrored", "central_storage", "parameter_server")


@contract("verify", sizes=(3,), covered_by=("verify-finds-sum",))
def test_verify(distribute: Any) -> Numbers:
    model = stack(layers.Dense(6, "tanh"), layers.LayerNormalization(), layers.Dense(1))
    model = compiled(asking(distribute, verify=True), keras.optimizers.Adam(0.01), model=model, metrics=["mae"])
    x, y = numbers()
    return used(model, x, y, validation_data=(x[:9], y[:9]), sample_weight=np.linspace(0.1, 2, len(x)))


def changes_nothing(make: Any = keras.Sequential, verify: Any = True, **options: Any) -> Any:
    """Asserts that verification changes no number of a model with Dropout and BatchNormalization, and returns it."""

    def trained(**asked: Any) -> Any:
        keras.utils.set_random_seed(3)
        parts = [layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.3, seed=1), layers.Dense(1)]
        model = make([keras.Input([FEATURES]), *parts])
        model = compiled(asking(kd.distribute, **asked), model=model, **options)
        x, y = numbers()
        return model, fitted(model, x, y, validation_data=(x, y))

    (plain, expected), (model, actual) = trained(verify=False), trained(verify=verify)
    for one, other in zip(expected["weights"], actual["weights"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert expected["history"] == actual["history"]
    return plain, model


@contract("verify-inexact", covered_by=("verify-finds-sum",))
def test_verify_inexact(distribute: Any) -> Numbers:
    changes_nothing()
    return {}


@contract("verify-frees", float32=True, covered_by=("verify-finds-sum",))
def test_frees(distribute: Any) -> Numbers:
    """A search trains one model after another."""
    x, y = numbers()
    alive = []
    for options in ({"verify": True}, {}):
        model = compiled(asking(distribute, **options))
        fitted(model, x, y)
        predictions(model, x)
        alive.append(weakref.ref(model))
        del model
    gc.collect()
    assert [model() for model in alive] == [None, None]
    return {}


@contract("verify-run-eagerly", also=("mirrored-2",), covered_by=("verify-finds-sum",))
def test_run_eagerly(distribute: Any) -> Numbers:
    changes_nothing(run_eagerly=True)
    loop = Loop(asking(distribute, verify=True))
    return loop.train(distribute, dataset(), is_eager=True)


@contract("verify-infinite", covered_by=("verify-finds-sum",))
def test_infinite(distribute: Any) -> Numbers:
    """A loss that is infinite in one share, in a step after which others are verified, is the same in one process."""
    x, y = numbers()
    y[1] = np.inf
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    return fitted(compiled(asking(distribute, verify=True), optimizer), x, y)


class Counting(keras.Sequential):
    """A `train_step` as in Keras's guides, that counts in Python, in a variable of Keras, and draws."""

    def __init__(self, stack: Any) -> None:
        super().__init__(stack)
        self.steps, self.losses_seen = 0, list[Any]()
        self.counter = self.add_weight(shape=(), trainable=False, initializer="zeros", name="counter", dtype="int32")
        self.generator = keras.random.SeedGenerator(4)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.steps += 1
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.losses_seen.append(loss)
        self.counter.assign(self.counter + 1)
        keras.random.uniform([3], seed=self.generator)
        descend(tape, loss, self)
        for metric in self.metrics:
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


@contract("verify-by-default", also=("mirrored-2",), of=CHECKED)
def test_by_default(distribute: Any) -> Numbers:
    if distribute is not kd.distribute:
        return {}
    for is_eager in some({"graph": False, "eagerly": True}, "graph").values():
        plain, model = changes_nothing(Counting, None, run_eagerly=is_eager)
        state = [(each.counter.numpy(), each.generator.state.numpy().tolist()) for each in (plain, model)]
        assert state[0] == state[1]
        assert (plain.steps, len(plain.losses_seen)) == (model.steps, len(model.losses_seen))
    return {}


class Adversary(Tracked):
    """As in Keras's guide on GANs: made rows and real ones go through Dropout together, and noise is of `tf.random`."""

    def __init__(self) -> None:
        super().__init__()
        parts = [layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(FEATURES)]
        self.maker, self.judge = stack(*parts, shape=[2]), stack(layers.Dropout(0.4, seed=3), layers.Dense(1))

    def train_step(self, data: Any) -> Any:
        real, rows = data[0], tf.shape(data[0])[0]
        noise = tf.random.normal([rows, 2], dtype=real.dtype)
        both = tf.concat([self.maker(noise), real], 0)
        labels = tf.concat([tf.ones([rows, 1], real.dtype), tf.zeros([rows, 1], real.dtype)], 0)
        for part, rows_of, wanted in (
            (self.judge, lambda: both, labels),
            (self.maker, lambda: self.maker(noise, training=True), tf.zeros([rows, 1], real.dtype)),
        ):
            with tf.GradientTape() as tape:
                errors = wanted - self.judge(rows_of(), training=True)
                loss = tf.reduce_mean(tf.square(errors))
            descend(tape, loss, part, self.optimizer)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@contract("verify-by-default-gan", of=CHECKED)
def test_by_default_gan(distribute: Any) -> Numbers:
    """It is compared, and no false alarm: each rank has statistics of its own when its second step begins.

    Neither is a lookup that has each id once, which an eager step can't tell from another one.
    """
    model = distribute(Adversary())
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([*model.judge.trainable_variables, *model.maker.trainable_variables])
    model.compile(optimizer)
    errors = io.StringIO()
    announce_once.cache_clear()
    with contextlib.redirect_stderr(errors):
        fitted(model, *numbers(COUNT))
        trained_bag(distribute)
    assert "was not compared" not in errors.getvalue()
    expected = r"normalize by a share or draw other noise on each replica: .*'batch_normalization\w*'"
    by_intention = re.findall(expected, errors.getvalue())
    assert len(by_intention) == (distribute is kd.distribute and kd.is_chief() and kd.num_replicas() > 1)
    return {}


BATCHES = COUNT // BATCH


class Step(Tracked):
    """A model with a step of the script's own, which is wrong on shares.

    Args:
        kind: What is wrong: `"sum"`, `"noisy sum"`, `"coupled"`, `"clipping"`, `"clipping later"`, `"python"`,
            `"later"`, `"variable"` or `"accumulated"`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(mlp())
        self.kind, self.baseline, self.total = kind, 0.0, tf.Variable(0.0, trainable=False)
        weights = self.trainable_variables if kind == "accumulated" else []
        self.sums = [tf.Variable(tf.zeros_like(weight.value), trainable=False) for weight in weights]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            errors = y - self(x)
            if "noisy" in self.kind:
                errors += tf.random.normal(tf.shape(errors), dtype=errors.dtype)
            if self.kind == "coupled":
                loss = tf.reduce_mean(tf.square(errors - tf.transpose(errors)))
            else:
                loss = tf.reduce_sum(tf.square(errors)) if "sum" in self.kind else tf.reduce_mean(tf.square(errors))
            if self.kind == "python":
                loss *= 1 + self.baseline
                self.baseline = 0.5 * self.baseline + float(tf.reduce_mean(y))
            if self.kind == "later":  # as a term that a callback switches on
                loss += tf.cast(self.optimizer.iterations >= BATCHES, loss.dtype) * tf.reduce_sum(tf.square(errors))
            if self.kind == "variable":
                self.total.assign_add(tf.cast(tf.reduce_sum(y), "float32"))
        gradients = tape.gradient(loss, self.trainable_variables)
        if "clipping" in self.kind:
            gradients, _ = tf.clip_by_global_norm(gradients, 50.0 if "later" in self.kind else 0.01)
        if self.kind == "accumulated":
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient)
            gradients = self.sums
        self.optimizer.apply(gradients, self.trainable_variables)
        for total in self.sums:
            total.assign(total * tf.cast(self.optimizer.iterations.value % 2, total.dtype))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def fails(distribute: Any, model: Any, text: str, verify: Any = True, step: str = "step 1", **options: Any) -> Numbers:
    """Asserts that verification stops a model with this text."""
    model = compiled(asking(distribute, verify=verify), model=model, **options)
    if kd.num_replicas() == 1:
        fitted(model, *numbers(COUNT))
        return {}
    return refused(kd.MismatchError, f"(?s)verify: {step} of fit.*{text}", lambda: fitted(model, *numbers(COUNT)))


contract("verify-finds-sum", also=("parameter_server-2",))(
    lambda distribute: fails(
        distribute, Step("sum"), "the gradient of .*dense.*, about .* times.*Likely cause: a sum over the ex"
    )
)
contract("verify-finds-coupled-loss", covered_by=("verify-finds-sum",))(
    lambda distribute: fails(distribute, Step("coupled"), "the gradient of .*dense.*a loss that compares examples")
)
contract("verify-finds-clipping", covered_by=("verify-by-default-finds",))(
    lambda distribute: fails(distribute, Step("clipping"), r"the gradient of .*dense.*clips.*at test_verify\.py:\d+")
)


@contract("verify-by-default-finds", also=("mirrored-2",), of=CHECKED)
def test_by_default_finds(distribute: Any) -> Numbers:
    off = r".*turn the check off: kd\.distribute\(model, verify=False\)"
    texts = {
        "clipping later": rf"batch of \d+ examples.*clips.*at test_verify\.py:\d+{off}",
        "noisy sum": f"the gradient of .*dense.*Likely cause{off}",
        "variable": rf"the tf\.Variable step\w*\.total is off by.*aggregation{off}",
        "accumulated": rf"off by \S+ of (?!0;).*gradient_accumulation_steps{off}",
    }
    for kind, text in some(texts, "clipping later").items():
        fails(distribute, Step(kind), text, "auto" if kind == "clipping later" else None)
    fails(distribute, Step("python"), rf"step\w*\.baseline from its share, in Python{off}", None, run_eagerly=True)
    fails(distribute, Step("later"), f"the gradient of .*Likely cause{off}", None, "a step in the second epoch")
    return {}


def over_batch(x: Any) -> Any:
    return keras.ops.softmax(x, axis=0)


@contract("verify-by-default-functions", of=CHECKED)
def test_by_default_finds_functions(distribute: Any) -> Numbers:
    """Functions that Keras's own layers call, and Keras's operations between them."""
    x = keras.Input([FEATURES])
    centered = layers.Dense(1)(x - keras.ops.mean(x, axis=0, keepdims=True))
    models = {
        "operations": keras.Model(x, centered),
        "activation": stack(layers.Dense(6, over_batch), layers.Dense(1)),
        "softmax": stack(layers.Dense(6), layers.Softmax(axis=0), layers.Dense(1)),
        "unit": stack(layers.Dense(6), layers.UnitNormalization(axis=-2), layers.Dense(1)),
        "regularizer": stack(layers.Dense(6, activity_regularizer=lambda x: keras.ops.max(x)), layers.Dense(1)),
    }
    for model in some(models, "operations", "unit").values():
        fails(distribute, model, "the gradient of .*dense.*Likely cause", None)
    if kd.num_replicas() == 1:
        return {}
    model = compiled(asking(distribute, verify=None), model=models["operations"])
    return mixes_when_it_predicts(model)


def mixes_when_it_predicts(model: keras.Model) -> Numbers:
    text = "(?s)step 1 of predict.*a prediction is off.*mixes the examples of a batch"
    return refused(kd.MismatchError, text, lambda: predictions(model, numbers(COUNT)[0]))


class Noise(layers.Layer):
    """The same noise on each rank, for each share."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype) if training else x


contract("verify-finds-noise")(
    lambda distribute: fails(
        distribute, stack(Noise(), layers.Dense(1)), r"a random layer, StatelessRandomNormal\w* at test_verify\.py:\d+"
    )
)


class Centered(layers.Layer):
    """Normalizes by the mean of the share, also when it predicts."""

    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(x, 0)


@contract("verify-finds-batch-statistics", covered_by=("verify-finds-sum", "tests/unit/test_verification.py"))
def test_finds_batch_statistics(distribute: Any) -> Numbers:
    model = stack(Centered(), layers.Dense(1))
    fails(distribute, model, "a normalization by the statistics")
    model = compiled(asking(distribute, verify=True), model=model)
    return mixes_when_it_predicts(model)


class Constant(layers.Layer):
    def call(self, x: Any) -> Any:
        return x * (1.0 + kd.rank())


contract("verify-finds-constant", of=OF_RANKS, covered_by=("verify-finds-noise", "stops-different-weights"))(
    lambda distribute: fails(
        distribute, stack(Constant(), layers.Dense(1)), "the ranks compute with different constants or weights"
    )
)


@contract("verify-in-loop", covered_by=("verify-finds-sum", "loop"))
def test_in_loop(distribute: Any) -> Numbers:
    loop = Loop(asking(distribute, verify=True))
    result = loop.train(distribute, dataset(COUNT))
    root = lambda y, prediction: tf.sqrt(tf.reduce_mean((y - prediction) ** 2))  # noqa: E731
    wrong = Loop(asking(distribute, verify=True), loss_of=root)
    if kd.num_replicas() > 1:
        with pytest.raises(Exception, match="(?s)verify: step 1 of kd.run.*the gradient of"):
            wrong.train(distribute, dataset(COUNT))
    return result
