"""Every source and size of data: the same numbers, every example once."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.contract.harness import FLOAT32, NOT_TPU, Numbers, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    Distribute,
    Linear,
    compiled,
    dataset,
    examples,
    fitted,
    numbers,
    of_words,
    outcome,
    stack,
    used,
)
from tests.contract.test_losses import weights


def add(row: str, data: Any, covered_by: Sequence[str] = (), fit: Any = None, **options: Any) -> None:
    """Declares a row by its data, a function that returns arrays or a dataset, and by arguments of `fit`."""

    def case(distribute: Distribute) -> Numbers:
        found = data()
        return fitted(compiled(distribute), *(found if isinstance(found, tuple) else [found]), **(fit or {}))

    contract(row, covered_by=covered_by, **options)(lambda distribute: case(distribute))


READS = ("fit-steps-per-execution-not-dividing", "input-own-share")
# `fit` shuffles arrays by default, without a seed.
add("data-numpy", numbers, ("fit-float64",), sizes=(3, 4))
add("data-numpy-unshuffled", numbers, ("fit-float64", "fit-embedding-eagerly"), {"shuffle": False})
add("data-tensors", lambda: (*map(tf.constant, numbers()),), ("fit-float64",), {"batch_size": BATCH})
add("data-tf-batched", dataset, READS, sizes=(3, 4))
add("data-tf-shuffled-unseeded", lambda: examples().shuffle(COUNT).batch(BATCH), ("together-data",), {"epochs": 3},
    sizes=(3,))  # fmt: skip
add("data-tf-cached-prefetched", lambda: examples().cache().shuffle(COUNT).batch(BATCH).prefetch(2), ("together-data",))
# 3 steps per epoch, 4 batches: epochs begin in the middle of the data.
add("data-tf-repeated-steps-per-epoch", lambda: dataset().repeat(), READS, {"epochs": 3, "steps_per_epoch": 3})


@contract("data-tf-repeated-several-fits", of=NOT_TPU, also=("mirrored-2",))
def test_repeated_several_fits(distribute: Distribute) -> Numbers:
    """All ranks read one batch ahead, as plain Keras does. A second one would begin to shuffle, for the next call."""
    data, model = examples(20).shuffle(20, seed=5).repeat().batch(BATCH).prefetch(1), compiled(distribute)
    plans = ((1, 1), (2, 3), (1, 6), (1, 2))
    return {str(plan): fitted(model, data, epochs=plan[0], steps_per_epoch=plan[1]) for plan in plans}


add("data-tf-steps-per-epoch-unrepeated", dataset, READS, {"steps_per_epoch": 2})
add("data-tf-unknown-size", lambda: dataset().filter(lambda x, y: tf.shape(x)[0] > 1),
    (*READS, "commit-pydataset"))  # fmt: skip
ODD = ("loss-of-the-model",)  # of 21 examples
add("data-last-batch-odd", lambda: numbers(BATCH + 5), ODD, sizes=(3, 4), also=("tpu-8",))
add("data-first-batch-odd", lambda: dataset(5, 5).concatenate(dataset(16)), ODD)
# Static shapes: 24 of 25 examples are seen.
add("data-drop-remainder", lambda: examples().batch(BATCH, drop_remainder=True), ODD)
# A static batch size of 5, which no number of ranks divides.
add("data-drop-remainder-odd-batch", lambda: examples().batch(5, drop_remainder=True), ODD)
add("data-validation-split", numbers, ("together-data",), {"validation_split": 0.3})
# The mean of no examples is NaN. On a rank without examples it must not count.
contract("data-last-batch-smaller-than-ranks", sizes=(3, 4), covered_by=("fit-float64", "evaluate"))(
    lambda distribute: fitted(compiled(distribute, metrics=["mae"]), *numbers(BATCH + 1), shuffle=False)
)
contract("data-validation-dataset", covered_by=("together-data", "evaluate"))(
    lambda distribute: fitted(
        compiled(distribute, metrics=["mae"]), dataset(), epochs=4, validation_data=dataset(11, 3), validation_freq=2
    )
)
contract("data-smaller-than-ranks", sizes=(3, 4), covered_by=("fit-float64", "once-small-batches"))(
    lambda distribute: used(compiled(distribute, metrics=["mae"]), *numbers(1), validation_data=numbers(1))
)


def noise(x: Any, y: Any) -> Any:
    """Adds a column of random numbers, which nobody learns from."""
    shape = tf.concat([tf.shape(x)[:-1], [1]], 0)
    return tf.concat([x, tf.cast(tf.random.uniform(shape), x.dtype)], -1), y


def without_noise() -> keras.Model:
    inputs = keras.Input([FEATURES + 1])
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(6, "tanh")(inputs[:, :FEATURES])))


@contract("data-augmented", covered_by=("input-random-map",))
def test_augmented(distribute: Any) -> Numbers:
    """Of several elements at a time: nobody knows which random numbers each gets."""
    layer = layers.GaussianNoise(0.1)
    shuffled = examples().shuffle(COUNT, seed=5)

    def by_layer(x: Any, y: Any) -> Any:
        return tf.concat([x[:, :FEATURES], layer(x, training=True)[:, FEATURES:]], -1), y

    datasets = {
        "examples": shuffled.map(noise, tf.data.AUTOTUNE).batch(BATCH).prefetch(1),
        "batches": shuffled.batch(BATCH).map(noise, tf.data.AUTOTUNE).prefetch(1),
        "before a shuffle": shuffled.map(noise, 2).shuffle(COUNT, seed=6).batch(BATCH),
        "by a layer": shuffled.map(noise).batch(BATCH).map(by_layer, 2),
        "in order": shuffled.map(noise).batch(BATCH),
        "in an interleave": tf.data.Dataset.range(3).interleave(
            lambda i: examples().shard(3, i).map(noise), 2, num_parallel_calls=2
        ).batch(BATCH),
    }  # fmt: skip
    trained = {}
    for name, data in datasets.items():
        keras.utils.set_random_seed(1)
        trained[name] = fitted(compiled(distribute, model=without_noise()), data, epochs=1)
    return trained


@contract("data-tuple-inputs", covered_by=("together-data",))
def test_tuple_inputs(distribute: Any) -> Numbers:
    left, right = keras.Input([2]), keras.Input([2])
    model = keras.Model((left, right), layers.Dense(1)(layers.Concatenate()([left, right])))
    x, y = numbers()
    data = tf.data.Dataset.from_tensor_slices(((x[:, :2], x[:, 2:]), y)).batch(BATCH)
    return fitted(compiled(distribute, model=model), data)


# Keras divides by the number of examples. The loss and the weighted metrics use the weights.
contract("data-sample-weight", sizes=(3,), covered_by=("together-data", "together-losses"))(
    lambda distribute: fitted(
        compiled(distribute, metrics=["mae"], weighted_metrics=["mse"]), *numbers(),
        sample_weight=np.linspace(0, 2, COUNT),
    )
)  # fmt: skip


def averaged_words() -> keras.Model:
    """A model that takes padding for a word: its width is that of the longest text of the whole batch."""
    layers = keras.layers
    texts = keras.Input([1], dtype="string")
    words = layers.TextVectorization(vocabulary=["a", "b", "c"])(texts)
    return keras.Model(texts, layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Embedding(5, 3)(words))))


# Texts don't go to a TPU: there they are looked up in the dataset.
@contract("data-padded-texts", sizes=(3,), of=NOT_TPU)
def test_padded_texts(distribute: Any) -> Numbers:
    texts, y = tf.constant([["a b c " * (index % 5 + 1)] for index in range(21)]), numbers(21)[1]
    return used(compiled(distribute, model=averaged_words(), metrics=["mae"]), texts, y)


@contract("together-data", of=NOT_TPU)
def test_together_data(distribute: Distribute) -> Numbers:
    x, y = numbers()
    words = np.array(["a", "b", "c", "d", "e"])[np.arange(COUNT) * 3 % 5]
    model = compiled(distribute, model=of_words(["a", "b", "c"]), weighted_metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices(({"x": x, "word": words}, y, weights()))
    validation = data.take(13).batch(5)
    result = fitted(model, data.shuffle(COUNT).batch(BATCH).prefetch(2), epochs=4, validation_data=validation,
                    validation_freq=2)  # fmt: skip
    return {**result, "evaluation": model.evaluate(validation, verbose=0)}


# --- Every example once ---


@keras.saving.register_keras_serializable("contract")
class TimesSeen(keras.metrics.Metric):
    """Counts how often each example was seen in an epoch: its label is its index."""

    def __init__(self, count: int, name: str = "unlike_once") -> None:
        super().__init__(name=name)
        self.times = self.add_variable([count], "zeros", name="times")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        indices = tf.cast(tf.reshape(y_true, [-1]), "int32")
        self.times.assign_add(tf.reduce_sum(tf.one_hot(indices, self.times.shape[0], dtype=self.dtype), 0))

    def result(self) -> Any:
        return tf.reduce_sum(tf.abs(self.times - 1))


@contract("once-small-batches", float32=True, tolerance=FLOAT32, sizes=(3, 4))
def test_once_small_batches(distribute: Any) -> Numbers:
    """Batches of 1, 0 and 2 rows are smaller than the number of ranks. Ranks without a share see a placeholder."""
    indices, metric = np.arange(9, dtype="float32")[:, None], TimesSeen(9)
    model = compiled(distribute, keras.optimizers.SGD(1e-4), model=stack(layers.Dense(1), shape=[1]), metrics=[metric])
    data = tf.data.Dataset.from_tensor_slices((indices, indices))
    empty = data.batch(9).map(lambda x, y: (x[:0], y[:0]))
    result = fitted(model, data.take(3).batch(1).concatenate(empty).concatenate(data.skip(3).batch(2)))
    return {**result, "times": metric.times.value}


# --- Batches whose tensors have different lengths: nobody knows which rows belong together, so they are not cut ---


class Graphs(Linear):
    """Sums over the neighbors of each node. Its edges are numbers of nodes of the batch."""

    def call(self, inputs: Any) -> Any:
        edges, nodes = inputs["edges"], inputs["nodes"]
        sums = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
        return self.dense(nodes + sums)


@contract("data-other-lengths", covered_by=("data-ragged", *ODD))
def test_other_lengths(distribute: Distribute) -> Numbers:
    """Edges and nodes of graphs, the shorter ones first; predictions, and single batches."""
    x, y = numbers(18)
    edges = [[0, 5], [5, 1]], [[3, 2], [2, 4], [4, 0], [5, 5], [0, 1], [1, 2], [5, 0]], [[1, 0]]
    batches = [
        ({"edges": np.asarray(edges[index]), "nodes": x[6 * index : 6 * index + 6]}, y[6 * index : 6 * index + 6])
        for index in range(3)
    ]
    spec = {"edges": tf.TensorSpec([None, 2], "int64"), "nodes": tf.TensorSpec([None, FEATURES], x.dtype)}
    spec = spec, tf.TensorSpec([None, 1], y.dtype)
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    model = compiled(distribute, model=Graphs(), metrics=["mae"])
    history = fitted(model, data, validation_data=data)["history"]
    results = {"evaluate": model.evaluate(data, verbose=0), "predict": model.predict(data, verbose=0)}
    return {**outcome(model, history), **results, "on_batch": model.train_on_batch(*batches[0])}
