"""Sources of data: files, generators, PyDatasets, tensors of every kind."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd
from tests.contract.harness import FLOAT64, Numbers, contract, same
from tests.contract.parts import BATCH, COUNT, FEATURES, Linear, batches, compiled, dataset, fitted, mlp, numbers, used

# --- Files ---


def written(names: list[str]) -> list[str]:
    """Writes `numbers` as TFRecord files, on the chief only, and waits for them."""
    if kd.is_chief():
        x, y = numbers()
        for name, rows in zip(names, np.array_split(np.arange(COUNT), len(names)), strict=True):
            with tf.io.TFRecordWriter(name) as writer:
                for row in rows:
                    writer.write(np.concatenate([x[row], y[row]]).tobytes())
    kd.barrier()
    return names


def parsed(record: Any) -> tuple[Any, Any]:
    values = tf.ensure_shape(tf.io.decode_raw(record, "float64"), [FEATURES + 1])
    return values[:FEATURES], values[FEATURES:]


contract("data-tfrecord", covered_by=("input-own-share", "together-data"))(
    lambda distribute: fitted(
        compiled(distribute),
        tf.data.TFRecordDataset(written(["all.tfrecord"])).map(parsed).shuffle(COUNT).batch(BATCH),
    )
)


@contract("data-tfrecord-interleaved", covered_by=("input-own-share", "commit-pydataset"))
def test_tfrecord_interleaved(distribute: Any) -> Numbers:
    files = tf.data.Dataset.from_tensor_slices(written([f"{index}.tfrecord" for index in range(4)]))
    data = files.interleave(tf.data.TFRecordDataset, 2, 3, num_parallel_calls=2, deterministic=True)
    return fitted(compiled(distribute), data.map(parsed, num_parallel_calls=2).batch(BATCH))


class RootMean(keras.Model):
    """A loss of the whole batch, and a metric that counts one number for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tracker = mlp(), keras.metrics.Mean("root")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        loss = tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))
        self.tracker.update_state(loss)
        return loss


@contract(
    "data-unknown-length", covered_by=("data-generator", "optimizer-unknown-length"),
    of=("horovod", "multi_worker", "mirrored", "central_storage"),
)  # fmt: skip
def test_unknown_length(distribute: Any) -> Numbers:
    """The numbers are those for data of a known length. Plain Keras counts once more at the end of others."""
    model = distribute(RootMean())
    model.compile(keras.optimizers.SGD(0.1))
    data = dataset(24)
    return fitted(model, data if distribute is same else data.filter(lambda *example: True), shuffle=False)


# --- Python generators ---


def forever() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from batches()


# A finite generator, for one epoch.
contract("data-generator", also=("mirrored-2", "parameter_server-2"))(
    lambda distribute: fitted(compiled(distribute, metrics=["mae"]), batches(), epochs=1)
)


@contract("data-generator-infinite", covered_by=("data-generator",))
def test_generator_infinite(distribute: Any) -> Numbers:
    model = compiled(distribute)
    first = fitted(model, forever(), epochs=3, steps_per_epoch=3)
    return {"first": first, "second": fitted(model, forever(), epochs=1, steps_per_epoch=2)}


@contract("data-generator-validation", covered_by=("data-generator",))
def test_generator_validation(distribute: Any) -> Numbers:
    """Training data are arrays; validation, `evaluate` and `predict` read generators.

    Keras prefetches from an infinite generator and drops what validation leaves, so all its batches are the same.
    """
    model = compiled(distribute, metrics=["mae"])
    same_again = (batch for batch in itertools.cycle(batches(5)))
    result = fitted(model, *numbers(), validation_data=same_again, validation_steps=2)
    predicted = model.predict(((x,) for x, _ in batches()), verbose=0)
    return {**result, "evaluated": model.evaluate(batches(11, 3), verbose=0), "predictions": predicted}


class Noted:
    """A generator of random batches, different on every rank, that records its batches."""

    def __init__(self) -> None:
        self.given: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng()
        for _ in range(steps):
            x = random.normal(size=(5, FEATURES))
            self.given.append((x, x[:, :1] ** 2))
            yield self.given[-1]


def all_trained_as_the_chief_alone(results: list[Numbers], golden: Numbers, size: int) -> None:
    """Every rank has the weights that one process gets from the chief's data."""
    for result in results:
        np.testing.assert_array_equal(result["own_weights"][0], results[0]["own_weights"][0])
        for weight, expected in zip(result["own_weights"], results[0]["own_alone"], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=FLOAT64, atol=FLOAT64)
    if len(results) > 1:
        assert not np.array_equal(results[0]["own_alone"][0], results[1]["own_alone"][0])


@contract("data-generator-unseeded", verify=all_trained_as_the_chief_alone, covered_by=("data-generator",))
def test_generator_unseeded(distribute: Any) -> Numbers:
    model, noted = compiled(distribute), Noted()
    alone = compiled(same)
    alone.set_weights(model.get_weights())
    # The chief still reads what `fit` reads after a callback's own call.
    predict = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: model.predict(numbers(5)[0], verbose=0))
    validation = {"validation_data": Noted()(2), "validation_steps": 2}
    result = fitted(model, noted(4), epochs=1, callbacks=[predict], **validation)
    for batch in noted.given or Noted()(4):
        alone.train_on_batch(*batch)
    return {"own_weights": result["weights"], "own_alone": alone.get_weights()}


# --- PyDataset ---


class Batches(keras.utils.PyDataset):
    """The batches of `numbers` or of others, views of two arrays."""

    def __init__(self, arrays: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = arrays or numbers()

    def __len__(self) -> int:
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


class InProcesses(Batches):
    """Returns NaN in the rank itself, which reads no more than the first batches, that Keras inspects."""

    def __init__(self, **options: Any) -> None:
        super().__init__(use_multiprocessing=True, **options)
        self.rank_process = os.getpid()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        is_child = os.getpid() != self.rank_process
        return (x, y) if is_child else (x * np.nan, y * np.nan)


class InSpawnedProcesses(InProcesses):
    """A spawned process imports the module again and, without a guard, calls `kd.init()`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            kd.init()
            self.outcome = f"one of {kd.size()}"
        except kd.ConfigurationError as error:
            self.outcome = str(error)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().__getitem__(index)
        outcome = getattr(self, "outcome", "")
        is_right = outcome == "one of 1" or "called in a child process of a rank" in outcome
        return x, y if is_right else y * np.nan


contract("data-pydataset", covered_by=("commit-pydataset", "input-own-share"))(
    lambda distribute: used(compiled(distribute, metrics=["mae"]), Batches(), validation_data=Batches())
)


class Views(Batches):
    """Full batches: views of one array, aligned to 64 bytes, which TensorFlow can use without a copy."""

    def __init__(self) -> None:
        super().__init__(aligned(array) for array in numbers(3 * BATCH))


def aligned(array: np.ndarray) -> np.ndarray:
    space = np.zeros(array.size + 8, array.dtype)
    start = -space.ctypes.data % 64 // array.itemsize
    copy = space[start : start + array.size].reshape(array.shape)
    copy[:] = array
    return copy


@contract("data-views", covered_by=("data-generator", "commit-pydataset"))
def test_views(distribute: Any) -> Numbers:
    """Under `MirroredStrategy` TensorFlow writes into such arrays (2.21)."""
    views = Views()
    result = fitted(compiled(distribute), views, shuffle=False)
    again = fitted(compiled(distribute), (views[index] for index in range(3)), epochs=1, steps_per_epoch=3)
    x, y = numbers(3 * BATCH)
    np.testing.assert_array_equal(views.x, x)
    np.testing.assert_array_equal(views.y, y)
    return {"dataset": result, "generator": again}


class Shuffled(Views):
    """Shuffles its own examples after each epoch, also after the one that `fit` ends before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.RandomState(3)

    def on_epoch_end(self) -> None:
        order = self.random.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


@contract("data-pydataset-fewer-steps", covered_by=("commit-pydataset",))
def test_pydataset_fewer_steps(distribute: Any) -> Numbers:
    """The next epoch reads on where the last one stopped, by then in another order, but for what was read ahead."""
    # Python reads ahead in a thread of its own, in plain Keras too: it has the time to do so.
    waits = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.05))
    return fitted(compiled(distribute), Shuffled(), steps_per_epoch=1, epochs=5, shuffle=False, callbacks=[waits])


contract("data-pydataset-2-workers", covered_by=("commit-pydataset",))(
    lambda distribute: fitted(compiled(distribute), Batches(workers=2))
)
contract("data-pydataset-fork", covered_by=("commit-pydataset",))(
    lambda distribute: in_processes("fork", lambda: fitted(compiled(distribute), InProcesses(workers=2)))
)
# `kd.init()` is refused in the spawned process.
contract("data-pydataset-spawn", covered_by=("commit-pydataset",))(
    lambda distribute: in_processes(
        "spawn", lambda: fitted(compiled(distribute), InSpawnedProcesses(workers=1), epochs=1)
    )
)


def in_processes(method: str, train: Callable[[], Numbers]) -> Numbers:
    """Makes Keras start its processes by `method`, and cleans up after them."""
    from keras.src.trainers.data_adapters import py_dataset_adapter as adapter

    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        result = train()
    finally:
        multiprocessing.set_start_method(before, force=True)
        # These two belong to one method, and the semaphore tracker lives as long as the rank. The threads of Keras's
        # pool end shortly after its processes. A semaphore that is freed with them would start another tracker.
        adapter._WORKER_ID_QUEUE = adapter._SEQUENCE_COUNTER = None
        for thread in threading.enumerate():
            if "(_handle_" in thread.name:
                thread.join()
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    assert np.isfinite(result["history"]["loss"]).all()
    return result


# --- Tensors of every kind ---


class RowMeans(Linear):
    """A mean over ragged rows: padding would couple the examples of a batch."""

    def call(self, x: Any) -> Any:
        return self.dense(tf.stack([tf.reduce_mean(x, axis=1), tf.reduce_max(x, axis=1)], axis=1))


def ragged() -> tf.data.Dataset:
    values = np.random.RandomState(3).normal(size=100)
    lengths = [1 + (7 * row) % 6 for row in range(COUNT)]
    rows = tf.RaggedTensor.from_row_lengths(values[: sum(lengths)], lengths)
    return tf.data.Dataset.from_tensor_slices((rows, numbers()[1]))


contract("data-ragged")(lambda distribute: used(compiled(distribute, model=RowMeans()), ragged().batch(BATCH)))


def thinned() -> np.ndarray:
    x = numbers()[0]
    return np.where(x > 0, x, 0)


def sparse_model() -> keras.Model:
    inputs = keras.Input([FEATURES], sparse=True)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(inputs)))


class Bag(keras.layers.Layer):
    """The mean of the rows of several ids, as a recommender has it."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(9, 3), initializer=keras.initializers.RandomNormal(seed=3), name="table")

    def call(self, ids: Any) -> Any:
        return tf.nn.embedding_lookup_sparse(tf.convert_to_tensor(self.table), tf.sparse.from_dense(ids), None)


def trained_bag(distribute: Any) -> Numbers:
    x, y = numbers()
    inputs = keras.Input([3], dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(Bag()(inputs)))
    return fitted(compiled(distribute, keras.optimizers.Adam(0.01), model=model), 1 + (x[:, :3] > 0) * np.arange(3), y)


def sparse_data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(thinned()), numbers()[1])).batch(BATCH)


@contract("data-sparse")
def test_sparse(distribute: Any) -> Numbers:
    model = compiled(distribute, keras.optimizers.Adam(0.01), model=sparse_model())  # it squares rows
    return {**used(model, sparse_data()), "bag": trained_bag(distribute)}


# An eager tensor does not tell that it has each index once.
@contract("data-sparse-eagerly", also=("mirrored-2",), covered_by=("data-sparse", "fit-embedding-eagerly"))
def test_sparse_eagerly(distribute: Any) -> Numbers:
    model = compiled(distribute, keras.optimizers.Adam(0.01), model=sparse_model(), run_eagerly=True)
    return fitted(model, sparse_data())


@contract("data-scipy-sparse", covered_by=("data-ragged", "data-sparse"))
def test_scipy_sparse(distribute: Any) -> Numbers:
    import scipy.sparse

    model = compiled(distribute, keras.optimizers.Adam(0.01, clipnorm=0.1), model=sparse_model())
    return fitted(model, scipy.sparse.csr_matrix(thinned()), numbers()[1], batch_size=BATCH, shuffle=False)


@contract("data-without-targets", covered_by=("fit-float64", "predict"))
def test_without_targets(distribute: Any) -> Numbers:
    class ToItself(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(tf.reduce_mean(tf.square(x)))
            return x

    x, _ = numbers()
    model = compiled(distribute, loss=None, model=keras.Sequential([mlp(), ToItself()]))
    data = tf.data.Dataset.from_tensor_slices((x,)).batch(BATCH)
    empty = ((rows, None, None) for rows, _ in batches())
    by_data, by_array = fitted(model, data), fitted(model, x, None)
    return {"dataset": by_data, "array": by_array, "generator": fitted(model, empty, epochs=1)}


@contract("data-small-dtypes", covered_by=("together-data",))
def test_small_dtypes(distribute: Any) -> Numbers:
    def narrow(x: Any) -> tuple[Any, ...]:
        return x[:, :1] > 0, (50 * np.abs(x[:, 1:3])).astype("uint8"), x[:, 3:].astype("float16")

    class Widened(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.concatenate([keras.ops.cast(part, "float64") / 50 for part in inputs], axis=1)

    dtypes = [(1, "bool"), (2, "uint8"), (1, "float16")]
    inputs = tuple(keras.Input([width], dtype=dtype) for width, dtype in dtypes)
    model = compiled(distribute, model=keras.Model(inputs, keras.layers.Dense(1)(Widened(autocast=False)(inputs))))
    x, y = numbers()
    data = tf.data.Dataset.from_tensor_slices((narrow(x), y)).batch(BATCH)
    by_data = fitted(model, data)
    return {"dataset": by_data, "generator": fitted(model, ((narrow(x), y) for x, y in batches()), epochs=1)}
