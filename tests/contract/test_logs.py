"""The steps that Keras's guides and examples teach, and what they return as logs: the same numbers."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_dist as kd
from tests.contract.harness import Numbers, contract, same
from tests.contract.parts import (
    BATCH,
    FEATURES,
    Distribute,
    Gan,
    GuideStep,
    compiled,
    compiled_gan,
    computed,
    descend,
    evaluated,
    fitted,
    mlp,
    numbers,
)

EVEN = 24  # a TPU refuses a custom step on batches of different sizes


class FunctionStep(GuideStep):
    """A `tf.function` calls the model, for both steps. It is not built yet when it is traced first."""

    @tf.function
    def predicted(self, x: Any, y: Any, training: bool) -> Any:
        prediction = self(x, training=training)
        return prediction, tf.reduce_mean(tf.square(y - prediction))


class DerivedLogs(GuideStep):
    def updated(self, y: Any, prediction: Any, loss: Any) -> Any:
        results = super().updated(y, prediction, loss)
        errors = results["compile_metrics"]
        return {
            **results,
            "rmse": ops.sqrt(errors["mse"]),
            "ratio": errors["mae"] / (1.0 + errors["mse"]),
            "lr": self.optimizer.learning_rate,
            "renamed": results["loss"],
            "last": ops.mean(ops.abs(y - prediction)),
        }


def results_of(distribute: Distribute, model: keras.Model, count: int = EVEN, **options: Any) -> Numbers:
    model, (x, y) = compiled(distribute, model=model, **{"metrics": ["mae"], **options}), numbers(count)
    result = fitted(model, x, y, validation_data=numbers(16))
    result["evaluation"] = evaluated(model, x, y, return_dict=True)
    result["train_on_batch"] = model.train_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    result["test_on_batch"] = model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    return result


# Each batch counts once in the mean of a scalar loss, also one that is smaller than the ranks.
contract("guide-train-step-last-batch", sizes=(3,), covered_by=("logs-derived",))(
    lambda distribute: results_of(distribute, GuideStep(), 19)
)
contract("fit-function-in-step", covered_by=("fit-own-train-step",))(
    lambda distribute: results_of(distribute, FunctionStep(), loss=None)
)
contract("logs-derived", sizes=(3,))(lambda distribute: results_of(distribute, DerivedLogs(), metrics=["mae", "mse"]))


class Vae(keras.Model):
    """The variational autoencoder of keras.io: renamed results of trackers of scalar losses. A subclass adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(4), keras.Sequential([keras.Input([2]), keras.layers.Dense(FEATURES)])
        self.total, self.reconstruction = keras.metrics.Mean("total_loss"), keras.metrics.Mean("reconstruction_loss")
        self.divergence, self.seed_generator = keras.metrics.Mean("kl_loss"), keras.random.SeedGenerator(7)

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.reconstruction, self.divergence]

    def sampled(self, mean: Any, log_variance: Any) -> Any:
        return mean

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(data), 2, axis=1)
            reconstructed = self.decoder(self.sampled(mean, log_variance))
            reconstruction = ops.mean(ops.sum(ops.square(data - reconstructed), axis=1))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = reconstruction + divergence
        descend(tape, total, self)
        self.total.update_state(total)
        self.reconstruction.update_state(reconstruction)
        self.divergence.update_state(divergence)
        losses = {"loss": self.total, "reconstruction_loss": self.reconstruction, "kl_loss": self.divergence}
        return {name: metric.result() for name, metric in losses.items()}


class ScalarGan(Gan):
    """Its trackers get a number for each batch, and it has one more log, as the GAN of keras.io."""

    def logs(self, d_loss: Any, g_loss: Any, count: Any) -> Any:
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        results = {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}
        return {**results, "sum": results["d_loss"] + results["g_loss"]}


class Distiller(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(3), mlp(3)
        self.student_loss = keras.losses.MeanSquaredError()
        self.distillation_loss = keras.losses.KLDivergence()

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        target = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        distillation = self.distillation_loss(target, ops.softmax(y_pred / 3.0, axis=1))
        return 0.1 * self.student_loss(y, y_pred) + 0.9 * distillation


def keras_examples(distribute: Distribute, count: int) -> Numbers:
    x, y = numbers(count, 3)
    noise = np.random.RandomState(4).normal(size=[count, FEATURES])
    return {
        "vae": fitted(compiled(distribute, model=Vae(), loss=None), x),
        "gan": fitted(compiled_gan(distribute(ScalarGan())), x, noise),
        "distiller": fitted(compiled(distribute, model=Distiller(), loss=None, metrics=["mae"]), x, y),
    }


contract("examples", sizes=(3,), covered_by=("logs-derived",))(lambda distribute: keras_examples(distribute, EVEN))
contract("examples-last-batch", sizes=(3,), covered_by=("logs-derived",))(
    lambda distribute: keras_examples(distribute, 19)
)


# --- Metrics that a user has written ---


def largest_error(y: Any, prediction: Any) -> Any:
    """A function of Keras's kind: a value for each example."""
    return ops.max(ops.abs(y - prediction), axis=-1)


def mean_error(y: Any, prediction: Any) -> Any:
    return ops.mean(ops.abs(y - prediction))


def dice(y: Any, prediction: Any) -> Any:
    """A function whose value for a batch is no mean over the examples."""
    return 2 * ops.sum(y * prediction) / (ops.sum(y**2) + ops.sum(prediction**2) + 1.0)


class OfBatches(keras.metrics.Metric):
    def __init__(self, name: str = "of_batches") -> None:
        super().__init__(name=name)
        self.total = self.add_variable([], "zeros", name="total")
        self.count = self.add_variable([], "zeros", name="count")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.add(ops.mean(ops.square(y - prediction)))

    def add(self, value: Any, count: Any = 1.0) -> None:
        self.total.assign_add(value)
        self.count.assign_add(count)

    def result(self) -> Any:
        return self.total / self.count


class OfExamples(OfBatches):
    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.add(ops.sum(ops.square(y - prediction)), ops.cast(ops.shape(y)[0], self.count.dtype))


class Average(keras.metrics.Mean):
    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        super().update_state(mean_error(y, prediction))


class OfWholeBatch(OfBatches):
    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.add(ops.sqrt(ops.mean(ops.square(y - prediction))))


@contract("metrics-by-hand", sizes=(3,))
def test_metrics_by_hand(distribute: Distribute) -> Numbers:
    own = [OfBatches(), OfExamples("of_examples"), Average("average"), OfWholeBatch("of_whole_batch")]
    model = compiled(distribute, metrics=[largest_error, mean_error, dice, *own])
    x, y = numbers(21)
    result = fitted(model, x, y, batch_size=7, validation_data=numbers(9))
    return {**result, "evaluation": model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)}


class Largest(OfBatches):
    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign(ops.maximum(self.total, ops.max(ops.abs(y - prediction))))
        self.count.assign(1.0)


class InList(OfBatches):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.values.append(mean_error(y, prediction))


class InListEagerly(InList):
    def result(self) -> Any:
        return tf.reduce_mean(self.values)

    def reset_state(self) -> None:
        super().reset_state()
        self.values = []


class InTensorFlow(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="in_tensorflow")
        self.total = tf.Variable(0.0)

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.cast(mean_error(y, prediction), tf.float32))

    def result(self) -> Any:
        return self.total


class OfPairs(OfBatches):
    """Accepts pairs of rows only."""

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        even = tf.debugging.assert_equal(tf.shape(y)[0] % 2, 0)
        with tf.control_dependencies([] if even is None else [even]):
            pairs = tf.reshape(tf.abs(y - prediction), [-1, 2])
        self.add(ops.max(ops.min(pairs, axis=1)))


@contract("metrics-that-are-no-sums", of=("serial", "central_storage", "horovod", "mirrored", "multi_worker"))
def test_metrics_that_are_no_sums(distribute: Distribute) -> Numbers:
    """One replica updates a maximum with the whole batch, also if that has one row."""
    model = compiled(distribute, metrics=[Largest("largest"), OfPairs("pairs"), "mae"])
    x, y = numbers(18)
    result = fitted(model, x, y, batch_size=8, validation_data=numbers(10))
    evaluation = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)

    def odd() -> list[Any]:
        largest = compiled(distribute, metrics=[Largest("largest")])
        fit = fitted(largest, *numbers(17))
        return [fit, *(largest.train_on_batch(x[at : at + 6], y[at : at + 6]) for at in (0, 6, 12))]

    return {**result, "evaluation": evaluation, **computed({"odd": odd})}


@contract("metrics-in-python", of=("serial", "horovod", "multi_worker"))
def test_metrics_in_python(distribute: Distribute) -> Numbers:
    model = compiled(distribute, metrics=[InListEagerly()], run_eagerly=True)
    return fitted(model, *numbers(17), validation_data=numbers(9))


@contract("refuses-metrics-that-are-no-sums")
def test_refuses_metrics_that_are_no_sums(distribute: Distribute) -> Numbers:
    from keras_dist.cluster import current_backend

    refused: dict[Any, str] = {InList: "'values'", InTensorFlow: "tf.Variable"}
    if distribute is not same and not current_backend().keeps_metrics:
        refused[Largest] = "Largest"
    for metric, words in refused.items():
        model = compiled(distribute, metrics=[metric()])
        with pytest.raises(kd.NotSupportedError, match=words) if kd.num_replicas() > 1 else contextlib.nullcontext():
            fitted(model, *numbers(16))
    return {}
