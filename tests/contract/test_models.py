"""Models of all kinds, their metrics, and ways to run them: the same numbers."""

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dist as kd
from tests.contract.harness import FLOAT32, NOT_TPU, Numbers, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    Distribute,
    Gan,
    Linear,
    classes,
    compiled,
    compiled_gan,
    evaluated,
    fitted,
    mlp,
    numbers,
    outcome,
    predictions,
    some,
    stack,
    undistributed,
)
from tests.contract.test_api import refused
from tests.contract.test_losses import weights


def fit_model(distribute: Distribute, model: keras.Model, optimizer: Any = None, **options: Any) -> Numbers:
    return fitted(compiled(distribute, optimizer, model=model), *numbers(), **options)


class Unregistered(Linear):
    def get_config(self) -> dict[str, Any]:
        return {}


@contract("fit-subclassed-unregistered", covered_by=("fit-own-train-step",))
def test_subclassed_unregistered(distribute: Distribute) -> Numbers:
    model = compiled(distribute, keras.optimizers.Adam(0.01), model=Unregistered())
    result = fitted(model, *numbers(), validation_data=numbers(9))
    model.save("model.keras")
    with undistributed():
        loaded = keras.models.load_model("model.keras", custom_objects={"Unregistered": Unregistered})
        return {**result, "predictions": predictions(loaded, numbers()[0])}


class Task(keras.Model):
    """Overrides `fit`, `evaluate` and `predict` to preprocess raw strings, as keras_hub does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(5, 3), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(keras.ops.mean(self.embedding(x), 1))

    def preprocessed(self, x: Any, y: Any = None, batch_size: int | None = None) -> tf.data.Dataset:
        if not isinstance(x, tf.data.Dataset):
            data = (np.array(x), y) if y is not None else np.array(x)
            x = tf.data.Dataset.from_tensor_slices(data).batch(batch_size or 32)
        return x.map(lambda *row: (tokens(row[0]), *row[1:]))

    def fit(
        self, x: Any = None, y: Any = None, batch_size: Any = None, validation_data: Any = None, **others: Any
    ) -> Any:
        if validation_data is not None:
            validation_data = self.preprocessed(*validation_data, batch_size)
        return super().fit(self.preprocessed(x, y, batch_size), validation_data=validation_data, **others)

    def evaluate(self, x: Any = None, y: Any = None, batch_size: Any = None, **others: Any) -> Any:
        cached = others.get("_use_cached_eval_dataset")
        return super().evaluate(None if cached else self.preprocessed(x, y, batch_size), **others)

    def predict(self, x: Any = None, batch_size: Any = None, **others: Any) -> Any:
        return super().predict(self.preprocessed(x, None, batch_size), **others)


def tokens(texts: Any) -> Any:
    return tf.strings.to_hash_bucket_fast(tf.strings.split(texts).to_tensor(""), 5)


@contract("fit-overridden", sizes=(3,), covered_by=("differs-constants", "together-data", "input-own-share"))
def test_fit_overridden(distribute: Distribute) -> Numbers:
    texts = [" ".join("abcdefgh"[(index + step) % 8] for step in range(3)) for index in range(COUNT)]
    y = numbers()[1]
    model = compiled(distribute, model=Task())
    result = fitted(model, texts, y, batch_size=BATCH, validation_data=(texts[:9], y[:9]))
    again = fitted(model, tf.data.Dataset.from_tensor_slices((texts, y)).shuffle(30, seed=3).batch(BATCH))
    predicted, evaluation = predictions(model, texts), evaluated(model, texts, y)
    return {"first": result, "second": again, "predictions": predicted, "evaluation": evaluation}


# The noise is part of the data.
contract("fit-gan", sizes=(3,))(
    lambda distribute: fitted(
        compiled_gan(distribute(Gan())), numbers()[0], np.random.RandomState(4).normal(size=[COUNT, FEATURES])
    )
)


class Noisy(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.drawn: list[np.ndarray] = []

    def call(self, x: Any) -> Any:
        return 0.0 * self.dense(x) + keras.random.normal([tf.shape(x)[0], 1])

    def train_step(self, data: Any) -> Any:
        noise = tf.concat([tf.random.normal([4]), tf.random.normal([4], seed=3), keras.random.normal([4])], 0)
        tf.py_function(lambda noise: self.drawn.append(noise.numpy()), [noise], [])
        return super().train_step(data)


def noise_differs(results: list[Numbers], plain: Numbers, size: int) -> None:
    """All replicas draw other numbers. Those of the first rank's Keras are those of one process."""
    drawn = np.concatenate([np.asarray(result["own_drawn"]).reshape([-1, 12]) for result in results])
    assert len(drawn) == 6 * size
    assert np.unique(drawn.round(6)).size == drawn.size
    np.testing.assert_allclose(results[0]["own_drawn"][0][8:], plain["own_drawn"][0][8:])


@contract(
    "fit-random-functions", float32=True, of=("horovod", "multi_worker", "mirrored", "central_storage"),
    verify=noise_differs,
)  # fmt: skip
def test_random_functions(distribute: Distribute) -> Numbers:
    model = distribute(Noisy())
    model.compile("sgd", "mse")
    fitted(model, *numbers(24), shuffle=False)
    return {"own_drawn": list(model.drawn)}


@contract("fit-masking", covered_by=("loss-mask-zero",))
def test_masking(distribute: Distribute) -> Numbers:
    x = np.random.RandomState(1).normal(size=[COUNT, 4, 2])
    x[np.arange(4)[None, :] > (np.arange(COUNT) * 3 % 4)[:, None]] = 0
    model = stack(layers.Masking(), layers.LSTM(3, return_sequences=True), layers.Dense(1), shape=[4, 2])
    return fitted(compiled(distribute, model=model, metrics=["mae"]), x, np.cos(x[..., :1]))


@contract("fit-batchnorm-frozen", covered_by=("fit-batchnorm",))
def test_batchnorm_frozen(distribute: Distribute) -> Numbers:
    """It uses its moving statistics, so examples are independent: the same numbers as in one process."""
    layer = layers.BatchNormalization()
    model = stack(layers.Dense(5), layer, layers.Dense(1))
    layer.set_weights([np.linspace(0.5, 2, 5) + index for index in range(4)])
    layer.trainable = False
    return fit_model(distribute, model)


class Counting(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
        return x


# A step counts once, also on a rank with an empty share.
contract("fit-integer-counter", sizes=(3,), covered_by=("fit-layer-state",))(
    lambda distribute: fit_model(distribute, stack(Counting(), layers.Dense(1)))
)


class Codebook(layers.Layer):
    """A VQ-VAE's vector quantizer, whose codes are moving averages of what is assigned to them."""

    def build(self, shape: Any) -> None:
        start = keras.initializers.RandomUniform(-1, 1, seed=1)
        state = {"trainable": False, "dtype": "float64"}
        self.codes = self.add_weight(shape=(shape[-1], 3), initializer=start, name="codes", **state)
        self.sums = self.add_weight(shape=(shape[-1], 3), initializer="ones", name="sums", **state)
        self.sizes = self.add_weight(shape=(3,), initializer="ones", name="sizes", **state)

    def call(self, x: Any, training: bool = False) -> Any:
        distances = keras.ops.sum(self.codes**2, axis=0) - 2 * keras.ops.matmul(x, self.codes)
        chosen = keras.ops.one_hot(keras.ops.argmin(distances, axis=1), 3, dtype=x.dtype)
        quantized = keras.ops.matmul(chosen, keras.ops.transpose(self.codes))
        if training:
            self.sizes.assign(0.9 * self.sizes + 0.1 * keras.ops.sum(chosen, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * keras.ops.matmul(keras.ops.transpose(x), chosen))
            self.codes.assign(self.sums / (self.sizes + 1e-3))
        self.add_loss(0.25 * keras.ops.mean((keras.ops.stop_gradient(quantized) - x) ** 2))
        return x + keras.ops.stop_gradient(quantized - x)


class Queue(layers.Layer):
    """The latest features, as in MoCo: returns the similarity to the nearest of them."""

    def build(self, shape: Any) -> None:
        start = keras.initializers.RandomNormal(seed=2)
        self.latest = self.add_weight(shape=(12, shape[-1]), initializer=start, trainable=False, name="latest")

    def call(self, x: Any, training: bool = False) -> Any:
        nearest = keras.ops.max(keras.ops.matmul(x, keras.ops.transpose(self.latest)), axis=1, keepdims=True)
        if training:
            self.latest.assign(keras.ops.concatenate([x, self.latest], axis=0)[:12])
        return keras.ops.concatenate([x, nearest], axis=1)


class Running(layers.Layer):
    """Counts examples, and subtracts a running mean in training too.

    Args:
        in_all_calls: If true, it also does so in `evaluate` and `predict`.
    """

    def __init__(self, in_all_calls: bool = False) -> None:
        super().__init__()
        self.in_all_calls = in_all_calls

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="seen")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training or self.in_all_calls:
            self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
            self.mean.assign(0.8 * self.mean + 0.2 * keras.ops.mean(x, axis=0))
        return x - self.mean


def passes_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(super(PassesOn, self), name)(*args, **kwargs)


@keras.saving.register_keras_serializable("contract")
class PassesOn(keras.Sequential):
    """A project's base class, which passes on whatever it gets."""


for name in ("compile", "fit", "evaluate", "predict", "train_on_batch", "save"):
    setattr(PassesOn, name, passes_on(name))


@contract("fit-passes-on")
def test_passes_on(distribute: Distribute) -> Numbers:
    model = distribute(PassesOn([keras.Input([FEATURES]), layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.1), "mse", None, None, ["mae"])
    x, y = numbers()
    result = outcome(model, model.fit(x, y, BATCH, 2, 0, None, 0.2).history)
    evaluation, batch = model.evaluate(x, y, BATCH, 0), model.train_on_batch(x[:9], y[:9])
    model.save("passed-on.keras")
    loaded = keras.models.load_model("passed-on.keras").get_weights()
    return {**result, "evaluation": evaluation, "batch": batch, "loaded": loaded, "predicted": model.predict(x, 4, 0)}


class GraphNetwork(keras.Model):
    """A node classifier as on keras.io: one graph in the model, a batch has the numbers of nodes."""

    def __init__(self, nodes: Any, edges: Any) -> None:
        super().__init__()
        self.nodes, self.edges = tf.constant(nodes), tf.constant(edges)
        self.before, self.after = (layers.Dense(4, kernel_regularizer="l2") for _ in range(2))

    def call(self, inputs: Any) -> Any:
        nodes, (sources, targets) = self.before(inputs[0]), tf.unstack(inputs[1], axis=1)
        return self.after(nodes + tf.math.unsorted_segment_sum(tf.gather(nodes, sources), targets, nodes.shape[0]))

    def _logs(self, data: Any) -> tuple[Any, Callable[[], Any]]:
        outputs = tf.gather(self([self.nodes, self.edges]), data[0])
        return self.compute_loss(None, data[1], outputs), lambda: self.compute_metrics(None, data[1], outputs)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, logs = self._logs(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return logs()

    def test_step(self, data: Any) -> Any:
        return self._logs(data)[1]()


@contract("fit-graph-network", also=("parameter_server-2",))
def test_graph_network(distribute: Distribute) -> Numbers:
    """Its weights are made in `train_step`: `call` can't be given a batch."""
    random = np.random.RandomState(0)
    edges = random.randint(0, COUNT, (3 * COUNT, 2))
    model = distribute(GraphNetwork(numbers()[0], edges))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["sparse_categorical_accuracy"])
    return fitted(model, random.permutation(COUNT), classes()[1], validation_split=0.2)


@contract("fit-layer-state", sizes=(3,), also=("mirrored-2",))
def test_layer_state(distribute: Distribute) -> Numbers:
    """Such layers see the whole batch. The last batch has one example."""
    chosen = some({"codebook": Codebook(), "queue": Queue(), "running": Running()}, "queue")
    return {
        name: fit_model(distribute, stack(layers.Dense(5, "tanh"), layer, layers.Dense(1)))
        for name, layer in chosen.items()
    }


@contract("evaluate-layer-state", covered_by=("fit-layer-state",))
def test_evaluate_layer_state(distribute: Distribute) -> Numbers:
    """A layer that keeps state in `evaluate` and `predict` too. The last batch has one example."""
    model = stack(layers.Dense(5, "tanh"), Running(in_all_calls=True), layers.Dense(1))
    model = compiled(distribute, model=model, metrics=["mae"])
    evaluation, predicted = evaluated(model), predictions(model, numbers()[0])
    return {"evaluation": evaluation, "predictions": predicted, "weights": model.get_weights()}


class OwnState(keras.Model):
    """A `train_step` that keeps an average of the weights (BYOL), a count, a mean that training uses."""

    def __init__(self, aggregations: tuple[str, str] = ("sum", "mean")) -> None:
        super().__init__()
        self.dense, self.average = layers.Dense(1), layers.Dense(1, trainable=False)
        kinds = zip(("seen", "mean"), ("int64", "float64"), aggregations, strict=True)
        self.seen, self.mean = (
            self.add_weight((), "zeros", dtype, trainable=False, aggregation=kind, name=name)
            for name, dtype, kind in kinds
        )

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.average.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x) - self.mean + 0.1 * keras.ops.stop_gradient(self.average(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for average, weight in zip(self.average.weights, self.dense.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.seen.assign_add(tf.shape(x, out_type=tf.int64)[0])
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(y))
        return {"loss": self._loss_tracker.result()}


def built(model: keras.Model) -> keras.Model:
    model.build((None, FEATURES))
    return model


# The last batch has one example: an empty share changes nothing.
contract("fit-step-state", sizes=(3,))(
    lambda distribute: {"weights": fit_model(distribute, built(OwnState()))["weights"]}
)


class SeenAtOnce(layers.Layer):
    """Subtracts a moving mean that it has just assigned."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, aggregation="mean")

    def call(self, x: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, 0))
        return x - self.mean


@contract("refuses-step-state")
def test_refuses_step_state(distribute: Distribute) -> Numbers:
    for kinds, named in ((("none", "none"), "(seen|mean)"), (("none", "mean"), "seen")):
        model = compiled(distribute, model=built(OwnState(kinds)))
        text = rf"its share of the batch(?s:.*)'[^']*{named}'(?s:.*)`call` of a layer"
        fit = lambda model=model: fitted(model, *numbers(32), batch_size=16)  # noqa: E731
        refused(kd.NotSupportedError, text, fit, kd.num_replicas)
    return {}


@contract("refuses-step-state-read", of=NOT_TPU, also=("parameter_server-2",))
def test_refuses_step_state_read(distribute: Distribute) -> Numbers:
    """On a TPU the assignment itself takes the mean over the cores."""
    model = compiled(distribute, model=stack(SeenAtOnce(), layers.Dense(1)))
    text = r"does not compute what one process would|can't compute with what its layers have assigned"
    refused((kd.NotSupportedError, kd.MismatchError), text, lambda: fitted(model, *numbers(32)), kd.num_replicas)
    return {}


@contract("refuses-stateful-rnn")
def test_refuses_stateful_rnn(distribute: Distribute) -> Numbers:
    model = keras.Sequential([keras.Input([3, 2], batch_size=4), layers.GRU(2, stateful=True, name="memory")])
    text = r"keeps a state for each position(?s:.*)'memory'"
    return refused(kd.NotSupportedError, text, lambda: distribute(model), kd.num_replicas)


@contract("fit-fixed-batch-size", sizes=(3,), covered_by=("refuses-fixed-batch",))
def test_fixed_batch_size(distribute: Distribute) -> Numbers:
    """Keras takes other batch sizes too. A model without an Input gets the size of the first batch, if it is fixed."""
    (x, y), results = numbers(2 * BATCH), {}
    for kind in ("without input", "with batch shape", "built by a call"):
        first = [keras.Input(batch_shape=[BATCH, FEATURES])] if kind == "with batch shape" else []
        model = keras.Sequential([*first, layers.Dense(3, "tanh"), layers.Dense(1)])
        if kind == "built by a call":
            model(np.ones([1, FEATURES]))
        compiled(distribute, model=model)
        fitted(model, x, y)
        others = {"evaluated": evaluated(model, x, y, batch_size=6), "predicted": predictions(model, x[:5])}
        results[kind] = {**fitted(model, x, y, batch_size=5), **others, "shape": str(model.input_shape)}
    return results


@contract("refuses-fixed-batch")
def test_refuses_fixed_batch(distribute: Distribute) -> Numbers:
    x = keras.Input(batch_shape=[4, FEATURES], name="rows")
    pairs = keras.Model(x, layers.Dense(1)(keras.ops.reshape(x, [4, 2, FEATURES // 2])))
    first = keras.Model(x, keras.ops.reshape(x, [4, -1]))
    for model, reason in ((pairs, r"size of the tensor"), (first, r"shape \(4, 4\) for any batch")):
        text = rf"one size only(?s:.*){reason}(?s:.*)\(4, 4\)"
        refused(kd.NotSupportedError, text, lambda model=model: distribute(model), kd.num_replicas)
    return {}


# --- Metrics ---


def measured(
    distribute: Distribute, metrics: list[Any], x: Any, y: Any, model: Any = None, loss: str = "mse"
) -> Numbers:
    model = compiled(distribute, loss=loss, model=model, metrics=metrics)
    return fitted(model, x, y, validation_data=(x[:9], y[:9]))


def validated(distribute: Distribute, **compiles: Any) -> Numbers:
    model = compiled(distribute, **compiles)
    result = fitted(model, *numbers(), validation_data=numbers(9))
    return {**result, "evaluation": model.evaluate(*numbers(), verbose=0, return_dict=True)}


contract("metrics-mean-iou", covered_by=("together-metrics",))(
    lambda distribute: measured(
        distribute, ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")], *classes(),
        mlp(3, "softmax"), "sparse_categorical_crossentropy",
    )
)  # fmt: skip


@contract("metrics-over-examples", of=NOT_TPU)
def test_metrics_over_examples(distribute: Distribute) -> Numbers:
    """Keras's own metrics over the first axis; it is -2 of a matrix."""
    metrics = [keras.metrics.PearsonCorrelation(axis=0), keras.metrics.CosineSimilarity(axis=-2)]
    return measured(distribute, metrics, *numbers(24, 3), mlp(3, "softmax"))


contract("metrics-r2-score", covered_by=("together-metrics",))(
    lambda distribute: measured(distribute, [keras.metrics.R2Score()], *numbers())
)


@contract("metrics-auc-precision", also=("parameter_server-2",), covered_by=("together-metrics",))
def test_auc_precision(distribute: Distribute) -> Numbers:
    metrics, (x, y) = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"], numbers()
    return measured(distribute, metrics, x, (y > 0).astype("float64"), mlp(1, "sigmoid"), "binary_crossentropy")


class Parts(keras.metrics.RootMeanSquaredError):
    """Its result is a dict, which Keras shows as several logs."""

    def result(self) -> Any:
        return {"parts_root": super().result(), "parts_count": self.count.value}


@contract("metrics-vector", covered_by=("together-metrics",))
def test_metrics_vector(distribute: Distribute) -> Numbers:
    x, y = numbers(24, 3)
    metrics = [keras.metrics.F1Score(average=None), Parts(name="parts")]
    model = compiled(distribute, model=mlp(3, "sigmoid"), metrics=metrics)
    data = x[:8], (y > 0).astype("float64")[:8]
    logs = model.train_on_batch(*data), model.test_on_batch(*data, return_dict=True)
    return {**fitted(model, x, (y > 0).astype("float64")), "logs": logs}


class Smoothed(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="smoothed")
        self.total = self.add_variable([2], lambda shape, dtype: keras.ops.ones(shape, dtype) * 3, name="total")
        self.count = self.add_variable([], "ones", name="count")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        error = keras.ops.abs(y - prediction)
        self.total.assign_add(keras.ops.stack([keras.ops.sum(error), keras.ops.sum(error**2)]))
        self.count.assign_add(keras.ops.cast(keras.ops.size(error), self.count.dtype))

    def result(self) -> Any:
        return (self.total[0] + self.total[1]) / self.count

    def reset_state(self) -> None:
        self.total.assign([3.0, 3.0])
        self.count.assign(1.0)


# The initial state counts once, not once per rank.
contract("metrics-own", sizes=(3,), covered_by=("together-metrics",))(
    lambda distribute: validated(distribute, metrics=[Smoothed()])
)


class Watched(layers.Dense):
    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.size = keras.metrics.Mean("size")

    def call(self, x: Any) -> Any:
        outputs = super().call(x)
        self.size.update_state(keras.ops.abs(outputs))
        return outputs


contract("metrics-in-layer", sizes=(3,), covered_by=("together-metrics",))(
    lambda distribute: validated(distribute, model=stack(Watched(3), layers.Dense(1)))
)


@contract("together-metrics", of=NOT_TPU)
def test_together_metrics(distribute: Distribute) -> Numbers:
    model = stack(Watched(3), layers.Dense(1, "sigmoid"))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"]
    metrics += [Smoothed(), Parts(name="parts")]
    model = compiled(distribute, loss="binary_crossentropy", model=model, metrics=metrics, weighted_metrics=["mae"])
    x, y = numbers()
    data, weight = (x, (y > 0).astype("float64")), {"sample_weight": weights()}
    result = fitted(model, *data, validation_data=(x[:9], data[1][:9]), **weight)
    return {**result, "evaluation": evaluated(model, *data, return_dict=True, **weight)}


# --- XLA and a search ---


@contract("jit-compile-auto", float32=True, tolerance=FLOAT32, covered_by=("tests/unit/test_keras_xla.py",))
def test_jit_compile_auto(distribute: Distribute) -> Numbers:
    """Off on CPUs; on with a GPU, which is simulated here, and off again in eager mode."""
    assert not compiled(distribute, jit_compile="auto").jit_compile
    keras.utils.set_random_seed(0)
    found, gpu = tf.config.list_physical_devices, tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    # Keras uses this list to decide whether to use XLA.
    with mock.patch.object(tf.config, "list_physical_devices", lambda kind=None: [gpu, *found(kind)]):
        model, eager = [compiled(distribute, jit_compile="auto", run_eagerly=eagerly) for eagerly in (False, True)]
    is_tpu = tf.distribute.has_strategy()  # it has its own compiler
    assert (model.jit_compile, eager.jit_compile) == (not is_tpu, False)
    return fitted(model, *numbers())


@pytest.mark.skipif(importlib.util.find_spec("keras_tuner") is None, reason="keras-tuner is not installed")
@contract("keras-tuner", float32=True, tolerance=FLOAT32, covered_by=("fitted-before",))
def test_keras_tuner(distribute: Distribute) -> Numbers:
    import keras_tuner

    def build(parameters: Any) -> keras.Model:
        hidden = layers.Dense(parameters.Int("units", 2, 64), "tanh")
        model = stack(hidden, layers.Dense(1))
        rate = parameters.Float("rate", 1e-3, 1e-1, sampling="log")
        return compiled(distribute, keras.optimizers.SGD(rate), model=model)

    tuner = keras_tuner.RandomSearch(build, "val_loss", 2, seed=3, directory="search", project_name="shared")
    kd.barrier()  # no rank finds a trial that another rank has already started
    tuner.search(*numbers(), validation_data=numbers(9), epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    trials = list(tuner.oracle.trials.values())
    assert [trial.status for trial in trials] == ["COMPLETED"] * 2, trials[0].message
    (best,) = tuner.get_best_models(1)
    return {
        "trials": [{**trial.hyperparameters.values, "score": float(trial.score)} for trial in trials],
        "weights": best.get_weights(),
    }
