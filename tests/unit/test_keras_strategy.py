"""Checks the private names of Keras for steps under a strategy, and that they are still needed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import keras_strategy, tpu_emulation

pytestmark = pytest.mark.timeout(120)
X = np.random.default_rng(0).normal(size=(6, 3, 4)).astype("float32")
BatchNormalization = keras.layers.BatchNormalization


class Scalar(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_pred)


def test_keras_divides_losses_by_the_number_of_replicas_but_for_scalars() -> None:
    """Once Keras divides all losses or none, `unscaled_losses` can go."""

    def losses() -> list[float]:
        return [float(loss(tf.zeros((2, 1)), tf.ones((2, 1)))) for loss in (keras.losses.MeanSquaredError(), Scalar())]

    with tpu_emulation.emulated_strategy(2).scope():
        assert losses() == [0.5, 1.0]
        with keras_strategy.unscaled_losses():
            assert losses() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("layer", "mask"),
    [
        ({}, None), ({"axis": 1}, None), ({"synchronized": True}, None), ({"renorm": True}, None),
        ({}, np.arange(18).reshape(6, 3) % 4 > 0),
    ],
    ids=["plain", "axis", "synchronized", "renorm", "mask"],
)  # fmt: skip
def test_rows_that_do_not_count_leave_no_trace_in_batchnorm(layer: Any, mask: Any) -> None:
    """The outputs of the first 4 of 6 rows, and the moving averages, are those of a batch of these 4 rows."""
    rows = np.array([1, 1, 1, 1, 0, 0], "float32")
    outputs, states = [], []
    for count in (4, 6):
        model = keras.Sequential([keras.Input((3, 4)), BatchNormalization(momentum=0.5, **layer)])
        call = model.layers[0]
        options = {"training": True, **({} if mask is None else {"mask": mask[:count]})}
        if count == 6:
            with keras_strategy.moments_of_rows(model, lambda: rows, lambda numbers: numbers):
                outputs.append(np.asarray(call(X, **options))[:4])
        else:
            outputs.append(np.asarray(call(X[:4], **options)))
        states.append([np.asarray(variable) for variable in call.non_trainable_variables])
        assert "_moments" not in call.__dict__
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
