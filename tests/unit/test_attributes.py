"""The state of Python objects: which attributes are data, which of them have changed, and how they are restored."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np

from keras_dist.state.snapshot import attributes_of, changed, restore


class Callback:
    def __init__(self) -> None:
        self.patience, self.best, self.names = 3, float("nan"), ["a"]
        self.weights = [np.zeros(2), np.ones(1)]
        self.nested = {"a": (1, {2.5}), 3: None}
        self.model, self.function, self.ramps = object(), print, [(keras.Variable(1.0), 2)]
        self.objects = np.array([object()])
        self.noise = np.random.default_rng(1)
        self.old_noise = np.random.RandomState(1)
        self.dice = random.Random(1)
        self.variable = keras.Variable(1.0)

    def draw(self) -> list[float]:
        return [self.noise.normal(), self.old_noise.normal(), self.dice.random()]


def test_only_data() -> None:
    assert {*vars(Callback())} - {*attributes_of(Callback())} == {"model", "function", "objects", "ramps"}


def test_nothing_has_changed() -> None:
    callback = Callback()
    assert changed(attributes_of(callback), attributes_of(callback)) == {}


def test_what_has_changed() -> None:
    callback = Callback()
    before = attributes_of(callback)
    callback.best, callback.new = 0.5, True  # type: ignore[attr-defined]
    callback.names.append("b")
    callback.weights[1] += 1
    callback.variable.assign(2.0)
    callback.draw()
    found = changed(before, attributes_of(callback))
    assert {*found} == {"best", "new", "names", "weights", "variable", "noise", "old_noise", "dice"}
    assert found["names"] == ["a", "b"]


def test_another_object_goes_on() -> None:
    callback, other = Callback(), Callback()
    before = attributes_of(callback)
    callback.weights[0][1] = 5.0
    callback.variable.assign(2.0)
    callback.draw()
    state = changed(before, attributes_of(callback))
    variable: Any = other.variable
    restore(other, state)
    assert other.variable is variable
    assert float(variable) == 2.0
    assert other.weights[0][1] == 5.0
    assert other.draw() == callback.draw()


def test_a_copy_does_not_change_later() -> None:
    callback = Callback()
    state = attributes_of(callback)
    callback.weights[0] += 1
    callback.nested["a"] = 0
    assert state["weights"][0].tolist() == [0, 0]
    assert state["nested"]["a"] == (1, {2.5})
