"""State between steps and runs: checksums, metrics, weights, attributes of objects, random states."""

import inspect
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.local.serial import Serial
from keras_dist.environment import Topology
from keras_dist.state import snapshot, weights
from keras_dist.state.snapshot import attributes_of, changed, restore


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "uint8", "bool"])
def test_a_checksum_sees_one_bit_and_where_it_is(dtype: str) -> None:
    values = np.zeros([3, 3, 5])
    values[1, 2, 4] = values[2, 2, 3] = 1
    variables = [keras.Variable(value, dtype=dtype, trainable=False) for value in values]
    *sums, again = weights.checksums([*variables, variables[0]])
    assert again == sums[0]
    assert len({*sums}) == 3


def test_a_checksum_of_zeros_is_zero() -> None:
    """Rank 0 has all accumulated gradients if those of the others have this checksum."""
    assert list(weights.checksums([keras.Variable(np.zeros(shape)) for shape in ([], [0], [3, 2])])) == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_value_of_a_variable_that_is_one_number(dtype: str) -> None:
    (value,) = weights.values_of([keras.Variable(2, dtype=dtype)])
    assert (value.dtype.name, value.shape, value) == (dtype, (), 2)


def test_many_small_parts_are_added_in_double_precision() -> None:
    values = [np.float32(2**24)] + [np.float32(1)] * 8
    assert weights.combine_states(values, np.float32(0), "sum", "count") == np.float32(2**24 + 8)


def test_all_metrics_of_keras_begin_at_zero() -> None:
    """So their states after a reset need not be looked up (`weights.metric_states`)."""
    arguments = {
        "num_classes": 2, "target_class_ids": [0], "recall": 0.5, "precision": 0.5, "specificity": 0.5,
        "sensitivity": 0.5, "fn": keras.losses.mean_squared_error, "k": 1,
    }  # fmt: skip
    classes = {cls for cls in vars(keras.metrics).values() if isinstance(cls, type)} - {keras.Metric}
    y, indices = np.asarray([[0, 1], [1, 0]], np.float32), np.asarray([0, 1])
    for cls in classes:
        parameters = inspect.signature(cls).parameters
        metric = cls(**{name: value for name, value in arguments.items() if name in parameters})
        is_of_one = cls in (keras.metrics.Sum, keras.metrics.Mean)
        metric.update_state(*([y] if is_of_one else [indices if "Sparse" in cls.__name__ else y, 0.1 + 0.3 * y]))
        for variable in metric.variables:
            variable.assign(np.ones(variable.shape))
        metric.reset_state()
        assert not any(np.any(value) for value in weights.values_of(metric.variables)), cls
    assert len(classes) > 35


def test_means_and_chiefs_states() -> None:
    values = [np.float64(1), np.float64(2)]
    assert weights.combine_states(values, np.float64(0), "mean", "v") == 1.5
    assert weights.combine_states(values, np.float64(0), "only_first_replica", "v") == 1


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


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(keras.optimizers.SGD(0.1), marks=pytest.mark.full),
        pytest.param(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), marks=pytest.mark.full),
        keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True, ema_momentum=0.9),
        pytest.param(keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2), marks=pytest.mark.full),
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


CHIEFS_SEED = 77


class OneOfTwo(Serial):
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
    assert snapshot.agree(OneOfTwo(), None).startswith("kept: python, numpy, tensorflow, keras;")
    kept = drawn()
    keras.utils.set_random_seed(3)
    assert drawn() == kept


@pytest.mark.parametrize("name", ["python", "numpy", "tensorflow", "keras"])
def test_a_state_that_differs_gets_the_chiefs_seed(name: str) -> None:
    outcome = snapshot.agree(OneOfTwo(**{name: "another"}), None)
    assert outcome.endswith(f"given the chief's seed: {name}")
    index, found = ["python", "numpy", "tensorflow", "keras"].index(name), drawn()
    keras.utils.set_random_seed(CHIEFS_SEED)  # whose seed for Keras comes from Python's
    expected = [*drawn()[:3], float(keras.random.uniform([], seed=keras.random.SeedGenerator(CHIEFS_SEED)))]
    assert found[index] == expected[index]


def test_the_users_seed_is_for_all() -> None:
    assert snapshot.agree(OneOfTwo(), 9) == "seeded with 9"
    first = drawn()
    keras.utils.set_random_seed(9)
    assert drawn() == first


def test_one_process_is_left_alone() -> None:
    random.seed(1)
    state = random.getstate()
    assert snapshot.agree(Serial(), None) == "unchanged"
    assert random.getstate() == state
