"""Checks each private name of Keras that the library uses. A failure means that Keras has changed it."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.compat import keras_fit, keras_layers, keras_losses, keras_model, keras_random

X, Y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")


@pytest.fixture
def model() -> keras.Model:
    layers = [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class Strategy:
    num_replicas_in_sync = 1

    def __init__(self) -> None:
        self.calls: list[str] = []

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        self.calls.append("distribute")
        return dataset

    def run(self, function: Any, args: Any) -> Any:
        self.calls.append("run")
        return function(*args)

    def scope(self) -> Any:
        return contextlib.nullcontext()


def test_keras_goes_through_the_strategy_of_a_model(model: keras.Model) -> None:
    strategy = Strategy()
    keras_fit.set_strategy(model, strategy)
    assert model.distribute_strategy is strategy
    for use in (
        lambda: model.fit(X, Y, verbose=0),
        lambda: model.evaluate(X, Y, verbose=0),
        lambda: model.predict(X, verbose=0),
    ):
        strategy.calls.clear()
        use()
        assert strategy.calls[0] == "distribute"
        assert "run" in strategy.calls
    strategy.calls.clear()
    model.train_on_batch(X, Y)
    assert strategy.calls == ["run"]


def test_an_attached_method_is_called_and_leaves_the_class(model: keras.Model) -> None:
    plain = model.train_step
    keras_model.attach(model, "train_step", lambda data: {**plain(data), "own": tf.constant(2.0)})
    assert model.fit(X, Y, verbose=0).history["own"] == [2.0]
    assert type(model) is keras.Sequential
    assert keras.models.clone_model(model).train_step.__func__ is keras.Sequential.train_step


def test_reset_functions_are_traced_anew(model: keras.Model) -> None:
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    before = model.train_function, model.test_function, model.predict_function
    assert None not in before
    keras_fit.set_functions(model, {})
    assert (model.train_function, model.test_function, model.predict_function) == (None, None, None)
    model.fit(X, Y, verbose=0)
    assert model.train_function is not before[0]


class Lazy(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("with_weights", [False, True])
def test_build_makes_weights_and_metrics_but_no_optimizer_state(with_weights: bool) -> None:
    model = Lazy()
    model.compile("adam", "mse", metrics=["mae"])
    assert not keras_model.is_built(model)
    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    keras_model.build(model, (*spec, tf.TensorSpec([None])) if with_weights else spec)
    assert keras_model.is_built(model)
    assert model.dense.kernel.shape == (3, 1)
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    assert not model.optimizer.built
    assert float(keras.ops.sum(keras.ops.abs(model.metrics_variables[0]))) == 0


def test_seed_generators_and_the_variables_that_a_step_changes(model: keras.Model) -> None:
    keras.random.uniform([])
    generators = list(keras_random.seed_generators(model))
    assert model.layers[1].seed_generator in generators
    assert keras_random.global_seed_generator() in generators
    model.fit(X, Y, verbose=0)
    states = keras_model.statistics_of(model)
    assert not {id(generator.state) for generator in generators} & {id(variable) for variable in states}


def test_the_global_seed_generator_is_the_one_that_random_functions_use() -> None:
    keras.utils.set_random_seed(3)
    assert keras_random.global_seed_generator() is None
    assert keras_random.global_seed() == 3
    keras_random.set_global_state([5, 0])
    first = np.asarray(keras.random.uniform([]))
    assert keras_random.global_seed() != [5, 0]
    keras_random.global_seed_generator().state.assign([5, 0])
    assert np.asarray(keras.random.uniform([])) == first


def test_logs_are_metrics(model: keras.Model) -> None:
    model.evaluate(X, Y, verbose=0)
    assert keras_model.logs_are_metrics(model, {"loss": 1, "mae": 2})
    assert not keras_model.logs_are_metrics(model, {"loss": 1})
    assert not keras_model.logs_are_metrics(model, 3.0)


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


def test_clipping_is_where_an_accumulated_update_begins() -> None:
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    variable = keras.Variable([0.0])
    optimizer.build([variable])
    seen: list[float] = []
    plain = getattr(optimizer, keras_model.CLIP_GRADIENTS)
    keras_model.attach(
        optimizer, keras_model.CLIP_GRADIENTS, lambda grads: seen.extend(float(g[0]) for g in grads) or plain(grads)
    )
    optimizer.apply([tf.constant([1.0])], [variable])
    assert seen == []
    optimizer.apply([tf.constant([3.0])], [variable])
    assert seen == [2.0], "the mean of the accumulated gradients"
    assert float(variable[0]) == -2.0


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


def test_every_scaled_loss_is_seen(model: keras.Model) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=8.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    seen = []

    def weigh(by: Any, loss: Any) -> Any:
        seen.append(by)
        return loss * 0.5

    plain = optimizer.scale_loss(1.0)
    with keras_model.scaled_losses(weigh):
        assert float(optimizer.scale_loss(1.0)) == 4.0
        model.fit(X, Y, verbose=0)
    assert seen == [optimizer, optimizer]
    assert float(optimizer.scale_loss(1.0)) == float(plain) == 8.0


def test_the_data_set_and_the_steps_of_an_epoch(model: keras.Model) -> None:
    seen = []
    plain = getattr(model, keras_fit.SYMBOLIC_BUILD)

    def look(iterator: Any = None, **kwargs: Any) -> Any:
        seen.append(keras_fit.distributed_dataset(iterator).element_spec)
        keras_fit.set_steps(iterator, 1)
        iterator.reset()  # as `fit` does before each epoch
        seen.append(iterator.num_batches)
        return plain(iterator=iterator, **kwargs)

    keras_model.attach(model, keras_fit.SYMBOLIC_BUILD, look)
    model.fit(X, Y, batch_size=2, verbose=0)
    assert [spec.shape[1] for spec in seen[0]] == [3, 1]
    assert seen[1] == 1


def test_fit_iterates_over_the_data_set_that_was_set(model: keras.Model) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    plain = getattr(model, keras_fit.SYMBOLIC_BUILD)

    def replace(iterator: Any = None, **kwargs: Any) -> Any:
        keras_fit.set_dataset(iterator, data.take(1))
        keras_fit.set_steps(iterator, 1)
        return plain(iterator=iterator, **kwargs)

    keras_model.attach(model, keras_fit.SYMBOLIC_BUILD, replace)
    model.fit(data.repeat(5), verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_every_reduction_of_a_loss_is_seen(reduction: str) -> None:
    seen: dict[str, Any] = {}

    def rescale(loss: Any, values: Any, weights: Any, mask: Any, its: str | None) -> Any:
        seen.update(loss=float(loss), values=np.asarray(values).tolist(), weights=weights, mask=mask, its=its)
        return loss * 10

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    y, prediction = tf.constant([[1.0], [2.0]]), tf.constant([[0.0], [0.0]])
    plain = float(loss(y, prediction, sample_weight=tf.constant([1.0, 0.5])))
    with keras_losses.rescaled_losses(rescale):
        assert float(loss(y, prediction, sample_weight=tf.constant([1.0, 0.5]))) == pytest.approx(10 * plain)
    assert seen["values"] == [1.0, 4.0]
    assert seen["its"] == reduction
    assert seen["mask"] is None
    np.testing.assert_array_equal(seen["weights"], [1.0, 0.5])
    assert float(loss(y, prediction, sample_weight=tf.constant([1.0, 0.5]))) == plain, "left as it was"


def test_the_replaced_reduction_has_the_same_parameters() -> None:
    from keras.src.losses import loss as loss_module

    plain = inspect.signature(loss_module.reduce_weighted_values).parameters
    with keras_losses.rescaled_losses(lambda loss, *_: loss):
        assert list(inspect.signature(loss_module.reduce_weighted_values).parameters) == list(plain)


def test_a_share_counts_by_its_part_in_the_losses_of_single_outputs() -> None:
    inputs = keras.Input([3])
    outputs = keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mse"])
    keras_model.build(model, (tf.TensorSpec([None, 3]), (tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))))
    a, b = model._compile_loss.metrics

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])])
    def step(x: Any, y: Any) -> Any:
        with keras_losses.weighted_scalars(lambda: tf.constant(0.25)):
            return model.compute_loss(x, (y, y), model(x))

    step(X, Y)
    assert [float(metric.count) for metric in (a, b)] == [0.25, 0.25]
    model.compute_loss(X, (Y, Y), model(X))
    assert [float(metric.count) for metric in (a, b)] == [4.25, 4.25], "a static size is a count already"


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


def test_every_assignment_is_seen() -> None:
    seen: list[Any] = []
    variable = keras.Variable(1.0)
    with keras_model.observed(lambda assigned: seen.append((assigned is variable, float(assigned.value)))):
        variable.assign(2.0)
        variable.assign_add(1.0)
        with keras_model.unobserved():
            variable.assign(4.0)
    variable.assign(5.0)
    assert seen == [(True, 1.0), (True, 2.0)]


def test_a_layer_is_called_on_no_batch_when_a_model_is_built() -> None:
    found = []

    class Layer(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            found.append(keras_layers.is_symbolic())
            return x

    layer = Layer()
    layer(keras.Input([3]))
    layer(X)
    assert found == [True, False]


def test_layers_of_layers() -> None:
    inner = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, name="deep")])
    outer = keras.Sequential([keras.Input([3]), inner])
    assert "deep" in [layer.name for layer in keras_model.flatten_layers(outer)]


def test_tensorflows_seed() -> None:
    tf.random.set_seed(1234)
    assert keras_random.tensorflow_seed() == 1234


def test_flattened_metrics_are_in_the_order_of_evaluate(model: keras.Model) -> None:
    model.evaluate(X, Y, verbose=0)
    assert keras_model.flatten_metrics(model, {"mae": 2.0, "loss": 1.0}) == [1.0, 2.0]


def test_the_variables_in_which_gradients_are_accumulated() -> None:
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    assert keras_model.accumulators(optimizer) == []
    optimizer.build([keras.Variable([0.0])])
    optimizer.apply([tf.constant([3.0])])
    assert [float(variable[0]) for variable in keras_model.accumulators(optimizer)] == [3.0]
    plain = keras.optimizers.SGD(1.0)
    plain.build([keras.Variable([0.0])])
    assert keras_model.accumulators(plain) == []


def test_class_weights_of_a_data_set_are_those_of_fit() -> None:
    data = tf.data.Dataset.from_tensor_slices((np.zeros([3, 1]), np.array([0, 2, 1]))).batch(3)
    ((_, _, weights),) = keras_model.weighted(data, {0: 0.5, 2: 3.0})
    np.testing.assert_array_equal(weights, [0.5, 3.0, 1.0])


def test_the_state_of_a_random_generator_has_a_name() -> None:
    assert keras_random.is_seed(keras.random.SeedGenerator(1).state)
    assert not keras_random.is_seed(keras.Variable([1, 2], dtype="uint32"))
