"""What the compilation of layers relies on in Keras and TensorFlow. A failure means that they have changed."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import keras_fit, keras_layers
from keras_dist.compat.keras_model import attach, attached
from keras_dist.errors import NotSupportedError
from keras_dist.step import whole_batch
from tests.contract.test_xla import compiled_functions

X, Y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")


class Strategy:
    """Any object that Keras takes for a strategy turns XLA off."""

    num_replicas_in_sync = 1

    def run(self, function: Any, args: Any) -> Any:
        return function(*args)


def small() -> keras.Model:
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])


def test_a_strategy_turns_automatic_xla_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Keras chooses without looking at the strategy, `compile` may see it."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    model = small()
    attach(model, keras_fit.STRATEGY, strategy := Strategy())
    model.compile("sgd", "mse")
    assert model.jit_compile is False
    with attached(model, keras_fit.STRATEGY, None):
        model.compile("sgd", "mse")
    assert model.jit_compile is True
    assert model.distribute_strategy is strategy


def functions_of(train: Any) -> list[str]:
    """Returns the names of the functions for XLA that a call has traced."""
    before = compiled_functions()
    train()
    return sorted(name.split("_inference_")[-1] for name in compiled_functions() - before)


def test_keras_compiles_the_whole_step() -> None:
    """Once it compiles something smaller, that may do what `step/whole_batch.py` does."""
    model = small()
    model.compile("sgd", "mse", jit_compile=True)
    (name,) = functions_of(lambda: model.train_on_batch(X, Y))
    assert name.startswith("one_step_on_data")
    model.compile("sgd", "mse", jit_compile=True)
    with attached(model, keras_fit.JIT_COMPILE, False):
        model.make_train_function()
    assert functions_of(lambda: model.train_on_batch(X, Y)) == []
    assert model.jit_compile is True


@pytest.mark.parametrize("kind", [pytest.param("SimpleRNN", marks=pytest.mark.full), "LSTM"])
def test_xla_returns_no_list_of_a_loop(kind: str) -> None:
    """Once a compiled function with a loop has a gradient, `_with_loops` is not needed."""
    layer = getattr(keras.layers, kind)(2, dtype="float64")
    inputs = tf.ones([4, 5, 3], tf.float64)
    layer(inputs)
    function = tf.function(layer.call, jit_compile=True, autograph=False)
    assert keras_layers.has_loop(function.get_concrete_function(inputs).graph)

    def gradients(call: Any) -> Any:
        @tf.function
        def run() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(inputs) ** 2)
            return tape.gradient(loss, [variable.value for variable in layer.trainable_variables])

        return run()

    with pytest.raises((tf.errors.UnimplementedError, tf.errors.InvalidArgumentError)):
        gradients(function)
    expected = gradients(layer)
    model = keras.Sequential([layer])
    model.compile(jit_compile=True)
    with whole_batch.compiled_layers(model, is_chief=True):
        actual = gradients(layer)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


class Everything(keras.layers.Layer):
    """A layer that masks, adds a loss, counts in a metric, keeps statistics and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
        self.mean = keras.metrics.Mean()

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = self.drop(self.norm(inputs, training=training), training=training)
        self.add_loss(keras.ops.sum(inputs))
        self.mean.update_state(inputs)
        return {"outputs": outputs, "sizes": (keras.ops.shape(inputs)[0], None, 3)}


def test_a_compiled_layer_has_the_same_effects() -> None:
    layer, plain = Everything(), Everything()
    inputs = tf.reshape(tf.range(12.0), [4, 3])
    model = keras.Sequential([layer])
    model.compile(jit_compile=True)
    for each in (layer, plain):
        each.norm.build(inputs.shape)

    def run(each: Any) -> Any:
        @tf.function(autograph=False)
        def step() -> Any:
            outputs = each(inputs, training=True)
            return outputs, each.losses, each.mean.result()

        return step()

    with whole_batch.compiled_layers(model, is_chief=True):
        actual = run(layer)
    expected = run(plain)
    assert actual[0]["sizes"] == expected[0]["sizes"]
    assert [float(loss) for loss in actual[1]] == [float(loss) for loss in expected[1]] == [66.0]
    assert float(actual[2]) == float(expected[2]) == 5.5
    for one, other in zip(layer.variables, plain.variables, strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-6, err_msg=one.path)
    assert int(layer.drop.seed_generator.state.value[1]) == 1
    assert not layer._losses or layer.losses  # the losses are the step's, not those of the compiled function
    assert "call" not in vars(layer)


def test_what_is_assigned_to_weights_stays_outside() -> None:
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    layer.build([None, 3])
    values = [tf.convert_to_tensor(variable.value) for variable in layer.variables]
    with keras_layers.PureScope(layer, layer.variables, values), pytest.raises(keras_layers.Outside, match="kernel"):
        layer.call(tf.ones([2, 3]), training=True)


def test_an_operation_that_xla_lacks_is_named() -> None:
    layer = keras.layers.Lambda(lambda x: tf.strings.to_number(tf.strings.as_string(x)))
    model = keras.Sequential([keras.Input([3]), layer, keras.layers.Dense(1)])
    model.compile(jit_compile=True)
    with whole_batch.compiled_layers(model, is_chief=True), pytest.raises(tf.errors.OpError) as raised:
        tf.function(model, autograph=False)(X)
    explained = whole_batch.explain_compilation(raised.value)
    assert isinstance(explained, NotSupportedError)
    assert re.search("Received: jit_compile=True, and .*(AsString|StringToNumber)", str(explained))
    assert whole_batch.explain_compilation(other := ValueError("XLA")) is other
