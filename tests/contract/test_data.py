"""Every source and size of data: the same numbers, every example once."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.contract.harness import FLOAT32, Numbers, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    classes,
    compiled,
    dataset,
    fitted,
    float64,
    mlp,
    numbers,
    predictions,
)  # fmt: skip


@contract("data-numpy", sizes=(3, 4))
def test_numpy(distribute: Any) -> Numbers:
    """`fit` shuffles arrays by default, without a seed."""
    float64()
    return fitted(compiled(distribute), *numbers())


@contract("data-numpy-unshuffled", covered_by=("data-numpy", "data-tf-batched"))
def test_numpy_unshuffled(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), *numbers(), shuffle=False)


@contract("data-tensors", covered_by=("data-numpy",))
def test_tensors(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), *map(tf.constant, numbers()), batch_size=BATCH)


@contract("data-tf-batched", sizes=(3, 4))
def test_tf_batched(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), dataset())


@contract("data-tf-shuffled-unseeded", sizes=(3,), also=("serial-1",), covered_by=("together-data",))
def test_tf_shuffled_unseeded(distribute: Any) -> Numbers:
    float64()
    data = tf.data.Dataset.from_tensor_slices(numbers()).shuffle(COUNT).batch(BATCH)
    return fitted(compiled(distribute), data, epochs=3)


def noise(x: Any, y: Any) -> Any:
    """Adds a column of random numbers, which nobody learns from."""
    shape = tf.concat([tf.shape(x)[:-1], [1]], 0)
    return tf.concat([x, tf.cast(tf.random.uniform(shape), x.dtype)], -1), y


def without_noise() -> keras.Model:
    inputs = keras.Input([FEATURES + 1])
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, "tanh")(inputs[:, :FEATURES])))


@contract("data-augmented", covered_by=("input-random-map",))
def test_augmented(distribute: Any) -> Numbers:
    """Of several elements at a time: nobody knows which random numbers each gets."""
    float64()
    layer = keras.layers.GaussianNoise(0.1)
    examples = tf.data.Dataset.from_tensor_slices(numbers()).shuffle(COUNT, seed=5)
    datasets = {
        "examples": examples.map(noise, tf.data.AUTOTUNE).batch(BATCH).prefetch(1),
        "batches": examples.batch(BATCH).map(noise, tf.data.AUTOTUNE).prefetch(1),
        "before a shuffle": examples.map(noise, 2).shuffle(COUNT, seed=6).batch(BATCH),
        "by a layer": examples.map(noise).batch(BATCH).map(
            lambda x, y: (tf.concat([x[:, :FEATURES], layer(x, training=True)[:, FEATURES:]], -1), y), 2
        ),
        "in order": examples.map(noise).batch(BATCH),
        "in an interleave": tf.data.Dataset.range(3).interleave(
            lambda i: tf.data.Dataset.from_tensor_slices(numbers()).shard(3, i).map(noise), 2, num_parallel_calls=2
        ).batch(BATCH),
    }  # fmt: skip
    trained = {}
    for name, data in datasets.items():
        keras.utils.set_random_seed(1)
        trained[name] = fitted(compiled(distribute, model=without_noise()), data, epochs=1)
    return trained


@contract("data-tf-cached-prefetched", covered_by=("together-data",))
def test_tf_cached_prefetched(distribute: Any) -> Numbers:
    float64()
    data = tf.data.Dataset.from_tensor_slices(numbers()).cache().shuffle(COUNT).batch(BATCH).prefetch(2)
    return fitted(compiled(distribute), data)


@contract("data-tf-repeated-steps-per-epoch", covered_by=("data-tf-batched", "input-own-share"))
def test_tf_repeated_steps_per_epoch(distribute: Any) -> Numbers:
    """3 steps per epoch, 4 batches: epochs begin in the middle of the data."""
    float64()
    return fitted(compiled(distribute), dataset().repeat(), epochs=3, steps_per_epoch=3)


@contract("data-tf-steps-per-epoch-unrepeated", covered_by=("data-tf-batched", "input-own-share"))
def test_tf_steps_per_epoch_unrepeated(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), dataset(), epochs=2, steps_per_epoch=2)


@contract("data-tf-unknown-size", covered_by=("data-tf-batched", "commit-pydataset"))
def test_tf_unknown_size(distribute: Any) -> Numbers:
    float64()
    data = dataset().filter(lambda x, y: tf.shape(x)[0] > 1)
    return fitted(compiled(distribute), data)


@contract("data-last-batch-odd", sizes=(3, 4), also=("tpu-8",))
def test_last_batch_odd(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), *numbers(BATCH + 5))


@contract("data-first-batch-odd", covered_by=("data-last-batch-odd",))
def test_first_batch_odd(distribute: Any) -> Numbers:
    float64()
    data = dataset(5, 5).concatenate(dataset(16))
    return fitted(compiled(distribute), data)


@contract("data-last-batch-smaller-than-ranks", sizes=(3, 4))
def test_last_batch_smaller_than_ranks(distribute: Any) -> Numbers:
    """The mean of no examples is NaN. On a rank without examples it must not count."""
    float64()
    return fitted(compiled(distribute, metrics=["mae"]), *numbers(BATCH + 1), shuffle=False)


@contract("data-smaller-than-ranks", sizes=(3, 4), covered_by=("data-last-batch-smaller-than-ranks",))
def test_smaller_than_ranks(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, metrics=["mae"])
    result = fitted(model, *numbers(1), validation_data=numbers(1))
    return {**result, "predictions": predictions(model, numbers(1)[0])}


@contract("data-drop-remainder", covered_by=("data-last-batch-odd",))
def test_drop_remainder(distribute: Any) -> Numbers:
    """Static shapes: 24 of 25 examples are seen."""
    float64()
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(BATCH, drop_remainder=True)
    return fitted(compiled(distribute), data)


@contract("data-drop-remainder-odd-batch", covered_by=("data-last-batch-odd",))
def test_drop_remainder_odd_batch(distribute: Any) -> Numbers:
    """A static batch size of 5, which no number of ranks divides."""
    float64()
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(5, drop_remainder=True)
    return fitted(compiled(distribute), data)


@contract("data-validation-data", covered_by=("together-data",))
def test_validation_data(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute, metrics=["mae"]), *numbers(), validation_data=numbers(11))


@contract("data-validation-dataset", covered_by=("together-data", "evaluate"))
def test_validation_dataset(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, metrics=["mae"])
    return fitted(model, dataset(), epochs=4, validation_data=dataset(11, 3), validation_freq=2)


@contract("data-validation-split", covered_by=("together-data",))
def test_validation_split(distribute: Any) -> Numbers:
    float64()
    return fitted(compiled(distribute), *numbers(), validation_split=0.3)


@contract("data-dict-inputs", covered_by=("together-data",))
def test_dict_inputs(distribute: Any) -> Numbers:
    float64()
    left, right = keras.Input([2], name="left"), keras.Input([2], name="right")
    both = keras.layers.Concatenate()([left, right])
    outputs = {"value": keras.layers.Dense(1, name="value")(both)}
    model = compiled(distribute, model=keras.Model({"left": left, "right": right}, outputs))
    x, y = numbers()
    inputs = {"left": x[:, :2], "right": x[:, 2:]}
    result = fitted(model, inputs, {"value": y}, batch_size=BATCH)
    return {**result, "predictions": predictions(model, inputs)}


@contract("data-tuple-inputs", covered_by=("together-data",))
def test_tuple_inputs(distribute: Any) -> Numbers:
    float64()
    left, right = keras.Input([2]), keras.Input([2])
    model = keras.Model((left, right), keras.layers.Dense(1)(keras.layers.Concatenate()([left, right])))
    x, y = numbers()
    data = tf.data.Dataset.from_tensor_slices(((x[:, :2], x[:, 2:]), y)).batch(BATCH)
    return fitted(compiled(distribute, model=model), data)


@contract("data-sample-weight", sizes=(3,), covered_by=("together-data", "together-losses"))
def test_sample_weight(distribute: Any) -> Numbers:
    """Keras divides by the number of examples. The loss and the weighted metrics use the weights."""
    float64()
    model = compiled(distribute, metrics=["mae"], weighted_metrics=["mse"])
    weights = np.linspace(0, 2, COUNT)
    return fitted(model, *numbers(), sample_weight=weights)


@contract("data-class-weight", covered_by=("loss-class-weight", "together-data"))
def test_class_weight(distribute: Any) -> Numbers:
    float64()
    model = compiled(distribute, loss="sparse_categorical_crossentropy", model=mlp(3, "softmax"))
    return fitted(model, *classes(), class_weight={0: 1.0, 1: 3.0, 2: 0.5})


@contract("data-integers-and-strings", covered_by=("together-data",))
def test_integers_and_strings(distribute: Any) -> Numbers:
    float64()
    words = np.asarray(["a", "b", "c", "d", "e"] * 5)
    model = keras.Sequential([keras.layers.Embedding(6, 2), keras.layers.Flatten(), keras.layers.Dense(1)])
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "e"])
    data = tf.data.Dataset.from_tensor_slices((words[:, None], numbers()[1])).batch(BATCH)
    return fitted(compiled(distribute, model=model), data.map(lambda x, y: (lookup(x), y)))


def averaged_words() -> keras.Model:
    """A model that takes padding for a word: its width is that of the longest text of the whole batch."""
    layers = keras.layers
    texts = keras.Input([1], dtype="string")
    words = layers.TextVectorization(vocabulary=["a", "b", "c"])(texts)
    return keras.Model(texts, layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Embedding(5, 3)(words))))


# Texts don't go to a TPU: there they are looked up in the dataset.
@contract(
    "data-padded-texts", sizes=(3,),
    of=("serial", "horovod", "multi_worker", "mirrored", "central_storage", "parameter_server"),
)  # fmt: skip
def test_padded_texts(distribute: Any) -> Numbers:
    float64()
    texts, y = tf.constant([["a b c " * (index % 5 + 1)] for index in range(21)]), numbers(21)[1]
    found = fitted(model := compiled(distribute, model=averaged_words(), metrics=["mae"]), texts, y)
    evaluated = model.evaluate(texts, y, batch_size=BATCH, verbose=0)
    return {**found, "evaluated": evaluated, "predicted": predictions(model, texts)}


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


class NotingModel(keras.Sequential):
    """Records the labels that `train_step` gets on this rank."""

    def note(self, labels: Any) -> None:
        self.noted.extend(np.ravel(labels).tolist())

    def train_step(self, data: Any) -> Any:
        tf.py_function(self.note, [data[1]], [])
        return super().train_step(data)


def seen(distribute: Any, make_data: Any, count: int, epochs: int = 2) -> Numbers:
    model = NotingModel([keras.Input([1]), keras.layers.Dense(1)])
    # Bypasses Keras's tracking, which would wrap the list.
    object.__setattr__(model, "noted", [])
    metric = TimesSeen(count)
    compiled(distribute, keras.optimizers.SGD(1e-4), model=model, metrics=[metric])
    indices = np.arange(count, dtype="float32")[:, None]
    history = model.fit(*make_data(indices), epochs=epochs, verbose=0)
    return {
        "unlike_once": history.history["unlike_once"],
        "times": metric.times.value,
        "own_noted": np.asarray(model.noted),
    }


def every_example_once(results: list[Numbers], golden: Numbers, size: int) -> None:
    """The ranks' shares of two epochs together are the dataset twice, without the reduction of metrics."""
    assert results[0]["unlike_once"] == [0.0, 0.0]
    noted = np.sort(np.concatenate([result["own_noted"] for result in results]))
    np.testing.assert_array_equal(noted, np.sort(golden["own_noted"]))
    np.testing.assert_array_equal(noted, np.repeat(np.arange(len(noted) // 2), 2))
    assert min(len(result["own_noted"]) for result in results) > len(noted) // (2 * size)


@contract(
    "once-numpy", tolerance=FLOAT32, sizes=(3, 4), verify=every_example_once,
    covered_by=("data-numpy", "once-small-batches"),
)  # fmt: skip
def test_once_numpy(distribute: Any) -> Numbers:
    """32 examples in batches of 9: the last one has 5."""

    def data(indices: Any) -> Any:
        return indices, indices, 9

    return seen(distribute, data, 32)


@contract(
    "once-tf-shuffled",
    tolerance=FLOAT32,
    verify=every_example_once,
    covered_by=("together-data", "once-small-batches"),
)
def test_once_tf_shuffled(distribute: Any) -> Numbers:
    def data(indices: Any) -> Any:
        return (tf.data.Dataset.from_tensor_slices((indices, indices)).shuffle(50).batch(7),)

    return seen(distribute, data, 33)


@contract("once-small-batches", tolerance=FLOAT32, sizes=(3, 4), also=("serial-1",))
def test_once_small_batches(distribute: Any) -> Numbers:
    """Batches of 1 and 2 are smaller than the number of ranks. Ranks without a share see a placeholder."""
    float32 = np.arange(9, dtype="float32")[:, None]
    metric = TimesSeen(9)
    model = compiled(distribute, model=keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]), metrics=[metric])
    model.optimizer.learning_rate = 1e-4
    data = tf.data.Dataset.from_tensor_slices((float32, float32))
    result = fitted(model, data.take(3).batch(1).concatenate(data.skip(3).batch(2)))
    return {**result, "times": metric.times.value}
