"""Checks each private name of Keras that the library uses. A failure means that Keras has changed it."""

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import keras_fit, keras_model, keras_random, keras_strategy
from keras_dist.compat.keras_strategy import ReplicaScope

X, Y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")


@pytest.fixture
def model() -> keras.Model:
    layers = [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_the_global_seed_generator_is_the_one_that_random_functions_use() -> None:
    keras.utils.set_random_seed(3)
    assert keras_random.global_seed_generator() is None
    assert keras_random.global_seed() == 3
    keras_random.set_global_state([5, 0])
    first = np.asarray(keras.random.uniform([]))
    assert keras_random.global_seed() != [5, 0]
    keras_random.global_seed_generator().state.assign([5, 0])
    assert np.asarray(keras.random.uniform([])) == first


def test_fit_goes_through_these_methods(model: keras.Model) -> None:
    called: dict[str, Any] = {}

    def note(name: str) -> None:
        plain = getattr(model, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            called[name] = kwargs
            return plain(*args, **kwargs)

        keras_model.attach(model, name, noted)

    names = [keras_fit.SYMBOLIC_BUILD, keras_fit.METRICS_RESULT, "make_train_function", "make_test_function"]
    for name in (*names, "evaluate"):
        note(name)
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(getattr(model, keras_fit.EVALUATE_ITERATOR, None))
    )
    model.fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=[callback])
    assert {*called} == {*names, "evaluate"}
    assert called["evaluate"][keras_fit.EVALUATE_IN_FIT] is True
    assert seen[0] is not None
    assert getattr(model, keras_fit.EVALUATE_ITERATOR, None) is None, "it is dropped after `fit`"


def test_the_first_epoch_is_an_attribute(model: keras.Model) -> None:
    keras_model.attach(model, keras_fit.INITIAL_EPOCH, 2)
    resume = lambda logs: keras_model.attach(model, keras_fit.INITIAL_EPOCH, 2)  # noqa: E731
    callback = keras.callbacks.LambdaCallback(on_train_begin=resume)
    assert model.fit(X, Y, epochs=3, verbose=0, callbacks=[callback]).epoch == [2]


class Outer(keras.optimizers.SGD):
    """An optimizer that lets another one apply, and calls that of its class."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.other = keras.optimizers.SGD(0.5)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.other.apply(grads, trainable_variables)
        super().apply(grads, trainable_variables)


def test_an_optimizer_is_found_where_its_apply_is_called() -> None:
    """Once Keras has a hook for what an optimizer is about to apply, `found_optimizers` can go."""
    outer, known, variable = Outer(), keras.optimizers.SGD(1.0), keras.Variable([0.0])
    found, calls = [], []

    def attach_to(optimizer: Any) -> None:
        plain = keras_model.plain_apply(optimizer)
        keras_model.attach(optimizer, "apply", lambda *args: (calls.append(optimizer), plain(*args)))

    def find(optimizer: Any) -> None:
        found.append(optimizer)
        attach_to(optimizer)

    attach_to(known)
    classes = [keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, Outer]
    before = [cls.apply for cls in classes]
    with keras_model.found_optimizers(find):
        for optimizer in (outer, known, outer):
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        assert keras_model.applying() is None
    assert [cls.apply for cls in classes] == before
    assert found == [outer]
    assert calls == [outer, known, outer]
    assert float(variable[0]) == -4.0


def test_the_epoch_iterator_of_predict_is_seen_and_its_steps_can_be_set(model: keras.Model) -> None:
    """Once `predict` passes its iterator to a method of the model, as `fit` does, `epoch_iterators` can go."""
    batches = tf.data.Dataset.from_tensor_slices(X).batch(2).repeat(2)
    assert model.predict(batches, verbose=0).shape[0] == 2 * len(X)
    with keras_fit.epoch_iterators(lambda iterator: keras_fit.set_steps(iterator, 1)):
        assert model.predict(batches, verbose=0).shape[0] == 2
    assert model.predict(batches, verbose=0).shape[0] == 2 * len(X)


def test_a_variable_is_moved_and_its_optimizer_finds_its_slots() -> None:
    """Once Keras can move a variable to another device, `backing`, `set_backing` and `copy_identity` can go."""
    from keras_dist.compat import tf_compat

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build(model.trainable_variables)
    variable = model.trainable_variables[0]
    old = keras_model.backing(variable)
    new = tf.Variable(old)
    tf_compat.copy_identity(new, of=old)
    keras_model.set_backing(variable, new)
    optimizer.apply([tf.ones_like(v.value) for v in model.trainable_variables])
    np.testing.assert_allclose(new.numpy(), 0.5)
    np.testing.assert_allclose(old.numpy(), 1.0)
    assert getattr(optimizer, keras_model.STEP_COUNTER).numpy() == 1


def test_variables_are_made_outside_of_a_stateless_scope() -> None:
    with keras.StatelessScope():
        with keras_model.outside_stateless_scope():
            variable = keras.Variable(np.ones([2]))
        with pytest.raises(ValueError, match="stateless scope"):
            keras.Variable(np.ones([2]))
    np.testing.assert_array_equal(variable.numpy(), [1, 1])


def test_tensorflows_seed() -> None:
    tf.random.set_seed(1234)
    assert keras_random.tensorflow_seed() == 1234


def test_class_weights_of_a_data_set_are_those_of_fit() -> None:
    data = tf.data.Dataset.from_tensor_slices((np.zeros([3, 1]), np.array([0, 2, 1]))).batch(3)
    ((_, _, weights),) = keras_model.weighted(data, {0: 0.5, 2: 3.0})
    np.testing.assert_array_equal(weights, [0.5, 3.0, 1.0])


def test_the_state_of_a_random_generator_has_a_name() -> None:
    assert keras_random.is_seed(keras.random.SeedGenerator(1).state)
    assert not keras_random.is_seed(keras.Variable([1, 2], dtype="uint32"))


# --- Replicas of one process ---

COUNT = tf.constant(3)


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_keras_keeps_its_state_for_each_thread() -> None:
    """Once this fails, the state need not be copied to a replica's thread."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with keras_strategy.thread_state() as state:

            def given() -> str:
                keras_strategy.set_thread_state(state)
                return str(keras.config.dtype_policy().name)

            assert in_a_thread(lambda: keras.config.dtype_policy().name) == "float32"
            assert in_a_thread(given) == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_open_scopes_of_a_thread_are_its_own() -> None:
    with keras.name_scope("outer"), keras_strategy.thread_state() as state:
        stacks = [value for value in state.values() if isinstance(value, list) and value]
    assert stacks, "name scopes are no longer kept in a list"
    keras_strategy.set_thread_state(state)
    with keras.name_scope("inner"):
        assert all(len(stack) == 1 for stack in stacks)
    keras.backend.clear_session()


def test_replicas_leave_the_random_state_of_a_script_as_keras_does() -> None:
    """Keras makes its global generator where it is first used, by a seed from Python's."""

    def drawn(draws: bool, replicas: bool) -> list[float]:
        keras.utils.set_random_seed(3)
        with keras_strategy.thread_state() if replicas else contextlib.nullcontext():
            first = float(keras.random.uniform(())) if draws else 0.0
        return [first, random.random(), float(keras.random.uniform(()))]

    for draws in (False, True):
        plain, actual = drawn(draws, False), drawn(draws, True)
        assert actual == plain, draws
    assert drawn(False, True)[2] != drawn(True, True)[2]


def test_variables_made_inside_have_their_value_at_once() -> None:
    """Once this fails, Keras no longer keeps a list of them, which `initialized_at_once` replaces."""

    def made() -> Any:
        with ReplicaScope(COUNT, ()), keras_strategy.initialized_at_once("CPU:0"):
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            dense.build([None, 2])
            assert isinstance(dense.kernel.value, tf.Variable)
        return np.asarray(dense.kernel)

    np.testing.assert_array_equal(in_a_thread(made), [[1], [1]])


class AddsLoss(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_sum(x))
        return x


def losses_of_two(layer: keras.layers.Layer) -> list[list[float]]:
    scopes = [ReplicaScope(COUNT, ()) for _ in range(2)]
    for number, scope in enumerate(scopes, start=1):
        with scope:
            layer(tf.constant([float(number)]))
    found = []
    for scope in scopes:
        with scope:
            found.append([float(loss) for loss in layer.losses])
    return found


def test_a_layer_keeps_the_losses_that_it_adds_for_each_replica() -> None:
    """Once the first line fails, `losses_of_each_replica` can go."""
    assert losses_of_two(AddsLoss()) == [[], [2.0]]
    with keras_strategy.losses_of_each_replica():
        assert losses_of_two(AddsLoss()) == [[1.0], [2.0]]
    layer = AddsLoss()
    layer(tf.constant([3.0]))
    assert [float(loss) for loss in layer.losses] == [3.0]
