"""The steps that Keras's guides and examples teach, and what they return as logs: the same numbers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tests.contract.harness import Numbers, contract
from tests.contract.parts import BATCH, Distribute, compiled, fitted, float64, numbers

EVEN = 24  # a TPU refuses a custom step on batches of different sizes


class GuideStep(keras.Model):
    """The `train_step` and `test_step` of Keras's guide, with the metrics of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.updated(y, prediction, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        prediction = self(x, training=False)
        return self.updated(y, prediction, self.compute_loss(y=y, y_pred=prediction))

    def updated(self, y: Any, prediction: Any, loss: Any) -> Any:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


class DerivedLogs(GuideStep):
    """Logs computed from metrics, a learning rate, and a number of the last batch."""

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


def results_of(model: keras.Model, count: int) -> Numbers:
    """Trains and evaluates, on batches and on arrays."""
    x, y = numbers(count)
    result = fitted(model, x, y, validation_data=numbers(16))
    result["evaluation"] = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    result["train_on_batch"] = model.train_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    result["test_on_batch"] = model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    return result


@contract("guide-train-step", sizes=(3,))
def test_guide_train_step(distribute: Distribute) -> Numbers:
    float64()
    return results_of(compiled(distribute, model=GuideStep(), metrics=["mae"]), EVEN)


@contract("logs-derived", sizes=(3,))
def test_logs_derived(distribute: Distribute) -> Numbers:
    float64()
    return results_of(compiled(distribute, model=DerivedLogs(), metrics=["mae", "mse"]), EVEN)
