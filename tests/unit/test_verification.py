"""What verification takes for rounding, which steps are checked by default, and that a trial is undone."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.backends.local.serial import Serial
from keras_dist.compat import keras_layers, keras_random
from keras_dist.compat.keras_model import Attributes
from keras_dist.training import verification
from keras_dist.training.trial import (
    Difference,
    Quantity,
    Trial,
    differences_in,
    is_in_step,
    precisions_of_float32,
    table_of,
)

FLOAT32 = 3.5e-4


def judged(expected: dict[str, Any], actual: dict[str, Any]) -> list[Difference]:
    quantities = [[Quantity(name, "group", tf.constant(value)) for name, value in side.items()] for side in
                  (expected, actual)]  # fmt: skip
    return differences_in(quantities[0], table_of(*quantities).numpy(), FLOAT32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), st.floats(-1e-7, 1e-7))
def test_rounding_is_no_difference(values: list[float], relative: float) -> None:
    exact = np.asarray(values, "float32")
    (found,) = judged({"a": exact}, {"a": exact * np.float32(1 + relative)})
    assert not found.is_wrong


@pytest.mark.parametrize(
    ("expected", "actual", "factor"),
    [
        ([1.0, 2.0], [0.5, 1.0], 0.5),
        ([1.0, 2.0], [2.0, 4.0], 2.0),
        ([1.0, 2.0], [1.0, 2.01], np.nan),
        ([1.0, 2.0], [1.0, np.nan], np.nan),
        ([1.0, 2.0], [1.0, 2.0, 3.0], np.nan),
    ],
)
def test_a_difference_is_found_with_its_factor(expected: Any, actual: Any, factor: float) -> None:
    (found,) = judged({"a": expected}, {"a": actual})
    assert found.is_wrong
    np.testing.assert_allclose(found.factor, factor)


def test_a_tiny_gradient_is_measured_by_the_others() -> None:
    large = {"large": [1.0, 2.0]}
    assert not judged({**large, "tiny": [1e-8]}, {**large, "tiny": [-1e-8]})[1].is_wrong
    assert judged({"a": [1e-8]}, {"a": [-1e-8]})[0].is_wrong


def test_integers_and_texts_are_equal_or_not() -> None:
    assert judged({"a": [1000000]}, {"a": [1000001]})[0].is_wrong
    assert judged({"a": ["x"]}, {"a": ["y"]})[0].is_wrong
    assert not any(found.is_wrong for found in judged({"a": [3], "b": ["x"]}, {"a": [3], "b": ["x"]}))
    assert not judged({"a": [np.nan, np.inf]}, {"a": [np.nan, np.inf]})[0].is_wrong


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_trial_is_undone(eagerly: bool) -> None:
    """If this fails in a graph, TensorFlow's captured variables can no longer be read."""
    variable, table = keras.Variable([1.0]), tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    raw = tf.Variable(5)

    def step() -> Any:
        variable.assign(variable.value + 1)
        table.size()
        if not eagerly:  # an eager trial sees Keras's variables only
            raw.assign_add(1)
        return tf.identity(variable.value)

    def run() -> tuple[Any, Any]:
        trial = Trial()
        return trial.run(step), trial.run(step)

    first, second = run() if eagerly else tf.function(run)()
    assert (first.numpy(), second.numpy(), variable.value.numpy(), raw.numpy()) == (2, 2, 1, 5)


@pytest.mark.parametrize(
    ("device", "tf32", "precision"),
    [("CPU", True, "float32"), ("GPU", True, "float16"), ("GPU", False, "float32"), ("TPU", True, "bfloat16")],
)
def test_what_devices_multiply_float32_in(
    monkeypatch: pytest.MonkeyPatch, device: str, tf32: bool, precision: str
) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [device] if kind == device else [])
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: tf32)
    assert precisions_of_float32() == {precision}


def test_weights_and_gradients_are_rounded_once_more() -> None:
    """By two units of the largest gradient: one that cancels out has no size of its own, and Adam divides by it."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones", name="dense")])
    model.compile(keras.optimizers.SGD(1.0))
    kernel, bias = model.trainable_variables
    with verification._rounded_again(model, 0):
        off = float(kernel.value[0, 0]) - 1
        assert abs(off) == 2 * np.finfo("float32").eps
        kernel.assign([[0.0]])
        model.optimizer.apply([tf.constant([[4.0]]), tf.constant([0.0])], model.trainable_variables)
    assert abs(float(kernel.value[0, 0]) + 4) == 8 * np.finfo("float32").eps
    assert abs(float(bias.value[0])) == 8 * np.finfo("float32").eps
    bias.assign([0.0])
    model.optimizer.apply([tf.constant([[4.0]]), tf.constant([0.0])], model.trainable_variables)
    assert float(bias.value[0]) == 0


layers = keras.layers


def squared(y: Any, prediction: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - prediction), -1)


class Own(layers.Layer):
    def call(self, x: Any) -> Any:
        return x


class Loss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared(y_true, y_pred)


class Optimizer(keras.optimizers.SGD):
    pass


class Evaluated(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class Predicted(keras.Sequential):
    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)


class Counted(keras.Sequential):
    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_metrics(*args, **kwargs)


def model_of(cls: Any = keras.Sequential, own: Any = None, **options: Any) -> keras.Model:
    model = cls([keras.Input([2]), *([] if own is None else [own]), layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


@pytest.mark.parametrize(
    ("kinds", "arguments"),
    [
        ("", {}),
        ("", {"loss": keras.losses.Huber(), "metrics": ["mae", keras.metrics.AUC()]}),
        ("", {"loss": keras.losses.mean_squared_error, "optimizer": keras.optimizers.Adam()}),
        ("train test", {"loss": squared}),
        ("train test", {"loss": [Loss()]}),
        ("train test", {"metrics": [squared]}),
        ("train test", {"weighted_metrics": [squared]}),
        ("train test predict", {"own": Own()}),
        ("train test predict", {"own": layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))}),
        ("train", {"optimizer": Optimizer()}),
        ("test", {"cls": Evaluated}),
        ("predict", {"cls": Predicted}),
        ("train test", {"cls": Counted}),
    ],
)  # fmt: skip
def test_which_steps_run_code_of_the_script(kinds: str, arguments: dict[str, Any]) -> None:
    model = model_of(**arguments)
    assert [kind for kind in ("train", "test", "predict") if is_in_step(model, kind)] == kinds.split()


def test_draws_of_the_script_are_those_without_a_check() -> None:
    """If this fails, TensorFlow keeps the seeds of eager operations elsewhere."""

    def drawn(is_checked: bool) -> list[float]:
        tf.random.set_seed(1)
        first = float(tf.random.normal([]))
        if is_checked:
            with keras_random.kept_draws():
                other = [float(tf.random.normal([])) for _ in range(3)]
            assert first not in other
        return [first, float(tf.random.normal([])), float(tf.random.normal([]))]

    assert drawn(is_checked=True) == drawn(is_checked=False)


def test_what_a_step_leaves_in_python_is_undone_and_named() -> None:
    layer = Own(name="own")
    layer.count, layer.seen, layer.table, layer.array = 1, [1], {"a": 1}, np.zeros(2)
    layer.variable, layer.variables_of_it = tf.Variable(1.0), [tf.Variable(2.0)]
    attributes = Attributes([layer])
    assert list(attributes.variables()) == ["own.variable", "own.variables_of_it[0]"]
    trial = Trial([variable.handle for variable in attributes.variables().values()], attributes)
    held, seen = attributes.now(), layer.seen

    def step() -> None:
        layer.count += 1
        layer.seen.append(2)
        layer.table["b"] = 2
        layer.array += 1
        layer.new = 3
        layer.variable.assign_add(1)

    trial.run(step)
    assert (layer.count, layer.seen, layer.table, layer.array.tolist()) == (1, [1], {"a": 1}, [0, 0])
    assert layer.seen is seen
    assert not hasattr(layer, "new")
    assert float(layer.variable) == 1
    assert attributes.different(held, trial.left) == ["own.count"]
    with trial.beginning_with(trial.left):
        assert layer.count == 2
    assert layer.count == 1


def test_rounding_that_a_model_amplifies_is_no_difference() -> None:
    """What rounding the weights changes by 2 % may be off by 19 %, and not by 40 %; its group is measured together."""
    values = {"a": 1.0, "b": 1.0}
    expected = [Quantity(name, "update 1", tf.constant([value])) for name, value in values.items()]

    def wrong(off: float, disturbed: float) -> list[bool]:
        tables = [
            table_of(expected, [each._replace(value=each.value + change) for each in expected]).numpy()
            for change in (off, disturbed)
        ]
        tables[1][1, 0] = 0  # by chance
        return [found.is_wrong for found in differences_in(expected, tables[0], 3.5e-4, tables[1])]

    assert wrong(0.19, 0.02) == [False, False]
    assert wrong(0.4, 0.02) == [True, True]
    assert wrong(0.4, 0.0) == [True, True]


class DropPath(layers.Layer):
    """As scripts write it: drops whole examples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob, self.seeds = rate, keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training or self.drop_prob == 0:
            return x
        kept = keras.random.uniform((len(x), 1), seed=self.seeds) > self.drop_prob
        return x * keras.ops.cast(kept, x.dtype)


def test_layers_that_compute_on_a_share_are_found_where_they_do() -> None:
    frozen = layers.BatchNormalization(trainable=False, name="frozen")
    model = keras.Sequential([
        layers.BatchNormalization(), frozen, layers.BatchNormalization(synchronized=True), layers.Dropout(0.1),
        layers.Dropout(0.0), DropPath(0.1), DropPath(0.0), layers.Reshape((2, 2)), layers.LSTM(2),
        layers.Reshape((1, 2)), layers.LSTM(2, dropout=0.1), layers.Reshape((2, 1, 1)), layers.RandomFlip(),
        layers.SpectralNormalization(layers.Dense(1)),
    ])  # fmt: skip
    found = list[Any]()
    with keras_layers.observed_layers(None, found):
        model(np.ones((2, 4)), training=False)
        assert not found
        model(np.ones((2, 4)), training=True)
    assert [*dict.fromkeys(found)] == [model.layers[index] for index in (0, 3, 5, 10, 12)]


def test_the_number_of_verified_steps_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    found = verification.Verification(Serial(), verification.Verified(), "fit", model)
    found.steps = 1
    found.report()
    assert "keras_dist: verified 1 step of fit: 0 quantities are those of one process" in capsys.readouterr().err
