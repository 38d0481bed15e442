"""How the optimizers of a model are found."""

from __future__ import annotations

import keras

from keras_dist.step.optimizer import optimizers_of


def test_containers_that_contain_themselves() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    first, second = keras.optimizers.SGD(), keras.optimizers.Adam()
    model.ring = {"first": first}
    model.ring["self"] = model.ring
    model.queue = [second]
    model.queue.append(model.queue)
    assert set(map(id, optimizers_of(model))) == {id(first), id(second)}
