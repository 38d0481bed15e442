"""Data and models of the cases: small, and the same in every process."""

import contextlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import keras_dist as kd
from keras_dist.data.shares import share_bounds
from tests.limits import TIER

COUNT, FEATURES, BATCH = 25, 4, 8  # 8, 8, 8, 1: the last batch is smaller than any number of ranks but one

Distribute = Callable[[Any], Any]


def some(variants: Mapping[str, Any], *usual: str) -> dict[str, Any]:
    """Returns the variants of a case: all of them in `make test-full`, in `make test` only the usual ones."""
    assert set(usual) <= set(variants)
    is_full = os.environ.get(TIER) == "full"
    return {name: variant for name, variant in variants.items() if is_full or name in usual}


def computed(variants: Mapping[str, Callable[[], Any]], *usual: str) -> dict[str, Any]:
    """Returns their results."""
    return {name: variant() for name, variant in some(variants, *usual).items()}


def numbers(count: int = COUNT, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and y of a regression."""
    random = np.random.RandomState(7)
    x = random.normal(size=(count, FEATURES))
    y = np.tanh(x @ random.normal(size=(FEATURES, outputs))) + 0.1 * random.normal(size=(count, outputs))
    return x.astype(keras.config.floatx()), y.astype(keras.config.floatx())


def classes(count: int = COUNT, kinds: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and integer labels."""
    x, y = numbers(count, kinds)
    return x, np.argmax(y, axis=1).astype("int32")


def examples(count: int = COUNT) -> tf.data.Dataset:
    """Returns `numbers` one by one."""
    return tf.data.Dataset.from_tensor_slices(numbers(count))


def dataset(count: int = COUNT, batch: int = BATCH) -> tf.data.Dataset:
    """Returns the batches of `numbers`."""
    return examples(count).batch(batch)


def batches(count: int = COUNT, size: int = BATCH) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the batches of `numbers`."""
    x, y = numbers(count)
    for start in range(0, count, size):
        yield x[start : start + size], y[start : start + size]


def of_pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns a rank's part of `numbers`: with the batches of the other ranks they are those of one process."""
    ranks = context.num_input_pipelines
    return examples().shard(ranks, context.input_pipeline_id).batch(BATCH // ranks)


def from_list(batches: list[Any]) -> tf.data.Dataset:
    """Returns a dataset of batches of different sizes."""
    spec = tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), batches[0])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def tfds_builder(
    examples: Callable[[Any], Iterable[Mapping[str, Any]]], like: Mapping[str, np.ndarray], is_registered: bool = False
) -> Any:
    """Returns a builder of TFDS for `made_up`, whose examples may ask the download manager and are `like` this one."""
    import tensorflow_datasets as tfds

    class MadeUp(tfds.core.GeneratorBasedBuilder, skip_registration=not is_registered):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = Path()

        def _info(self) -> Any:
            features = {name: tfds.features.Tensor(shape=each.shape, dtype=each.dtype) for name, each in like.items()}
            keys = tuple(like) if len(like) == 2 else None
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=keys)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples(examples(dl_manager))}

        def _generate_examples(self, found: Any) -> Any:
            yield from enumerate(found)

    tfds.disable_progress_bar()
    MadeUp.__module__ = "__main__"  # TFDS would look for metadata in its package
    return MadeUp


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Returns x and y of an embedding."""
    return np.random.RandomState(3).randint(0, 7, [COUNT, 3]), numbers()[1]


def stack(*layers: Any, shape: Sequence[int] = (FEATURES,)) -> keras.Model:
    """Returns a model of layers."""
    return keras.Sequential([keras.Input(shape), *layers])


def mlp(outputs: int = 1, activation: str | None = None) -> keras.Model:
    return stack(keras.layers.Dense(6, "tanh"), keras.layers.Dense(outputs, activation))


def of_words(vocabulary: Sequence[str]) -> keras.Model:
    """Returns a model of a dict of numbers and a word."""
    inputs = {"x": keras.Input([FEATURES], name="x"), "word": keras.Input([], dtype="string", name="word")}
    index = keras.layers.StringLookup(vocabulary=vocabulary)(inputs["word"])
    embedded = keras.layers.Embedding(len(vocabulary) + 1, 2)(index)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["x"], embedded])))


def compiled(
    distribute: Distribute, optimizer: Any = None, loss: Any = "mse", model: Any = None, **options: Any
) -> keras.Model:
    model = distribute(mlp() if model is None else model)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return model


def fitted(model: keras.Model, *args: Any, **options: Any) -> dict[str, Any]:
    options = {"epochs": 2, "verbose": 0, **options}
    if args and isinstance(args[0], np.ndarray):
        options.setdefault("batch_size", BATCH)
    history = model.fit(*args, **options)
    return outcome(model, history.history)


def outcome(model: keras.Model, history: dict[str, Any]) -> dict[str, Any]:
    return {"history": history, "weights": model.get_weights()}


def evaluated(model: keras.Model, *data: Any, **options: Any) -> Any:
    return model.evaluate(*data or numbers(), **{"batch_size": BATCH, "verbose": 0, **options})


def predictions(model: keras.Model, x: Any) -> Any:
    return model.predict(x, batch_size=BATCH, verbose=0)


def saved_config(path: str) -> dict[str, Any]:
    with zipfile.ZipFile(path) as file:
        config: dict[str, Any] = json.loads(file.read("config.json"))
    return config


def files() -> list[str]:
    """Returns every file of the folder that all ranks share, also temporary ones, once all ranks are done."""
    kd.barrier()
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def descend(tape: tf.GradientTape, loss: Any, model: Any, optimizer: Any = None) -> None:
    """What most steps of a script do."""
    variables = model.trainable_variables
    (optimizer or model.optimizer).apply(tape.gradient(loss, variables), variables)


class Linear(keras.Model):
    """A model with one layer, whose steps a subclass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class GuideStep(Linear):
    """The `train_step` and `test_step` of Keras's guide, with the metrics of `compile`."""

    counts_examples = False  # whether a loss counts by its number of examples

    def predicted(self, x: Any, y: Any, training: bool) -> Any:
        """Returns the prediction and its loss."""
        prediction = self(x, training=training)
        return prediction, self.compute_loss(y=y, y_pred=prediction)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            prediction, loss = self.predicted(*data[:2], training=True)
        descend(tape, loss, self)
        return self.updated(data[1], prediction, loss)

    def test_step(self, data: Any) -> Any:
        return self.updated(data[1], *self.predicted(*data[:2], training=False))

    def updated(self, y: Any, prediction: Any, loss: Any) -> Any:
        weight = tf.shape(y)[0] if self.counts_examples else None
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=weight)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


class Tracked(keras.Model):
    """A model whose one metric is a mean of its loss, by default with the steps for it.

    Args:
        net: The model or layer that it calls.
        loss_of: The loss, of `y` and the prediction.
        name: Of the metric.
    """

    def __init__(self, net: Any = None, loss_of: Any = None, name: str = "loss") -> None:
        super().__init__()
        self.net, self.tracker = net, keras.metrics.Mean(name)
        self.loss_of_prediction = loss_of

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.net(x)

    def loss_of(self, data: Any) -> Any:
        return keras.ops.mean(self.loss_of_prediction(data[1], self(data[0], training=True)))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        descend(tape, loss, self)
        return self.tracked(loss, data)

    def test_step(self, data: Any) -> Any:
        return self.tracked(self.loss_of(data), data)

    def tracked(self, loss: Any, data: Any) -> Any:
        self.tracker.update_state(loss, sample_weight=keras.ops.shape(data[1])[0])
        return {self.tracker.name: self.tracker.result()}


def used(model: keras.Model, x: Any, y: Any = None, **options: Any) -> dict[str, Any]:
    """Trains, evaluates and predicts."""
    data = (x,) if y is None else (x, y)
    result = fitted(model, *data, **options)
    return {**result, "evaluation": evaluated(model, *data), "predictions": predictions(model, x)}


@contextlib.contextmanager
def undistributed() -> Iterator[None]:
    """Creates and trains models as a process without keras_dist does: `kd.init` sets a strategy for a TPU."""
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    tf.distribute.experimental_set_strategy(None)
    try:
        yield
    finally:
        tf.distribute.experimental_set_strategy(strategy)


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    from keras_dist.logging import logger

    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger().addHandler(handler)
    try:
        yield found
    finally:
        logger().removeHandler(handler)


class Gan(keras.Model):
    """Two models, two optimizers, a custom `compile` and `train_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(FEATURES), mlp(1)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> Any:
        real, noise = data[:2]
        count = tf.shape(real)[0]
        both = tf.concat([self.generator(noise), real], 0)
        labels = tf.concat([tf.ones([count, 1]), tf.zeros([count, 1])], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        descend(tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros([count, 1]), self.discriminator(self.generator(noise)))
        descend(tape, g_loss, self.generator, self.g_optimizer)
        return self.logs(d_loss, g_loss, count)

    def logs(self, d_loss: Any, g_loss: Any, count: Any) -> Any:
        self.d_loss.update_state(d_loss, sample_weight=count)
        self.g_loss.update_state(g_loss, sample_weight=count)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def compiled_gan(gan: Gan) -> Gan:
    gan.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), keras.losses.BinaryCrossentropy(True))
    return gan


def compiled_functions() -> set[str]:
    """Returns the names of all traced functions that XLA must compile: TensorFlow runs them in no other way."""
    compiled = set()
    for name in context.context().list_function_names():
        with contextlib.suppress(tf.errors.NotFoundError):  # Python has dropped it since
            if context.context().get_function_def(name).attr["_XlaMustCompile"].b:
                compiled.add(name)
    return compiled


# --- What `size` ranks compute, in one process ---


def _average(statistics: Sequence[Any], counts: Sequence[Any] | None = None) -> Any:
    return [np.average(values, axis=0, weights=counts) for values in zip(*statistics, strict=True)]


def trained_on_shares(
    model: keras.Model,
    loss: Callable[[Any, Any], Any],
    data: tuple[np.ndarray, np.ndarray],
    size: int,
    epochs: int = 2,
    seed_offset: int = 0,
    processes: int | None = None,
    wire: Any = None,
) -> dict[str, Any]:
    """Trains on the sum of the gradients of the shares' weighted losses, and averages their statistics.

    Each rank has its own random stream and its own statistics (BatchNormalization), which are averaged after
    each epoch; within a process after each step, by the number of examples.

    Args:
        model: Compiled, with its optimizer.
        loss: A mean over examples, of `y` and the model's prediction.
        data: x and y.
        size: Number of ranks, or of replicas.
        epochs: Number of epochs.
        seed_offset: Difference between the seeds of consecutive ranks.
        processes: Number of processes, each with as many of the replicas; `None`: each replica has its own.
        wire: To which type the gradients of a share are rounded, and their sum.
    """
    x, y = data

    @tf.function(reduce_retracing=True)  # in 16 bits, fused operations round less often
    def gradients_of(x: Any, y: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            value *= tf.cast(weight, value.dtype)
        return tape.gradient(value, [v.value for v in model.trainable_variables])

    seeds = [layer.seed_generator.state for layer in model.layers if hasattr(layer, "seed_generator")]
    collected = [v for v in model.non_trainable_variables if not any(v is seed for seed in seeds)]
    statistics = [_values(collected) for _ in range(size)]
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            batch = x[start : start + BATCH], y[start : start + BATCH]
            _step_on_shares(model, gradients_of, batch, collected, statistics, seeds, seed_offset, wire)
            counts = [-np.subtract(*share_bounds(len(batch[0]), rank, size)) for rank in range(size)]
            replicas = size // (processes or size)
            for first in range(0, size, replicas):
                own = slice(first, first + replicas)
                if sum(counts[own]):
                    statistics[own] = [_average(statistics[own], counts[own])] * replicas
        statistics = [_average(statistics)] * size
    _assign(collected, statistics[0])
    return {"weights": model.get_weights()}


def _step_on_shares(
    model: keras.Model, gradients_of: Any, batch: Any, collected: Any, statistics: Any, seeds: Any, seed_offset: int,
    wire: Any,
) -> None:  # fmt: skip
    """Updates the `statistics` of each rank in place. An empty share does not change them."""
    (x, y), size, variables = batch, len(statistics), model.trainable_variables
    gradients = [np.zeros(v.shape, "float64") for v in variables]
    seeds_before = _values(seeds)
    for rank in range(size):
        start, stop = share_bounds(len(x), rank, size)
        if start == stop:
            continue
        _assign(collected, statistics[rank])
        _assign(seeds, [_shifted(value, rank * seed_offset) for value in seeds_before])
        weight = tf.constant((stop - start) / len(x), tf.float64)
        for index, gradient in enumerate(gradients_of(tf.constant(x[start:stop]), tf.constant(y[start:stop]), weight)):
            gradients[index] = gradients[index] + _rounded(gradient, wire)
        statistics[rank] = _values(collected)
        seeds_after = [_shifted(value, -rank * seed_offset) for value in _values(seeds)]
    _assign(seeds, seeds_after)
    sums = [tf.constant(_rounded(sum_, wire), v.dtype) for sum_, v in zip(gradients, variables, strict=True)]
    model.optimizer.apply(sums, variables)


def _rounded(gradient: Any, wire: Any) -> np.ndarray:
    return np.asarray(gradient if wire is None else tf.cast(gradient, wire), "float64")


def _shifted(seed: np.ndarray, offset: int) -> np.ndarray:
    return (seed.astype("int64") + [offset, 0]).astype(seed.dtype)


def _values(variables: Any) -> list[np.ndarray]:
    return [np.array(variable.value) for variable in variables]


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
