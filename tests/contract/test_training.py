"""Ways to train, evaluate and predict: the same numbers."""

import contextlib
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dist as kd
from keras_dist.logging import announce_once
from keras_dist.training import options
from tests.contract.harness import FLOAT32, NOT_TPU, Numbers, asking, contract, same
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    GuideStep,
    compiled,
    computed,
    dataset,
    evaluated,
    fitted,
    mlp,
    numbers,
    outcome,
    predictions,
    stack,
    tokens,
    trained_on_shares,
    undistributed,
    used,
)

SEED_OFFSET = 1_000_003  # between the seeds of two ranks
EVERYWHERE = (
    "serial-1", "multi_worker-2", "mirrored-2", "central_storage-2", "parameter_server-2", "tpu-1",
)  # fmt: skip

contract("fit-float32", float32=True, tolerance=FLOAT32, sizes=(3, 4), covered_by=("fit-float64",))(
    lambda distribute: used(compiled(distribute), *numbers())
)
contract("fit-float64", sizes=(3, 4), also=EVERYWHERE)(
    lambda distribute: used(compiled(distribute), *numbers(), epochs=5)
)


# --- Models whose numbers depend on the shares: by their rounding, random numbers or statistics ---


def mean_squared_error(y: Any, prediction: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(prediction, y.dtype) - y))


def on_shares(row: str, make: Callable[[], keras.Model], seed_offset: int = 0, runs: int = 1, **options: Any) -> None:
    """Declares the case of such a model, which is the same in every run. Its reference has the same shares."""

    def reference(size: int) -> Numbers:
        model = compiled(same, model=make())
        return trained_on_shares(model, mean_squared_error, numbers(), size, seed_offset=seed_offset)

    def weights(distribute: Any) -> Any:
        keras.utils.set_random_seed(0)
        return fitted(compiled(distribute, model=make()), *numbers(), shuffle=False)["weights"]

    def case(distribute: Any) -> Numbers:
        first, *others = [weights(distribute) for _ in range(runs)]
        for other in others:
            for one, two in zip(first, other, strict=True):
                np.testing.assert_array_equal(one, two)
        return {"weights": first}

    contract(row, reference=reference, **options)(lambda distribute: case(distribute))


def mixed_precision_model() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return mlp()


def dropout_model() -> keras.Model:
    return stack(layers.Dense(8), layers.Dropout(0.5, seed=5), layers.Dense(1))


class Jitter(layers.Layer):
    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.seed_generator = keras.random.SeedGenerator(11)

    def call(self, x: Any, training: bool = False) -> Any:
        draws = training or self.always
        return x * keras.random.uniform(tf.shape(x), 0.5, 1.5, seed=self.seed_generator) if draws else x


def random_model() -> keras.Model:
    noise = [Jitter(), layers.GaussianNoise(0.3, seed=1)]
    return stack(
        *noise, layers.Reshape([2, 2]), layers.SpatialDropout1D(0.5, seed=2), layers.Flatten(), layers.Dense(1)
    )


class Flip(layers.RandomFlip):
    """`RandomFlip` with the attribute name that other layers use for their generator."""

    @property
    def seed_generator(self) -> Any:
        return self.generator


def augmenting_model() -> keras.Model:
    return stack(layers.Reshape([2, 2, 1]), Flip(seed=3), layers.Flatten(), layers.Dense(1))


RANDOM: dict[str, Any] = {"seed_offset": SEED_OFFSET, "sizes": (3,)}
COVERED: dict[str, Any] = {"runs": 2, "covered_by": ["fit-dropout", "exact-random-functions"]}
on_shares("fit-mixed-bfloat16", mixed_precision_model, float32=True, tolerance=FLOAT32)
on_shares("fit-dropout", dropout_model, also=("mirrored-2",), **RANDOM)
on_shares("fit-random-layers", random_model, **RANDOM, **COVERED)
on_shares("fit-random-augmentation", augmenting_model, **RANDOM, **COVERED)


def dropout_of_full_shares(size: int) -> Numbers:
    model = compiled(same, model=dropout_model())
    return trained_on_shares(model, mean_squared_error, numbers(24), size, seed_offset=SEED_OFFSET)


@contract("train-on-batch-dropout", reference=dropout_of_full_shares, covered_by=("train-on-batch", "fit-dropout"))
def test_train_on_batch_dropout(distribute: Any) -> Numbers:
    model, (x, y) = compiled(distribute, model=dropout_model()), numbers(24)
    for start in (0, 8, 16, 0, 8, 16):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    return {"weights": model.get_weights()}


def batchnorm_model() -> keras.Model:
    return stack(layers.Dense(5), layers.BatchNormalization(), layers.Dense(1))


def batchnorm_of_shares(size: int, processes: int) -> Numbers:
    """A rank normalizes its share. Ranks average the moving statistics at the end, replicas after each step."""
    model = compiled(same, model=batchnorm_model())
    result = trained_on_shares(model, mean_squared_error, numbers(), size, processes=processes)
    return {**result, "evaluation": model.evaluate(*numbers(), verbose=0)}


@contract(
    "fit-batchnorm", sizes=(3,), also=("multi_worker-4", "parameter_server-2", "tpu-8"),
    reference_of_processes=batchnorm_of_shares,
)  # fmt: skip
def test_batchnorm(distribute: Any) -> Numbers:
    model = compiled(distribute, model=batchnorm_model())
    weights = fitted(model, *numbers(), shuffle=False)["weights"]
    return {"weights": weights, "evaluation": model.evaluate(*numbers(), verbose=0)}


# --- Models ---


@keras.saving.register_keras_serializable("contract")
class Subclassed(keras.Model):
    """Not built until it sees data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = layers.Dense(6, "tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


contract("fit-subclassed", covered_by=("fit-own-train-step",))(
    lambda distribute: fitted(compiled(distribute, model=Subclassed()), *numbers())
)


class OwnStep(GuideStep):
    """Its loss is a mean over examples."""

    counts_examples = True


class Twice(keras.Sequential):
    """The second update reads the result of the first."""

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.5, 0.5))
        return logs


contract("fit-own-train-step", also=("parameter_server-2",))(
    lambda distribute: fitted(compiled(distribute, model=OwnStep()), *numbers(), validation_data=numbers(9))
)
contract("fit-own-train-step-twice", sizes=(3,), covered_by=("fit-own-train-step",))(
    lambda distribute: fitted(
        compiled(distribute, keras.optimizers.Adam(0.1), model=Twice([keras.Input([FEATURES]), *mlp().layers])),
        *numbers(),
    )
)


class OwnFunction(keras.Model):
    """A model whose `make_train_function` runs the step by the strategy, as Keras's own does, or by itself."""

    def __init__(self, by_strategy: bool) -> None:
        super().__init__()
        self.by_strategy, self.net = by_strategy, mlp()

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def make_train_function(self, force: bool = False) -> Any:
        if self.train_function is None or force:

            @tf.function
            def train(iterator: Any) -> Any:
                data = next(iterator)
                if self.by_strategy:
                    return self.distribute_strategy.run(self.train_step, args=(data,))
                return self.train_step(data)

            self.train_function = train
        return self.train_function


@contract("fit-own-train-function")
def test_own_train_function(distribute: Any) -> Numbers:
    if kd.num_replicas() > 1:
        model = compiled(distribute, model=OwnFunction(by_strategy=False))
        with pytest.raises(kd.NotSupportedError, match="A function that runs a step by itself"):
            fitted(model, *numbers())
        keras.utils.set_random_seed(0)
    return fitted(compiled(distribute, model=OwnFunction(by_strategy=True)), *numbers(), shuffle=False)


# --- Sparse gradients: rows of a table, some twice in a batch ---


class Positions(layers.Layer):
    """Looks up tokens, their positions, once and for each example, and relative positions, as transformers do."""

    def build(self, shape: Any) -> None:
        self.tokens, self.positions, self.tiled, self.distances = (layers.Embedding(rows, 2) for rows in (7, 4, 4, 5))

    def call(self, x: Any) -> Any:
        places = keras.ops.arange(keras.ops.shape(x)[-1])
        distances = np.arange(3)[:, None] - np.arange(3) + 2  # each of some rows several times
        bias = keras.ops.sum(self.distances(distances), 1)
        of_each = self.tiled(keras.ops.tile(places[None], [keras.ops.shape(x)[0], 1]))
        return keras.ops.mean((self.tokens(x) + self.positions(places) + of_each) * bias, 1)


def positions_model() -> keras.Model:
    return keras.Sequential([keras.Input([None], dtype="int32"), Positions(), layers.Dense(1)])


def embedding_model() -> keras.Model:
    table = layers.Embedding(7, 2)
    return keras.Sequential([keras.Input([3], dtype="int32"), table, layers.Flatten(), layers.Dense(1)])


def fit_table(distribute: Any, optimizer: Any = None, model: Any = None, eagerly: bool = False, **options: Any) -> Any:
    model = compiled(distribute, optimizer, model=model or embedding_model(), run_eagerly=eagerly)
    return fitted(model, *tokens(), **options)


contract(
    "fit-embedding", also=("multi_worker-4", "central_storage-2", "parameter_server-2"),
    covered_by=("fit-embedding-global-clipnorm", "fit-embedding-eagerly"),
)(lambda distribute: fit_table(distribute))  # fmt: skip
# The rows of all shares have a known number, and are no lookup that does not depend on the share.
contract("fit-embedding-eagerly", sizes=(3,))(
    lambda distribute: fit_table(distribute, eagerly=True)
)
contract("fit-embedding-global-clipnorm", sizes=(3,))(
    lambda distribute: fit_table(distribute, keras.optimizers.SGD(0.1, global_clipnorm=0.05))
)
# The gradient of a lookup that does not depend on the batch has the same rows in every share. With one example on each
# replica nothing tells whether a lookup is repeated for each.
contract("fit-embedding-positions", sizes=(3,), covered_by=("fit-embedding-eagerly", "fit-embedding-global-clipnorm"))(
    lambda distribute: fit_table(
        distribute, keras.optimizers.Adam(0.01, global_clipnorm=0.05), positions_model(), batch_size=COUNT - 1
    )
)


class TiledPositions(layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(8, 2)

    def call(self, ids: Any) -> Any:
        return self.table(tf.tile(tf.range(tf.shape(ids)[1])[None], [tf.shape(ids)[0], 1]))


@contract(
    "fit-embedding-tiled", of=("serial", "horovod", "multi_worker", "mirrored", "central_storage"),
    covered_by=("fit-embedding-eagerly",),
)  # fmt: skip
def test_fit_embedding_tiled(distribute: Any) -> Numbers:
    """With one example on each replica a line says that it can't be told; a plain descent is right in any case."""
    announce_once.cache_clear()
    model = keras.Sequential([keras.Input([None], dtype="int32"), TiledPositions(), layers.Dense(1)])
    data = tf.data.Dataset.from_tensor_slices(tokens()).batch(2, drop_remainder=True)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        results = fitted(compiled(distribute, keras.optimizers.SGD(0.1), model=model), data)
    is_told = "they are those of each example with one example on each replica" in errors.getvalue()
    assert is_told == (distribute is kd.distribute and kd.is_chief() and kd.num_replicas() == 2)
    return results


# --- Normalization and regularization ---


def synchronized_model() -> keras.Model:
    """The statistics of the second normalization depend on those of the first one."""
    normalize = [layers.BatchNormalization(synchronized=True) for _ in range(2)]
    return stack(layers.Dense(5), normalize[0], layers.Dense(4), normalize[1], layers.Dense(1))


@contract(
    "fit-batchnorm-synchronized", sizes=(3,), also=("mirrored-2", "parameter_server-2"), covered_by=("exact-batchnorm",)
)
def test_batchnorm_synchronized(distribute: Any) -> Numbers:
    """Normalized over the whole batch: the same numbers as in one process, also with an empty share."""

    def trained(optimizer: Any = None) -> Numbers:
        return used(compiled(distribute, optimizer, model=synchronized_model()), *numbers(), shuffle=False)

    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

    def masked() -> Numbers:
        parts = [layers.Embedding(7, 3, mask_zero=True), layers.BatchNormalization(synchronized=True)]
        words = keras.Input([5], dtype="int32")
        model = keras.Sequential([words, *parts, layers.GlobalAveragePooling1D(), layers.Dense(1)])
        x = np.random.RandomState(3).randint(0, 7, [25, 5]).astype("int32")
        x[:, 4] = 1
        return fitted(compiled(distribute, model=model), x, numbers()[1], shuffle=False)

    return computed({"plain": trained, "scaled": lambda: trained(scaling), "masked": masked}, "plain")


def fit_stack(distribute: Any, *parts: Any) -> Numbers:
    return fitted(compiled(distribute, model=stack(*parts)), *numbers())


contract("fit-spectral-normalization", also=("mirrored-2",), covered_by=("fit-layer-state", "exact-batchnorm"))(
    lambda distribute: fit_stack(distribute, layers.SpectralNormalization(layers.Dense(6, "tanh")), layers.Dense(1))
)


class SharpnessAware(OwnStep):
    """Descends along the gradient at weights that were moved to where the loss is higher: SAM, arXiv:2010.01412."""

    def train_step(self, data: Any) -> Any:
        moves = [0.05 * gradient for gradient in kd.all_reduce(self.gradients(data)[0])]
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(move)
        gradients, prediction, loss = self.gradients(data)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.updated(data[1], prediction, loss)

    def gradients(self, data: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            prediction, loss = self.predicted(*data[:2], training=True)
        return tape.gradient(loss, self.trainable_variables), prediction, loss


contract("fit-sharpness-aware", also=("mirrored-2",), covered_by=("fit-own-train-step",))(
    lambda distribute: fitted(compiled(distribute, keras.optimizers.Adam(0.1), model=SharpnessAware()), *numbers())
)


# --- Execution ---

contract("fit-run-eagerly", sizes=(3,), covered_by=("fit-embedding-eagerly", "metrics-in-python"))(
    lambda distribute: fitted(
        compiled(distribute, run_eagerly=True, metrics=["mae"]), *numbers(), validation_data=numbers(9)
    )
)
contract("fit-initial-epoch", covered_by=("fit-float64", "evaluate"))(
    lambda distribute: fitted(compiled(distribute), *numbers(), epochs=4, initial_epoch=2)
)
contract("fit-steps-per-execution-not-dividing", also=("parameter_server-2",))(
    lambda distribute: used(
        compiled(distribute, steps_per_execution=4), dataset(batch=4), validation_data=dataset(13, 2)
    )
)
contract("fit-steps-per-execution-eagerly", covered_by=("fit-embedding-eagerly", "metrics-in-python"))(
    lambda distribute: used(compiled(distribute, run_eagerly=True, steps_per_execution=3, metrics=["mae"]), dataset())
)


@contract(
    "fit-tuned",
    covered_by=("fit-steps-per-execution-not-dividing", "tests/unit/test_tuning.py"),
)  # fmt: skip
def test_tuned(distribute: Any) -> Numbers:
    """40 steps an epoch: the ranks time the first, then compiled ones, then 13 together, and choose in the fifth."""
    model = compiled(asking(distribute, tune=True), keras.optimizers.SGD(0.01), metrics=["mae"])
    with mock.patch.object(options, "WORTH", 0):
        first = fitted(model, dataset(160, 4), epochs=6, validation_data=dataset(13, 2))
    second = fitted(model, dataset(160, 4).repeat(), epochs=2, steps_per_epoch=37)
    return {"first": first, "second": second, "steps": int(model.optimizer.iterations)}


# --- `evaluate`, `predict` and single batches ---


@contract("evaluate", sizes=(3, 4), also=("tpu-8",))
def test_evaluate(distribute: Any) -> Numbers:
    model = compiled(distribute, metrics=["mae"])
    return {
        "arrays": evaluated(model),
        "named": model.evaluate(dataset(), return_dict=True, verbose=0),
        "weighted": evaluated(model, sample_weight=np.linspace(0, 1, COUNT)),
        "steps": model.evaluate(dataset(), steps=2, verbose=0),
    }


@contract("predict", sizes=(3, 4), also=EVERYWHERE)
def test_predict(distribute: Any) -> Numbers:
    model = distribute(stack(layers.Identity(), shape=[1]))
    indices = np.arange(COUNT, dtype="float64")[:, None]
    for batch in (BATCH, 1, 3, 100):
        np.testing.assert_array_equal(model.predict(indices, batch_size=batch, verbose=0), indices)
    return {"predictions": model.predict(tf.data.Dataset.from_tensor_slices(indices).batch(7), verbose=0)}


class AsLongAsTheLongest(keras.Model):
    def call(self, x: Any) -> Any:
        return tf.ones([tf.shape(x)[0], tf.cast(tf.reduce_max(x), tf.int32)])


contract("predict-widths", float32=True, of=NOT_TPU)(
    lambda distribute: {"predictions": predictions(distribute(AsLongAsTheLongest()), np.arange(1.0, 9.0)[:, None])}
)


@contract("predict-outputs", covered_by=("predict", "together-losses"))
def test_predict_outputs(distribute: Any) -> Numbers:
    inputs = keras.Input([FEATURES])
    dense = layers.Dense(2)(inputs)
    outputs = {"dense": dense, "kind": keras.ops.argmax(dense, -1), "positive": dense > 0}
    return {"predictions": predictions(distribute(keras.Model(inputs, outputs)), numbers()[0])}


class Words(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return tf.strings.as_string(tf.cast(10 * inputs[:, :2], tf.int32))

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor((inputs.shape[0], 2), "string")


@contract("predict-strings")
def test_predict_strings(distribute: Any) -> Numbers:
    inputs = keras.Input([FEATURES])
    words = predictions(distribute(keras.Model(inputs, Words()(inputs))), numbers()[0])
    return {"shape": words.shape, "words": " ".join(word.decode() for word in words.reshape(-1))}


def all_examples_differ(results: list[Numbers], plain: Numbers, size: int) -> None:
    assert np.unique(results[0]["own_predictions"].round(6)).size == 48


@contract("predict-random", float32=True, verify=all_examples_differ)
def test_predict_random(distribute: Any) -> Numbers:
    """Noise in predictions (a sampling decoder): no two examples have the same, nor do two calls."""
    model = distribute(stack(Jitter(always=True)))
    model.compile("sgd", "mse")
    x = np.ones([24, FEATURES], "float32")
    return {"own_predictions": np.stack([predictions(model, x)[:, 0] for _ in range(2)])}


@contract("train-on-batch", also=("parameter_server-2",))
def test_train_on_batch(distribute: Any) -> Numbers:
    model, (x, y) = compiled(distribute, metrics=["mae"]), numbers()
    logs = [model.train_on_batch(x[i : i + 5], y[i : i + 5]) for i in range(0, 20, 5)]
    named = model.train_on_batch(x[:1], y[:1], return_dict=True)
    return {"logs": logs, "named": named, "in_order": list(named.values()), "weights": model.get_weights()}


@contract("test-on-batch", covered_by=("train-on-batch",))
def test_test_on_batch(distribute: Any) -> Numbers:
    model, (x, y) = compiled(distribute, metrics=["mae"]), numbers()
    lists = [model.test_on_batch(x[:size], y[:size]) for size in (7, 9)]
    return {"lists": lists, "dict": model.test_on_batch(x, y, return_dict=True)}


contract("predict-on-batch", covered_by=("predict",))(
    lambda distribute: {"predictions": compiled(distribute).predict_on_batch(numbers()[0][:5])}
)


# --- Before `kd.distribute`, and again ---


@contract("fitted-before")
def test_fitted_before(distribute: Any) -> Numbers:
    """Functions that were traced for one process must not be reused."""
    model = compiled(same, keras.optimizers.Adam(0.01))
    before = fitted(model, *numbers())
    predictions(model, numbers()[0])
    after = fitted(distribute(model), *numbers())
    return {"before": before, "after": after, "predictions": predictions(model, numbers()[0])}


@contract("loaded-before", covered_by=("fitted-before", "load-weights"))
def test_loaded_before(distribute: Any) -> Numbers:
    with undistributed():
        plain = compiled(same, keras.optimizers.Adam(0.01))
        fitted(plain, *numbers())
        if kd.is_chief():
            plain.save("loaded.keras")
    kd.barrier()
    return fitted(distribute(keras.models.load_model("loaded.keras")), *numbers())


@contract("recompiled", covered_by=("fitted-before",))
def test_recompiled(distribute: Any) -> Numbers:
    """Which weights are trained is decided by `compile`."""
    model = mlp()
    model.layers[0].trainable = False
    compiled(distribute, model=model)
    frozen = fitted(model, *numbers())
    model.layers[0].trainable = True
    not_yet = fitted(model, *numbers())
    model.compile(keras.optimizers.Adam(0.01), "mae")
    return {"frozen": frozen, "not yet": not_yet, "whole": fitted(model, *numbers())}


@contract("traced-again", also=("parameter_server-2",))
def test_traced_again(distribute: Any) -> Numbers:
    """What is trained and how a layer computes is decided by the trace, which a callback may ask for in `fit`."""
    model = compiled(distribute, keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    first, last = model.layers[0], model.layers[-1]
    first.trainable = False
    predictions = [model.predict(numbers(9)[0], verbose=0)]
    evaluation = model.evaluate(*numbers(9), verbose=0)
    first.trainable, last.trainable = True, False

    def unfreeze(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            last.trainable = True
            model.make_train_function(force=True)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=unfreeze)
    history = model.fit(*numbers(), epochs=2, callbacks=[callback], verbose=0).history
    last.activation = keras.activations.tanh
    model.make_predict_function(force=True)
    predictions.append(model.predict(numbers(9)[0], verbose=0))
    return {"evaluation": evaluation, "predictions": predictions, **outcome(model, history)}


@contract("evaluated-first", covered_by=("evaluate",))
def test_evaluated_first(distribute: Any) -> Numbers:
    model = compiled(distribute)
    first = model.evaluate(*numbers(9), verbose=0)
    return {"evaluation": first, **outcome(model, model.fit(*numbers(), verbose=0).history)}


@contract("two-models", covered_by=("fitted-before",))
def test_two_models(distribute: Any) -> Numbers:
    first = fitted(compiled(distribute), *numbers())
    keras.backend.clear_session()
    wide = stack(layers.Dense(11), layers.Dense(1))
    return {"first": first, "second": fitted(compiled(distribute, model=wide), *numbers())}
