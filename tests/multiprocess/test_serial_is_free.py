"""One process has no overhead: after `kd.distribute` the traced train step has the same operations as plain Keras."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

Operations = list[tuple[str, list[str]]]


def traced(distribute: Callable[[Any], Any], steps_per_execution: int, **options: Any) -> Operations:
    """Returns the operations of a train step, in the order of tracing, for each function in its graph."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = distribute(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(2)]))
    optimizer = keras.optimizers.Adam(0.1, **options)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    x, y = tf.ones([8, 4]), tf.ones([8, 2])
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    iterator = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    # Keras's train function is a closure around the `tf.function`.
    function = inspect.getclosurevars(model.train_function).nonlocals["multi_step_on_iterator"]
    graph = function.get_concrete_function(iterator).graph.as_graph_def()
    functions = [(node.signature.name, node.node_def) for node in graph.library.function]
    # Names of functions contain a number of this process, so they are sorted by their text.
    inner = sorted(("", [node.op for node in nodes]) for _, nodes in functions)
    return [("step", [node.op for node in graph.node]), *inner]


def both(steps_per_execution: int) -> dict[str, Operations]:
    import keras_dist as kd

    return {
        "plain": traced(lambda model: model, steps_per_execution),
        "ours": traced(kd.distribute, steps_per_execution),
        "another": traced(kd.distribute, steps_per_execution, clipnorm=1.0),
    }


def attributes() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the attributes of a model and its optimizer before and after `kd.distribute`."""
    import keras

    import keras_dist as kd

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    owners = {"model": model, "optimizer": model.optimizer}

    def named() -> dict[str, str]:
        return {f"{owner}.{name}": repr(value) for owner, item in owners.items() for name, value in vars(item).items()}

    before = named()
    assert kd.distribute(model) is model
    return before, named()


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.ci), 3])
def test_the_traced_step_has_the_same_operations(pools: Any, steps_per_execution: int) -> None:
    (operations,) = pools.get("serial", 1).run(both, steps_per_execution)
    assert {"MatMul", "AssignAddVariableOp"} <= {op for _, ops in operations["plain"] for op in ops}
    assert operations["ours"] == operations["plain"]
    assert operations["another"] != operations["plain"]  # so a difference would be seen


def test_the_model_and_its_optimizer_get_no_attributes(pools: Any) -> None:
    ((before, after),) = pools.get("serial", 1).run(attributes)
    assert len(before) > 20
    assert after == before
