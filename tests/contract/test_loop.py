"""Custom training loops: the same numbers as in one process."""

import contextlib
import functools
import io
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.data.shares import Share, Shares
from keras_dist.logging import announce_once
from tests.contract.harness import NOT_TPU, Numbers, contract, same
from tests.contract.parts import (
    BATCH,
    COUNT,
    Linear,
    classes,
    compiled,
    computed,
    dataset,
    descend,
    fitted,
    mlp,
    numbers,
    of_pipeline,
    stack,
)
from tests.contract.test_api import refused
from tests.contract.test_training import Subclassed

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")

Verbs = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def verbs(distribute: Any) -> Verbs:
    """`kd.shard`, `kd.run` and `kd.reduce`, or their plain equivalents in one process."""
    if distribute is same:
        return same, lambda step, args: step(*args), lambda op, value: value
    return kd.shard, kd.run, kd.reduce


class Loop:
    """Model, optimizer and step of the loop.

    Args:
        distribute: The argument of the case.
        loss_of: A Keras loss or function of `y`, the prediction and perhaps weights.
        model: Another model than the usual one.
    """

    def __init__(self, distribute: Any, loss_of: Any = None, model: Any = None) -> None:
        self.distribute = distribute
        self.model = model or mlp()
        self.optimizer = distribute(keras.optimizers.SGD(0.1, momentum=0.9))
        self.loss_of = loss_of or keras.losses.MeanSquaredError()

    def step(self, batch: Any) -> Any:
        """Trains on a batch; returns the means of the loss and of the absolute error."""
        x, y, *weights = batch
        with tf.GradientTape() as tape:
            prediction = self.model(x, training=True)
            loss = self.loss_of(y, prediction, *weights)
        descend(tape, loss, self.model, self.optimizer)
        error = tf.abs(prediction - y)
        if tf.rank(error) > 1:  # a tensor, if AutoGraph rewrites the step as it does without kd.run
            error = tf.reduce_mean(error, -1)
        return loss, tf.reduce_mean(error)

    def train(self, distribute: Any, data: Any, epochs: int = 2, is_eager: bool = False) -> Numbers:
        shard, run, reduce = verbs(distribute)
        batches = data if isinstance(data, list) else shard(data)

        def train_step(batch: Any) -> Any:
            return reduce("mean", run(self.step, (batch,)))

        function = train_step if is_eager else tf.function(train_step, reduce_retracing=True)
        logs = [function(batch) for _ in range(epochs) for batch in batches]
        return {"logs": logs, "weights": self.model.get_weights()}


@contract("loop", also=("multi_worker-4", "parameter_server-2"), covered_by=("loop-eager",))
def test_loop(distribute: Any) -> Numbers:
    """Batches of 8, 8, 8 and 1, then of 5."""
    loop = Loop(distribute)
    first = loop.train(distribute, dataset().shuffle(5))
    return {"first": first, "second": loop.train(distribute, dataset(COUNT, 5))}


# The step has gradients of a share, whoever made the optimizer.
contract(
    "loop-optimizer-found", of=("serial", "horovod", "multi_worker", "mirrored", "central_storage"),
    covered_by=("optimizers-found", "loop-eager"),
)(lambda distribute: Loop(same).train(distribute, dataset()))  # fmt: skip
# The last batch has one example.
contract("loop-eager")(
    lambda distribute: Loop(distribute).train(distribute, dataset(), is_eager=True)
)


@contract("loop-shard-function")
def test_loop_shard_function(distribute: Any) -> Numbers:
    """The last batch comes from the first rank only."""
    return Loop(distribute).train(distribute, dataset() if distribute is same else of_pipeline)


def of_reductions(distribute: Any, count: int, batch: int, reductions: Any = REDUCTIONS) -> Numbers:
    """The loss rule holds here as it does in `fit`."""
    results: Numbers = {}
    for reduction in reductions:
        keras.utils.set_random_seed(1)
        loop = Loop(distribute, keras.losses.MeanSquaredError(reduction=reduction))
        loop.optimizer.learning_rate = 0.01
        data = tf.data.Dataset.from_tensor_slices((*numbers(count), np.linspace(0, 2, count))).batch(batch)
        results[reduction] = loop.train(distribute, data, epochs=1)
    return results


contract("loop-keras-losses", covered_by=("loop", "fit-own-train-step", "loss-class-weight"))(
    lambda distribute: of_reductions(distribute, COUNT, BATCH)
)


@contract("loop-full-batches", covered_by=("loop",))
def test_loop_full_batches(distribute: Any) -> Numbers:
    shard, run, _ = verbs(distribute)
    sizes = {str(size): of_reductions(distribute, 48, size) for size in (BATCH, 2 * BATCH)}
    keras.utils.set_random_seed(1)
    unbuilt = Loop(distribute, model=Subclassed()).train(distribute, dataset(24))

    @tf.function
    def add_up(batch: Any) -> Any:
        return kd.reduce("sum", run(lambda batch: [tf.reduce_sum(leaf, 0) for leaf in batch], (batch,)))

    return {**sizes, "unbuilt": unbuilt, "sums": [add_up(batch) for batch in shard(dataset(24))]}


class OwnLoss(Linear):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        errors = (y - y_pred) ** 2
        if tf.rank(errors) > 1:  # a tensor: see `Loop.step`
            errors = tf.reduce_sum(errors, -1)
        return tf.reduce_mean(errors)


@contract("loop-distributed-model", covered_by=("loop-eager",))
def test_loop_distributed_model(distribute: Any) -> Numbers:
    def loop(model: Any) -> tuple[Any, Numbers]:
        loop = Loop(distribute)
        adam = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        loop.model = compiled(distribute, adam, model=model, metrics=["mae"])
        loop.optimizer, loop.loss_of = loop.model.optimizer, lambda y, y_pred: loop.model.compute_loss(None, y, y_pred)
        return loop.model, loop.train(distribute, dataset(24), epochs=1)

    def then_fit() -> Numbers:
        model, in_loop = loop(mlp())
        return {"loop": in_loop, **fitted(model, dataset(24))}

    return computed({"own loss": lambda: loop(OwnLoss())[1], "then fit": then_fit}, "own loss")


def rows_of(own_rank: int) -> tuple[Any, Any]:
    """3 examples on the chief, one more on each further rank."""
    start, stop = sum(3 + r for r in range(own_rank)), sum(3 + r for r in range(own_rank + 1))
    x, y = numbers()
    return x[start:stop], y[start:stop]


def on_tensors(distribute: Any, batch: Any) -> Numbers:
    loop = Loop(distribute)
    return loop.train(distribute, [tuple(tf.constant(leaf) for leaf in batch)])


def all_rows(size: int) -> Numbers:
    return on_tensors(same, [np.concatenate(parts) for parts in zip(*map(rows_of, range(size)), strict=True)])


# Unequal shares that do not come from a dataset.
contract("loop-tensors", reference=all_rows, of_ranks=True, covered_by=("loop",))(
    lambda distribute: on_tensors(distribute, rows_of(kd.rank()))
)


@contract("loop-sum")
def test_loop_sum(distribute: Any) -> Numbers:
    shard, run, _ = verbs(distribute)

    def step(batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"sums": tf.reduce_sum(x, 0), "count": tf.shape(y)[0], "nested": [tf.reduce_sum(y)]}

    def add_up(batch: Any) -> Any:
        return kd.reduce("sum", run(step, (batch,)))

    data = shard(dataset())
    return {"eager": [*map(add_up, data)], "traced": [tf.function(add_up)(batch) for batch in data]}


class Running(keras.layers.Layer):
    """Keeps a mean of what it has seen, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="seen")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.seen.assign(0.9 * self.seen + 0.1 * tf.reduce_mean(x, 0))
        self.calls.assign_add(1.0)
        return x


# `make test` has it on mirrored, as the one loop there; without it nothing says that nobody knows how to combine state.
@contract(
    "loop-own-state", also=("mirrored-2",), covered_by=("loop-eager",),
    of=("serial", "horovod", "multi_worker", "mirrored", "central_storage", "parameter_server"),
)  # fmt: skip
def test_loop_own_state(distribute: Any) -> Numbers:
    """State without an `aggregation` is the mean over the examples, which is right here, and a line says so."""
    lines = {}
    results: Numbers = {}
    for kind in ("traced", "eager"):
        announce_once.cache_clear()
        keras.utils.set_random_seed(1)
        model = stack(Running(name="running"), keras.layers.Dense(1))
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            loop = Loop(distribute, model=model)
            results[kind] = loop.train(distribute, dataset(), is_eager=kind == "eager")
        told = "assigns the variable '.*(running.*?)', which has no aggregation: .* averaged"
        lines[kind] = re.findall(told, errors.getvalue())
        assert errors.getvalue().count("which has no aggregation") == len(lines[kind])  # nothing of the optimizer
    is_told = distribute is kd.distribute and kd.is_chief() and kd.num_replicas() > 1
    assert lines["traced"] == ["running/seen"] * is_told
    assert lines["eager"] == ["running/seen", "running/calls"] * is_told  # without a graph nothing is proven
    return results


def reducer(distribute: Any) -> Callable[[Any], Any]:
    """`kd.all_reduce`, or its plain equivalent."""
    return same if distribute is same else kd.all_reduce


def clipped_descent(distribute: Any, tape: tf.GradientTape, loss: Any, model: Any, optimizer: Any) -> Any:
    """Clips the gradients to a part of their norm, which it returns."""
    gradients = reducer(distribute)(tape.gradient(loss, model.trainable_variables))
    gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
    optimizer.apply(gradients, model.trainable_variables)
    return norm


class Clipping(keras.Model):
    """Has gradients of a table and of a layer."""

    def __init__(self, distribute: Any) -> None:
        super().__init__()
        self.distribute = distribute
        self.table, self.head = keras.layers.Embedding(5, 1), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(x) + self.table(tf.cast(x[:, 0] > 0, "int32"))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return {"loss": loss, "norm": clipped_descent(self.distribute, tape, loss, self, self.optimizer)}


contract("fit-own-clipping")(
    lambda distribute: fitted(
        compiled(distribute, keras.optimizers.Adam(0.1), model=Clipping(distribute)), *numbers(24)
    )
)


class ClippingLoop(Loop):
    def step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self.model(x, training=True))
        return loss, clipped_descent(self.distribute, tape, loss, self.model, self.optimizer)


@contract("loop-own-clipping", covered_by=("fit-own-clipping",))
def test_loop_own_clipping(distribute: Any) -> Numbers:
    """The last batch has one example: with it a share is empty."""
    for is_eager in (False, True):
        train = functools.partial(ClippingLoop(same).train, distribute, dataset(), is_eager=is_eager)
        refused(kd.NotSupportedError, "clips the gradients of its share", train, kd.num_replicas)
    keras.utils.set_random_seed(1)
    loop = ClippingLoop(distribute)
    traced = loop.train(distribute, dataset(), epochs=1)
    return {"traced": traced, "eager": loop.train(distribute, dataset(), epochs=1, is_eager=True)}


class ByHand(Loop):
    """Descends, or adds up gradients, without an optimizer."""

    def __init__(self, distribute: Any, is_reduced: bool, variable: Any = None, clips: bool = False) -> None:
        keras.utils.set_random_seed(1)
        super().__init__(distribute)
        self.all_reduce, self.clips = reducer(distribute) if is_reduced else same, clips
        self.sums = [variable(tf.zeros_like(weight.value), trainable=False) for weight in self.weights() if variable]

    def weights(self) -> list[Any]:
        return self.model.trainable_variables  # type: ignore[no-any-return]

    def step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self.model(x, training=True))
        gradients = self.all_reduce(tape.gradient(loss, self.weights()))
        if self.clips:
            gradients, _ = tf.clip_by_global_norm([2.0 * gradient for gradient in gradients], 0.05)
        for variable, gradient in zip(self.sums or self.weights(), gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Numbers:
        return {**super().train(*args, **kwargs), "sums": [np.asarray(sums) for sums in self.sums]}


@contract("loop-updates-by-hand", of=NOT_TPU, also=("mirrored-2",))
def test_loop_updates_by_hand(distribute: Any) -> Numbers:
    """Of reduced gradients it is right. Traced it is refused otherwise, as is a loss that is a sum."""
    text = "A step of kd.run assigns a"
    for variable in (None, tf.Variable):
        train = functools.partial(ByHand(distribute, is_reduced=False, variable=variable).train, distribute, dataset())
        refused(kd.NotSupportedError, text, train, kd.num_replicas)
    clips = functools.partial(ByHand(distribute, is_reduced=False, clips=True).train, distribute, dataset())
    refused(kd.NotSupportedError, "A step of kd.run clips the gradients", clips, kd.num_replicas)
    summed = Loop(distribute, lambda y, prediction: tf.reduce_sum(tf.square(y - prediction)) * (1 / BATCH) + 0.1)
    refused(
        kd.NotSupportedError, "the gradient of a sum", lambda: summed.train(distribute, dataset()), kd.num_replicas
    )
    one_each = kd.num_replicas() == kd.size()
    of_tensorflow = ByHand(distribute, is_reduced=True, variable=tf.Variable if one_each else keras.Variable)
    announce_once.cache_clear()
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        results = {
            "traced": ByHand(distribute, is_reduced=True).train(distribute, dataset()),
            "clipped": ByHand(distribute, is_reduced=True, clips=True).train(distribute, dataset()),
            "sums": ByHand(distribute, is_reduced=True, variable=keras.Variable).train(distribute, dataset()),
            "of TensorFlow": of_tensorflow.train(distribute, dataset()),
        }
        assert "a step of kd.run" not in errors.getvalue()  # it is proven
        results["eager"] = ByHand(distribute, is_reduced=True).train(distribute, dataset(), is_eager=True)
    is_told = distribute is kd.distribute and kd.is_chief() and kd.num_replicas() > 1
    assert errors.getvalue().count("nothing combines") == len(of_tensorflow.sums) * is_told
    return results


class Conditional(Linear):
    """Updates in every second step, and only by finite gradients."""

    def __init__(self, distribute: Any, sees_batch: bool = True) -> None:
        super().__init__()
        self.all_reduce = reducer(distribute) if sees_batch else same
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((y - self(x, training=True)) ** 2)
        gradients = self.all_reduce(tape.gradient(loss, self.trainable_variables))
        self.steps.assign(self.steps + 1)
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])

        def update() -> Any:
            self.optimizer.apply(gradients, self.trainable_variables)
            return True

        is_second = tf.equal(self.steps % 2, 1)
        return {"updated": tf.cond(tf.logical_and(is_finite, is_second), update, lambda: False)}


def fitted_on_condition(distribute: Any, **options: Any) -> Numbers:
    x, y = numbers(24)
    y[0] = np.inf  # in the first rank's share
    model = compiled(distribute, model=Conditional(distribute, **options))
    fitted(model, x, y, shuffle=False, epochs=3)
    return {"weights": model.get_weights(), "steps": model.optimizer.iterations}


contract("fit-condition")(lambda distribute: fitted_on_condition(distribute))


@contract("refuses-condition-by-rank", covered_by=("fit-condition",))
def test_refuses_condition_by_rank(distribute: Any) -> Numbers:
    """All ranks stop: without a check, one would wait for the others' gradients. Nothing of it is in the way later."""
    if distribute is same or kd.size() == 1:
        return {}
    verified = functools.partial(distribute, verify=True)
    for distributed in (distribute, verified):
        with pytest.raises(kd.DistributionError, match="Some ranks would make an update and others would skip it"):
            fitted_on_condition(distributed, sees_batch=False)
    weights = mlp().get_weights()
    losses = []
    for distributed in (same, verified):
        model = compiled(distributed)
        model.set_weights(weights)
        losses.append(fitted(model, dataset())["history"]["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    return {}


class MetricsLoop(Loop):
    """The loop of TensorFlow's tutorial: metrics of training and of a test, results once an epoch."""

    def __init__(self, distribute: Any) -> None:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        normalization = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([layers.Dense(6, "tanh"), normalization, layers.Dense(3)])
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        super().__init__(distribute, loss_of, model)
        names = ("SparseCategoricalAccuracy", "Mean", "SparseCategoricalAccuracy")
        self.accuracy, self.mean, self.tested = (getattr(keras.metrics, name)() for name in names)
        self.matrix = keras.metrics.MeanIoU(3, sparse_y_pred=False)

    def step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            prediction = self.model(x, training=True)
            loss = self.loss_of(y, prediction)
        descend(tape, loss, self.model, self.optimizer)
        for metric in (self.accuracy, self.matrix):
            metric.update_state(y, prediction)
        self.mean.update_state(x)
        self.mean.update_state(prediction, sample_weight=y)
        return loss

    def test(self, batch: Any) -> None:
        x, y = batch
        self.tested.update_state(y, self.model(x, training=False))

    def run(self, distribute: Any, kind: str) -> Numbers:
        shard, run, _ = verbs(distribute)
        step, test = (tf.function(f) if kind == "step" else f for f in (self.step, self.test))
        functions = [lambda batch: run(step, (batch,)), lambda batch: run(test, (batch,))]
        train, evaluate = map(tf.function, functions) if kind == "traced" else functions
        data, results = tf.data.Dataset.from_tensor_slices(classes()), []
        for _ in range(2):
            for batch in shard(data.batch(BATCH)):
                train(batch)
            for batch in shard(data.batch(6)):
                evaluate(batch)
            for metric in (self.accuracy, self.mean, self.tested, self.matrix):
                results.append(metric.result())
                metric.reset_state()
        return {"results": results, "weights": self.model.get_weights(), "steps": self.optimizer.iterations}


@contract("loop-metrics", covered_by=("loop-eager",))
def test_loop_metrics(distribute: Any) -> Numbers:
    """Traced, eagerly, and with a `tf.function` as the step. `kd.reduce` of a metric is its result."""
    numbers = {kind: MetricsLoop(distribute).run(distribute, kind) for kind in ("traced", "eager", "step")}
    metric = keras.metrics.Mean()
    _, run, _ = verbs(distribute)
    whole, is_whole = [1.0, 3.0], distribute is same or kd.size() == 1
    run(metric.update_state, (tf.constant(whole if is_whole else whole[kd.rank() :][:1]),))
    return {**numbers, "reduced": metric.result() if distribute is same else kd.reduce("mean", metric)}


@contract("refuses-loop-without-run")
def test_refuses_loop_without_run(distribute: Any) -> Numbers:
    """The loop of Keras's guide, where only `kd.distribute` was added: each rank would train on everything."""
    model = compiled(distribute)
    x, y = (tf.constant(leaf) for leaf in numbers(8))

    def train_step(optimizer: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    before = model.get_weights()
    if distribute is not same and kd.num_replicas() > 1:
        for optimizer in (model.optimizer, keras.optimizers.Adam()):  # also one that is not distributed
            for function in (train_step, tf.function(train_step)):
                with pytest.raises(Exception, match="outside of kd.run and `fit`"):
                    function(optimizer)
        with pytest.raises(kd.DistributionError, match=r"kd.all_reduce\(\)"):
            kd.all_reduce([x])
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
    return {}


@contract("refuses-other-reductions")
def test_refuses_other_reductions(distribute: Any) -> Numbers:
    with pytest.raises(kd.ConfigurationError, match=r"op='median'(.|\n)*'sum', 'mean'"):
        kd.reduce("median", tf.constant(1.0))
    return {}


@contract("refuses-other-shards")
def test_refuses_other_shards(distribute: Any) -> Numbers:
    words = "kd.shard.. takes a tf.data.Dataset or a function"
    refused(kd.ConfigurationError, words, lambda: kd.shard([1, 2, 3]))
    batch = next(iter(kd.shard(dataset(24))))
    if isinstance(batch, Share | Shares):
        refused(kd.ConfigurationError, r"args=\(batch,\)", lambda: kd.run(len, batch))
    return {}
