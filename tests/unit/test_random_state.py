"""Random states are the same on all ranks: seeded ones are kept, the others get the chief's seed."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.local.serial import Serial
from keras_dist.environment import Topology
from keras_dist.state import snapshot as random_state

CHIEFS_SEED = 77


class OneOfTwo(Serial):
    """Rank 1 of 2. The chief has these states."""

    topology = Topology(rank=1, size=2)

    def __init__(self, **chief: Any) -> None:
        self._chief = chief

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        own, _ = value
        return [({**own, **self._chief}, CHIEFS_SEED), value]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(3)


def drawn() -> tuple[float, ...]:
    return random.random(), np.random.uniform(), float(tf.random.uniform([])), float(keras.random.uniform([]))


def test_states_that_are_alike_are_kept() -> None:
    assert random_state.agree(OneOfTwo(), None).startswith("kept: python, numpy, tensorflow, keras;")
    kept = drawn()
    keras.utils.set_random_seed(3)
    assert drawn() == kept


@pytest.mark.parametrize("name", ["python", "numpy", "tensorflow", "keras"])
def test_a_state_that_differs_gets_the_chiefs_seed(name: str) -> None:
    """Keras's generator may exist on the chief only."""
    keras.utils.set_random_seed(3)
    outcome = random_state.agree(OneOfTwo(**{name: "another"}), None)
    assert outcome.endswith(f"given the chief's seed: {name}")
    expected = {
        "python": lambda: random.Random(CHIEFS_SEED).random(),
        "numpy": lambda: np.random.RandomState(CHIEFS_SEED).uniform(),
        "keras": lambda: float(keras.random.uniform([], seed=keras.random.SeedGenerator(CHIEFS_SEED))),
    }
    if name in expected:
        index = ["python", "numpy", "tensorflow", "keras"].index(name)
        assert drawn()[index] == expected[name]()
    else:
        assert random_state.keras_random.tensorflow_seed() == CHIEFS_SEED


def test_other_seeds_of_keras_differ_before_its_generator_exists() -> None:
    keras.utils.set_random_seed(3)
    assert "chief's seed: keras" in random_state.agree(OneOfTwo(keras=4), None)


def test_the_users_seed_is_for_all() -> None:
    assert random_state.agree(OneOfTwo(), 9) == "seeded with 9"
    first = drawn()
    keras.utils.set_random_seed(9)
    assert drawn() == first


def test_one_process_is_left_alone() -> None:
    random.seed(1)
    state = random.getstate()
    assert random_state.agree(Serial(), None) == "unchanged"
    assert random.getstate() == state
