"""What a commit takes is what the variables have at that moment, though nothing is copied."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from keras_dist.state import snapshot


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(0.1),
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True, ema_momentum=0.9),
        keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2),
    ],
    ids=["sgd", "momentum", "adam", "accumulation"],
)
def test_training_does_not_change_what_was_taken(optimizer: keras.optimizers.Optimizer, jit_compile: bool) -> None:
    optimizer = type(optimizer).from_config(optimizer.get_config())  # not the one of the other case
    layers = [keras.layers.Embedding(5, 4), keras.layers.Flatten(), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    x, y = np.arange(12).reshape(4, 3) % 5, np.ones((4, 1))
    model.fit(x, y, verbose=0)
    taken = snapshot.take(model, [optimizer])
    copies = {name: np.array(array) for name, array in taken.items()}
    model.fit(x, y, epochs=3, verbose=0)
    later = snapshot.take(model, [optimizer])
    for name, array in taken.items():
        np.testing.assert_array_equal(array, copies[name], err_msg=name)
    assert all(differ(taken, later, f"variables/model/{i}/") for i in range(7))


def differ(taken: Any, later: Any, prefix: str) -> bool:
    (name,) = (name for name in taken if name.startswith(prefix))
    return not np.array_equal(taken[name], later[name])
