"""A training step through the real TPUStrategy, traced for cores that aren't there; what no TPU can do in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from keras_dist.compat import keras_model, tf_graphs, tpu_emulation
from keras_dist.diagnostics import check

pytestmark = pytest.mark.timeout(120)
THIS = str(Path(__file__))
SPECS = (tf.TensorSpec((4, 20)), tf.TensorSpec((4,), tf.int32))
Dense = keras.layers.Dense


def traced(strategy: Any, make: Callable[[], keras.Model], specs: Any = SPECS) -> tuple[keras.Model, Any]:
    with strategy.scope():
        model = make()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        keras_model.build(model, specs)
        model.optimizer.build(model.trainable_variables)
    return model, tpu_emulation.trace(strategy, model.train_step, specs)


def two_layers() -> keras.Model:
    return keras.Sequential([Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), Dense(10)])


@pytest.mark.parametrize("cores", [8, 16])
def test_a_step_over_many_cores(cores: int) -> None:
    """Each of the 6 gradients is reduced once, over all cores; Adam's and BatchNorm's state is TPUStrategy's."""
    strategy = tpu_emulation.emulated_strategy(cores)
    assert strategy.num_replicas_in_sync == cores
    model, step = traced(strategy, two_layers)
    assert step.reductions == len(model.trainable_variables) == 6
    reduces = [op for op in tf_graphs.operations_of(step.graph) if op.type == "XlaAllReduce"]
    groups = [tf.get_static_value(op.inputs[1]).tolist() for op in reduces]
    assert groups == [[list(range(cores))]] * 6
    assert {type(variable.value).__name__ for variable in model.variables} == {"TPUDistributedVariable"}
    assert check.find(step.graph, []) == []
    assert len(tpu_emulation.lower(step)) > 1000


def line_of(text: str) -> int:
    """The line of this file with this remark."""
    lines = Path(THIS).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def python(x: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda y: y, [x], tf.float32), x.shape)  # python


def prints(x: Any) -> Any:
    tf.print("mean", tf.reduce_mean(x))  # prints
    return x


def strings(x: Any) -> Any:
    return x + tf.strings.to_number(tf.strings.as_string(x))  # strings


def by_data(x: Any) -> Any:
    return x + tf.reduce_sum(tf.boolean_mask(x, x > 0))  # by_data


def unknown(x: Any) -> Any:
    boxes = tf.stop_gradient(x[:, :4])
    return x + tf.reduce_sum(tf.image.non_max_suppression_with_scores(boxes, boxes[:, 0], 2)[1])  # unknown


@pytest.mark.parametrize(
    ("function", "op", "why"),
    [
        (python, "EagerPyFunc", "Python can't run on a TPU"),
        (prints, "StringFormat", "remove tf.print from the step"),
        (strings, "AsString", "there are no strings on a TPU"),
        (by_data, "Where", "depends on the data"),
        (unknown, "NonMaxSuppressionV5", "XLA does not have this operation"),
    ],
)
def test_what_no_tpu_can_do(function: Callable[[Any], Any], op: str, why: str) -> None:
    class Odd(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return function(x)

    model, step = traced(
        tpu_emulation.emulated_strategy(8), lambda: keras.Sequential([Dense(8), Odd(name="odd_one"), Dense(10)])
    )
    found = check.find(step.graph, [layer.name for layer in model.layers])
    places = {(one["layer"], one["file"], one["line"]) for one in found}
    assert places == {("odd_one", THIS, line_of(function.__name__))}
    assert op in {one["op"] for one in found}
    assert any(why in one["why"] for one in found)


def test_what_a_layer_of_keras_does_has_the_layers_name_and_no_line_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_LIBRARIES", (*check._LIBRARIES, THIS))  # no frame is the user's
    strategy = tpu_emulation.emulated_strategy(1)
    model, step = traced(strategy, lambda: keras.Sequential([keras.layers.Hashing(10, name="hash"), Dense(10)]))
    found = check.find(step.graph, [layer.name for layer in model.layers])
    assert {(one["layer"], one["file"], one["line"]) for one in found} == {("hash", "", 0)}


def test_lookup_tables_are_found() -> None:
    def make() -> keras.Model:
        words = keras.Input((1,), dtype="string")
        numbers = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")(words)
        return keras.Model(words, Dense(10)(keras.layers.Flatten()(keras.layers.Embedding(3, 4)(numbers))))

    specs = (tf.TensorSpec((4, 1), tf.string), tf.TensorSpec((4,), tf.int32))
    model, step = traced(tpu_emulation.emulated_strategy(8), make, specs)
    found = check.find(step.graph, [layer.name for layer in model.layers])
    assert ("words", "LookupTableFindV2") in {(one["layer"], one["op"]) for one in found}
    assert any("apply StringLookup" in one["why"] for one in found)
