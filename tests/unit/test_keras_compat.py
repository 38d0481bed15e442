"""Checks each private name of Keras that the library uses. A failure means that Keras has changed it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import keras_fit, keras_model, keras_random

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
