"""Ways to train, evaluate and predict: the same numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.contract.harness import FLOAT32, Numbers, asking, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    classes,
    compiled,
    computed,
    dataset,
    fitted,
    float64,
    mlp,
    numbers,
    outcome,
    predictions,
    trained_on_shares,
    undistributed,
)  # fmt: skip

SEED_OFFSET = 1_000_003  # between the seeds of two ranks


@contract("fit-float32", tolerance=FLOAT32, sizes=(3, 4), covered_by=("fit-float64",))
def test_float32(distribute: Any) -> Numbers:
    model = compiled(distribute)
    return {**fitted(model, *numbers()), "predictions": predictions(model, numbers()[0])}


EVERYWHERE = (
    "serial-1", "multi_worker-2", "mirrored-2", "central_storage-2", "parameter_server-2",
    "tpu-1", "tpu-8",
)  # fmt: skip


@contract("fit-float64", sizes=(3, 4), also=EVERYWHERE)
def test_float64(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute)
    return {**fitted(model, *numbers(), epochs=5), "predictions": predictions(model, numbers()[0])}


def mixed_precision_model() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)])


def mixed_precision_of_shares(size: int) -> Numbers:
    """Rounding depends on the shares, so the reference is the mean of the gradients of the same shares."""
    model = compiled(lambda model: model, model=mixed_precision_model())
    return trained_on_shares(model, mean_squared_error, numbers(), size)


def mean_squared_error(y: Any, prediction: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(prediction, y.dtype) - y))


@contract("fit-mixed-bfloat16", tolerance=FLOAT32, reference=mixed_precision_of_shares)
def test_mixed_bfloat16(distribute: Any) -> Numbers:
    model = compiled(distribute, model=mixed_precision_model())
    return {"weights": fitted(model, *numbers(), shuffle=False)["weights"]}


@contract("fit-functional-multi-output", covered_by=("together-losses",))
def test_functional_multi_output(distribute: Any) -> Numbers:
    float64()
    inputs = keras.Input([FEATURES])
    shared = keras.layers.Dense(5, "relu")(inputs)
    outputs = keras.layers.Dense(1, name="value")(shared), keras.layers.Dense(3, "softmax", name="kind")(shared)
    losses = ["mse", "sparse_categorical_crossentropy"]
    model = compiled(distribute, loss=losses, loss_weights=[1, 0.5], model=keras.Model(inputs, outputs))
    (x, y), (_, labels) = numbers(), classes()
    result = fitted(model, x, [y, labels], batch_size=BATCH)
    return {**result, "predictions": predictions(model, x)}


@keras.saving.register_keras_serializable("contract")
class Subclassed(keras.Model):
    """Not built until it sees data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@contract("fit-subclassed")
def test_subclassed(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, model=Subclassed()), *numbers())


class OwnStep(keras.Model):
    """A custom `train_step` and `test_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(x)[0])
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data
        prediction = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=prediction)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


@contract("fit-own-train-step", also=("parameter_server-2",))
def test_own_train_step(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, model=OwnStep()), *numbers(), validation_data=numbers(9))


class RawMeanStep(OwnStep):
    """A handwritten loss, and logs that are not metrics."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"raw": loss}


@contract("fit-own-train-step-raw-mean", covered_by=("fit-own-train-step", "logs-derived"))
def test_own_train_step_raw_mean(distribute: Any) -> Numbers:
    """Keras shows the logs of the last step, here averaged over the ranks."""
    float64()
    return fitted(compiled(distribute, model=RawMeanStep()), *numbers(24))


class Twice(keras.Sequential):
    """The second update reads the result of the first."""

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.5, 0.5))
        return logs


@contract("fit-own-train-step-twice", sizes=(3,), covered_by=("fit-own-train-step",))
def test_own_train_step_twice(distribute: Any) -> Numbers:
    float64()
    layers = [keras.Input([FEATURES]), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    return fitted(compiled(distribute, keras.optimizers.Adam(0.1), model=Twice(layers)), *numbers())


@contract(
    "fit-embedding",
    also=("multi_worker-2", "central_storage-2", "parameter_server-2"),
    covered_by=("fit-embedding-global-clipnorm", "fit-embedding-eagerly"),
)
def test_embedding(distribute: Any) -> Numbers:
    """Sparse gradients: rows of a table, some twice in a batch."""
    float64()
    return fitted(compiled(distribute, model=embedding_model()), *tokens())


@contract("fit-embedding-adam", covered_by=("fit-embedding-global-clipnorm", "adam"))
def test_embedding_adam(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, keras.optimizers.Adam(0.01), model=embedding_model()), *tokens())


@contract("fit-embedding-eagerly", sizes=(3,), also=("mirrored-2",))
def test_embedding_eagerly(distribute: Any) -> Numbers:
    """The rows of all shares have a known number, and are no lookup that does not depend on the share."""
    float64()
    return fitted(compiled(distribute, model=embedding_model(), run_eagerly=True), *tokens())


@contract("fit-embedding-global-clipnorm", sizes=(3,))
def test_embedding_global_clipnorm(distribute: Any) -> Numbers:
    float64()
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
    return fitted(compiled(distribute, optimizer, model=embedding_model()), *tokens())


class Positions(keras.layers.Layer):
    """Looks up tokens, their positions, once and for each example, and relative positions, as transformers do."""

    def build(self, shape: Any) -> None:
        rows = (7, 4, 4, 5)
        self.tokens, self.positions, self.tiled, self.distances = (keras.layers.Embedding(n, 2) for n in rows)

    def call(self, x: Any) -> Any:
        places = keras.ops.arange(keras.ops.shape(x)[-1])
        distances = np.arange(3)[:, None] - np.arange(3) + 2  # each of some rows several times
        bias = keras.ops.sum(self.distances(distances), 1)
        of_each = self.tiled(keras.ops.tile(places[None], [keras.ops.shape(x)[0], 1]))
        return keras.ops.mean((self.tokens(x) + self.positions(places) + of_each) * bias, 1)


@contract("fit-embedding-positions", sizes=(3,), covered_by=("fit-embedding-eagerly", "fit-embedding-global-clipnorm"))
def test_embedding_positions(distribute: Any) -> Numbers:
    """The gradient of a lookup that does not depend on the batch has the same rows in every share."""
    float64()
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    model = keras.Sequential([keras.Input([None], dtype="int32"), Positions(), keras.layers.Dense(1)])
    # With one example on each replica nothing tells whether a lookup is repeated for each.
    return fitted(compiled(distribute, optimizer, model=model), *tokens(), batch_size=COUNT - 1)


def embedding_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input([3], dtype="int32"), keras.layers.Embedding(7, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def tokens() -> tuple[np.ndarray, np.ndarray]:
    return np.random.RandomState(3).randint(0, 7, [COUNT, 3]), numbers()[1]


def batchnorm_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )


def batchnorm_of_shares(size: int, in_one_process: bool = False) -> Numbers:
    """A rank normalizes its share. The moving statistics are averaged over the ranks."""
    float64()
    model = compiled(lambda model: model, model=batchnorm_model())
    result = trained_on_shares(model, mean_squared_error, numbers(), size, in_one_process=in_one_process)
    return {**result, "evaluation": model.evaluate(*numbers(), verbose=0)}


def batchnorm_of_replicas(size: int) -> Numbers:
    """They average the statistics after each step."""
    return batchnorm_of_shares(size, in_one_process=True)


@contract(
    "fit-batchnorm", sizes=(3,), also=("parameter_server-2", "tpu-8"),
    reference=batchnorm_of_shares, reference_in_one_process=batchnorm_of_replicas,
)  # fmt: skip
def test_batchnorm(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, model=batchnorm_model())
    result = fitted(model, *numbers(), shuffle=False)
    return {"weights": result["weights"], "evaluation": model.evaluate(*numbers(), verbose=0)}


@contract(
    "fit-batchnorm-synchronized",
    sizes=(3,),
    also=("mirrored-2", "parameter_server-2"),
    covered_by=("exact-batchnorm", "fit-batchnorm"),
)
def test_batchnorm_synchronized(distribute: Any) -> Numbers:
    """Normalized over the whole batch: the same numbers as in one process, also with an empty share."""
    float64()

    def model() -> keras.Model:
        layers = [keras.Input([FEATURES])]
        for units in (5, 4):  # the statistics of the second one depend on those of the first one
            layers += [keras.layers.Dense(units), keras.layers.BatchNormalization(synchronized=True)]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    def plain() -> Numbers:
        plain = compiled(distribute, model=model())
        result = fitted(plain, *numbers(25), shuffle=False)
        return {**result, "evaluation": plain.evaluate(*numbers(), verbose=0)}

    def scaled() -> Numbers:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
        return fitted(compiled(distribute, optimizer, model=model()), *numbers(25), shuffle=False)

    return computed({"plain": plain, "scaled": scaled}, "plain")


@contract("fit-batchnorm-synchronized-mask", covered_by=("exact-batchnorm", "fit-batchnorm", "loss-mask-zero"))
def test_batchnorm_synchronized_mask(distribute: Any) -> Numbers:
    """The steps of all shares that the mask leaves are counted; shares have different numbers of them."""
    float64()
    normalized = keras.layers.BatchNormalization(synchronized=True)
    layers = [keras.Input([5], dtype="int32"), keras.layers.Embedding(7, 3, mask_zero=True), normalized]
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = compiled(distribute, model=keras.Sequential(layers))
    x = np.random.RandomState(3).randint(0, 7, [25, 5]).astype("int32")
    x[:, 4] = 1
    return fitted(model, x, numbers(25)[1], shuffle=False)


def dropout_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=5), keras.layers.Dense(1)]
    )


def dropout_of_shares(size: int) -> Numbers:
    """Each rank draws its masks from its own random stream."""
    float64()
    model = compiled(lambda model: model, model=dropout_model())
    return trained_on_shares(model, mean_squared_error, numbers(), size, seed_offset=SEED_OFFSET)


def dropout_of_full_shares(size: int) -> Numbers:
    float64()
    model = compiled(lambda model: model, model=dropout_model())
    return trained_on_shares(model, mean_squared_error, numbers(24), size, seed_offset=SEED_OFFSET)


@contract("train-on-batch-dropout", reference=dropout_of_full_shares, covered_by=("train-on-batch", "fit-dropout"))
def test_train_on_batch_dropout(distribute: Any) -> Numbers:
    """Dropout draws other masks on each rank, as in `fit`."""
    float64()
    model, (x, y) = compiled(distribute, model=dropout_model()), numbers(24)
    for start in (0, 8, 16, 0, 8, 16):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    return {"weights": model.get_weights()}


@contract("fit-dropout", sizes=(3,), reference=dropout_of_shares, also=("mirrored-2",))
def test_dropout(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, model=dropout_model())
    return {"weights": fitted(model, *numbers(), shuffle=False)["weights"]}


@contract("fit-l2-regularizer", since="3.14", covered_by=("together-losses",))
def test_l2_regularizer(distribute: Any) -> Numbers:
    """It is the same on all ranks and counts once, also if a rank has no examples."""
    float64()
    model = keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
         keras.layers.Dense(1, bias_regularizer="l1")]
    )  # fmt: skip
    return fitted(compiled(distribute, model=model), *numbers())


@contract("fit-run-eagerly", sizes=(3,), also=("mirrored-2",))
def test_run_eagerly(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, run_eagerly=True, metrics=["mae"]), *numbers(), validation_data=numbers(9))


@contract("fit-steps-per-execution-1", covered_by=("fit-float64",))
def test_steps_per_execution_1(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, steps_per_execution=1), dataset())


@contract("fit-steps-per-execution-4", covered_by=("fit-steps-per-execution-not-dividing",))
def test_steps_per_execution_4(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, steps_per_execution=4), dataset())


@contract("fit-steps-per-execution-not-dividing", also=("parameter_server-2",))
def test_steps_per_execution_not_dividing(distribute: Any) -> Numbers:
    """7 steps, 4 per execution."""
    float64()
    model = compiled(distribute, steps_per_execution=4)
    result = fitted(model, dataset(batch=4), validation_data=dataset(13, 2))
    return {**result, "predictions": model.predict(dataset(batch=4), verbose=0)}


@contract(
    "fit-steps-per-execution-auto",
    covered_by=("fit-steps-per-execution-not-dividing", "tests/unit/test_auto_executions.py"),
)
def test_steps_per_execution_auto(distribute: Any) -> Numbers:
    """40 steps an epoch: the ranks time the first ones, then some of 13 together, and choose in the fourth epoch."""
    float64()
    model = compiled(asking(distribute, steps_per_execution="auto"), keras.optimizers.SGD(0.01), metrics=["mae"])
    first = fitted(model, dataset(160, 4), epochs=5, validation_data=dataset(13, 2))
    second = fitted(model, dataset(160, 4).repeat(), epochs=2, steps_per_epoch=37)
    return {"first": first, "second": second, "steps": int(model.optimizer.iterations)}


@contract("fit-several-times", covered_by=("fit-float64", "evaluate"))
def test_several_times(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, keras.optimizers.Adam(0.01))
    first, second = fitted(model, *numbers()), fitted(model, *numbers(13))
    return {"first": first, "second": second, "evaluation": model.evaluate(*numbers(), verbose=0)}


@contract("fit-initial-epoch", covered_by=("fit-float64", "evaluate"))
def test_initial_epoch(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), *numbers(), epochs=4, initial_epoch=2)


@contract("evaluate", sizes=(3, 4), also=("serial-1", "parameter_server-2", "tpu-8"))
def test_evaluate(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, metrics=["mae"])
    weights = np.linspace(0, 1, COUNT)
    return {
        "arrays": model.evaluate(*numbers(), batch_size=BATCH, verbose=0),
        "named": model.evaluate(dataset(), return_dict=True, verbose=0),
        "weighted": model.evaluate(*numbers(), batch_size=BATCH, sample_weight=weights, verbose=0),
        "steps": model.evaluate(dataset(), steps=2, verbose=0),
    }


@contract("predict", sizes=(3, 4), also=EVERYWHERE)
def test_predict(distribute: Any) -> Numbers:
    """Every example once, in order, on every rank."""
    float64()
    identity = keras.Sequential([keras.Input([1]), keras.layers.Identity()])
    model = distribute(identity)
    indices = np.arange(COUNT, dtype="float64")[:, None]
    for batch in (BATCH, 1, 3, 100):
        np.testing.assert_array_equal(model.predict(indices, batch_size=batch, verbose=0), indices)
    return {"predictions": model.predict(tf.data.Dataset.from_tensor_slices(indices).batch(7), verbose=0)}


class AsLongAsTheLongest(keras.Model):
    """Predicts rows as long as the largest number in the batch."""

    def call(self, x: Any) -> Any:
        return tf.ones([tf.shape(x)[0], tf.cast(tf.reduce_max(x), tf.int32)])


@contract("predict-widths", of=("serial", "central_storage", "horovod", "mirrored", "multi_worker", "parameter_server"))
def test_predict_widths(distribute: Any) -> Numbers:
    return {"predictions": predictions(distribute(AsLongAsTheLongest()), np.arange(1.0, 9.0)[:, None])}


@contract("predict-outputs", covered_by=("predict", "together-losses"))
def test_predict_outputs(distribute: Any) -> Numbers:
    """Several outputs, of several dtypes."""
    float64()
    inputs = keras.Input([FEATURES])
    dense = keras.layers.Dense(2)(inputs)
    outputs = {"dense": dense, "kind": keras.ops.argmax(dense, -1), "positive": dense > 0}
    model = distribute(keras.Model(inputs, outputs))
    return {"predictions": predictions(model, numbers()[0])}


@contract("predict-strings")
def test_predict_strings(distribute: Any) -> Numbers:
    """Of several lengths, in two columns."""
    float64()

    class Words(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.strings.as_string(tf.cast(10 * inputs[:, :2], tf.int32))

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor((inputs.shape[0], 2), "string")

    inputs = keras.Input([FEATURES])
    words = predictions(distribute(keras.Model(inputs, Words()(inputs))), numbers()[0])
    return {"shape": words.shape, "words": " ".join(word.decode() for word in words.reshape(-1))}


@contract("metrics-vector", covered_by=("together-metrics",))
def test_metrics_vector(distribute: Any) -> Numbers:
    """In the list and the dict of `train_on_batch`, and in the history."""
    float64()
    x, y = numbers(24, 3)
    model = compiled(distribute, model=mlp(3, "sigmoid"), metrics=[keras.metrics.F1Score(average=None)])
    data = x[:8], (y > 0).astype("float64")[:8]
    logs = model.train_on_batch(*data), model.test_on_batch(*data, return_dict=True)
    return {**fitted(model, x, (y > 0).astype("float64")), "logs": logs}


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
    """One that runs the step by itself is refused."""
    import keras_dist as kd

    float64()
    if kd.num_replicas() > 1:
        model = compiled(distribute, model=OwnFunction(by_strategy=False))
        with pytest.raises(kd.NotSupportedError, match="A function that runs a step by itself"):
            fitted(model, *numbers())
        keras.utils.set_random_seed(0)
    return fitted(compiled(distribute, model=OwnFunction(by_strategy=True)), *numbers(), shuffle=False)


@contract("fit-spectral-normalization", covered_by=("fit-layer-state", "exact-batchnorm"))
def test_spectral_normalization(distribute: Any) -> Numbers:
    """A layer that assigns its kernel in a step."""
    float64()
    hidden = keras.layers.SpectralNormalization(keras.layers.Dense(6, "tanh"))
    model = keras.Sequential([keras.Input([FEATURES]), hidden, keras.layers.Dense(1)])
    return fitted(compiled(distribute, model=model), *numbers(25))


@contract("train-on-batch", also=("parameter_server-2",))
def test_train_on_batch(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, metrics=["mae"])
    x, y = numbers()
    logs = [model.train_on_batch(x[i : i + 5], y[i : i + 5]) for i in range(0, 20, 5)]
    named = model.train_on_batch(x[:1], y[:1], return_dict=True)
    return {"logs": logs, "named": named, "weights": model.get_weights()}


@contract("test-on-batch", covered_by=("train-on-batch",))
def test_test_on_batch(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, metrics=["mae"])
    x, y = numbers()
    lists = [model.test_on_batch(x[:size], y[:size]) for size in (7, 9)]
    return {"lists": lists, "dict": model.test_on_batch(x, y, return_dict=True)}


@contract("predict-on-batch", covered_by=("predict",))
def test_predict_on_batch(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute)
    return {"predictions": model.predict_on_batch(numbers()[0][:5])}


@contract("metrics-accuracy", covered_by=("together-metrics",))
def test_accuracy(distribute: Any) -> Numbers:
    float64()
    model = mlp(3, "softmax")
    loss = "sparse_categorical_crossentropy"
    return fitted(
        compiled(distribute, loss=loss, model=model, metrics=["accuracy"]), *classes(), validation_data=classes(9)
    )


@contract("metrics-auc-precision", also=("parameter_server-2",), covered_by=("together-metrics",))
def test_auc_precision(distribute: Any) -> Numbers:
    """State in arrays: histograms and confusion matrices."""
    float64()
    model = compiled(
        distribute,
        loss="binary_crossentropy",
        model=mlp(1, "sigmoid"),
        metrics=[keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"],
    )
    x, y = numbers()
    return fitted(model, x, (y > 0).astype("float64"), validation_data=(x[:9], (y[:9] > 0).astype("float64")))


@contract("metrics-mean-iou", covered_by=("together-metrics",))
def test_mean_iou(distribute: Any) -> Numbers:
    float64()
    metric = keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")
    model = compiled(distribute, loss="sparse_categorical_crossentropy", model=mlp(3, "softmax"), metrics=[metric])
    return fitted(model, *classes())


@contract("compiled-before", covered_by=("fitted-before",))
def test_compiled_before(distribute: Any) -> Numbers:
    float64()
    model = mlp()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return fitted(distribute(model), *numbers())


@contract("fitted-before")
def test_fitted_before(distribute: Any) -> Numbers:
    """Functions that were traced for one process must not be reused."""
    float64()
    model = compiled(lambda model: model, keras.optimizers.Adam(0.01))
    before = fitted(model, *numbers())
    predictions(model, numbers()[0])
    after = fitted(distribute(model), *numbers())
    return {"before": before, "after": after, "predictions": predictions(model, numbers()[0])}


@contract("loaded-before", covered_by=("fitted-before", "load-weights"))
def test_loaded_before(distribute: Any) -> Numbers:
    """The optimizer state comes from the file."""
    import keras_dist as kd

    float64()
    with undistributed():
        plain = compiled(lambda model: model, keras.optimizers.Adam(0.01))
        fitted(plain, *numbers())
        if kd.is_chief():
            plain.save("loaded.keras")
    kd.barrier()
    return fitted(distribute(keras.models.load_model("loaded.keras")), *numbers())


@contract("distributed-twice", covered_by=("scale-learning-rate", "data-numpy"))
def test_distributed_twice(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute)
    assert distribute(model) is model
    return fitted(model, *numbers())


@contract("recompiled", covered_by=("fitted-before",))
def test_recompiled(distribute: Any) -> Numbers:
    """Freeze, fit, unfreeze, compile again, fit."""
    float64()
    model = mlp()
    model.layers[0].trainable = False
    compiled(distribute, model=model)
    frozen = fitted(model, *numbers())
    model.layers[0].trainable = True
    model.compile(keras.optimizers.Adam(0.01), "mae")
    return {"frozen": frozen, "whole": fitted(model, *numbers())}


@contract("evaluated-first", covered_by=("evaluate",))
def test_evaluated_first(distribute: Any) -> Numbers:
    """The model is used before its first epoch."""
    float64()
    model = compiled(distribute)
    first = model.evaluate(*numbers(9), verbose=0)
    return {"evaluation": first, **outcome(model, model.fit(*numbers(), verbose=0).history)}


@contract("two-models", covered_by=("fitted-before",))
def test_two_models(distribute: Any) -> Numbers:
    """The second model has other shapes and shares nothing with the first."""
    float64()
    first = fitted(compiled(distribute), *numbers())
    keras.backend.clear_session()
    wide = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(11), keras.layers.Dense(1)])
    return {"first": first, "second": fitted(compiled(distribute, model=wide), *numbers())}
