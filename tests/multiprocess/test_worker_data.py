"""Data that workers read: each example once, by whom; the numbers of one process; what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.backends.parameter_server import engine
from keras_dist.testing import WorkerError, WorkerPool
from tests.multiprocess.test_parameter_server import assert_same_numbers, in_mode

SECONDS = 120
EXAMPLES = 50
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def counting_model(distribute: Any, rate: float = 0.0, **options: Any) -> Any:
    """Returns a model, and a metric that counts which example came from which part, read by which process."""

    class Reads(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="reads", dtype="int64")
            zeros, add = keras.initializers.Zeros(), self.add_variable
            self.counts = add([EXAMPLES, 2], zeros, "int64", aggregation="sum", name="counts")
            self.readers = add([2], zeros, "int64", aggregation="sum", name="readers")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            example, part, reader = tf.unstack(tf.cast(y_true, "int64")[:, 1:], axis=1)
            where = tf.stack([example, part], 1)
            ones = tf.ones_like(example)
            self.counts.assign_add(tf.scatter_nd(where, ones, [EXAMPLES, 2]))
            self.readers.assign_add(tf.scatter_nd(part[:, None], reader, [2]))

        def result(self) -> Any:
            return tf.reduce_sum(self.counts.value)

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    reads = Reads()
    model = distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(rate), lambda y, p: (y[:, :1] - p) ** 2, metrics=[reads], **options)
    return model, reads


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns x, and y with the number of each example."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4))
    return x, np.stack([x.sum(axis=1), np.arange(EXAMPLES)], 1)


def own_part(context: Any) -> Any:
    """Reads two of three examples on worker 0, the third on worker 1, and notes who reads."""
    part = context.input_pipeline_id
    third = tf.data.Dataset.from_tensor_slices(examples()).enumerate()
    own = third.filter(lambda index, _: (index % 3 == 2) == (part == 1)).map(lambda _, example: example)

    def noted(x: Any, y: Any) -> Any:
        pid = tf.strings.split(tf.io.read_file("/proc/self/stat"))[0]
        return x, tf.concat([y, [float(part)], [tf.strings.to_number(pid, "float64")]], 0)

    return own.shuffle(20).map(noted).batch(4)


def counted(mode: str, max_staleness: int | None, together: int) -> dict[str, Any]:
    with in_mode(mode, max_staleness):
        model, reads = counting_model(kd.distribute, steps_per_execution=together)
        data = kd.shard(own_part)
        history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
        steps, trained = int(model.optimizer.iterations), np.array(reads.counts)
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
        x, y = examples()
        expected = np.mean((y[:, 0] - model.predict(x, verbose=0)[:, 0]) ** 2)
    return {
        "history": history, "evaluated": evaluated, "expected": expected, "steps": steps,
        "trained": trained, "counts": np.array(reads.counts), "readers": np.array(reads.readers),
    }  # fmt: skip


THIRDS = np.stack([np.arange(EXAMPLES) % 3 != 2, np.arange(EXAMPLES) % 3 == 2], 1).astype(int)


@pytest.mark.parametrize(
    ("mode", "bound", "together", "steps"),
    [("sync", None, 1, 9), ("async", None, 1, 13), ("async", 1, 1, 13), ("async", None, 6, 13), ("async", 5, 6, 13)],
)
def test_each_worker_reads_its_own_part_once(
    mode: str, bound: int | None, together: int, steps: int, pool: WorkerPool
) -> None:
    """At rate 0 the weights stay, so each epoch's loss is that of all examples: one lost or twice would show."""
    (result,) = pool.run(counted, mode, bound, together, timeout=SECONDS)
    for counts in (result["trained"], result["counts"]):
        np.testing.assert_array_equal(counts, THIRDS)
    for losses in (result["history"]["loss"], result["history"]["val_loss"], [result["evaluated"]["loss"]]):
        np.testing.assert_allclose(losses, result["expected"], rtol=1e-12)
    assert result["history"]["reads"] == [EXAMPLES, EXAMPLES]
    assert result["steps"] == 2 * steps
    readers = result["readers"] / THIRDS.sum(axis=0)  # if it was one process, the mean is its number
    assert len(set(readers)) == 2
    assert set(readers) < set(map(float, pool.pids[1:])), "read by others than the workers"


@pytest.mark.parametrize(("mode", "together"), [("sync", 1), ("async", 1), ("async", 4)])
def test_steps_per_epoch(mode: str, together: int, pool: WorkerPool) -> None:
    """Exactly so many steps an epoch, and the next one goes on where that has ended."""

    def stepped() -> Any:
        with in_mode(mode):
            model, reads = counting_model(kd.distribute, steps_per_execution=together)
            seen = []

            class Note(__import__("keras").callbacks.Callback):  # type: ignore[misc]
                def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                    seen.append((int(self.model.optimizer.iterations), np.array(reads.counts)))

            model.fit(kd.shard(own_part), epochs=2, steps_per_epoch=4, verbose=0, callbacks=[Note()])
            return seen

    ((first, second),) = pool.run(stepped, timeout=SECONDS)
    assert (first[0], second[0]) == (4, 8)
    counts = first[1] + second[1]
    assert counts.max() == 1
    assert counts.sum() == {"sync": (8 + 4) * 4, "async": 8 * 4}[mode]


def test_a_callback_stops_after_an_execution(pool: WorkerPool) -> None:
    """Those that were begun ahead are counted: two calls for each worker, which make two more executions."""

    def stopped() -> tuple[int, int]:
        """Returns how many steps were made, and how many examples counted, if a callback stops after one execution."""

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        with in_mode("async"):
            model, reads = counting_model(kd.distribute, steps_per_execution=4)
            data = kd.shard(lambda context: own_part(context).repeat())
            model.fit(data, steps_per_epoch=40, callbacks=[Stop()], verbose=0)
            return int(model.optimizer.iterations), int(tf.reduce_sum(reads.counts.value))

    ((steps, examples),) = pool.run(stopped, timeout=SECONDS)
    assert 4 <= steps <= 4 + 2 * 4
    assert 4 * steps - 4 <= examples <= 4 * steps  # the last batch of a part is of 2


def test_short_steps_are_put_into_one_call_unless_a_callback_looks_at_them(pool: WorkerPool) -> None:
    def counts() -> dict[str, list[int]]:
        """Returns the number of steps of each call."""

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                pass

        found, begin = {}, engine.AsyncEngine._begin
        for name, seconds, callbacks in (("short", 1e9, []), ("long", 0.0, []), ("looked at", 1e9, [Look()])):
            with (
                in_mode("async"), mock.patch.object(engine, "CALL_SECONDS", seconds),
                mock.patch.object(engine.AsyncEngine, "_begin", autospec=True, side_effect=begin) as begun,
            ):  # fmt: skip
                model, _ = counting_model(kd.distribute)
                data = kd.shard(lambda context: own_part(context).repeat())
                model.fit(data, steps_per_epoch=30, callbacks=callbacks, verbose=0)
                assert int(model.optimizer.iterations) == 30
            found[name] = [call.args[2].count for call in begun.call_args_list]
        return found

    (found,) = pool.run(counts, timeout=SECONDS)
    # The time of a step is known after the first call; each of two workers gets at most half of what is left.
    assert found["short"] == [1] * 4 + [8, 8, 5, 3, 1, 1]
    assert found["long"] == found["looked at"] == [1] * 30


def test_steps_of_one_call_have_the_numbers_of_one_process(pool: WorkerPool) -> None:
    def alone(distribute: bool) -> dict[str, Any]:
        """Trains on what one worker reads; the other one has no data. A batch in the middle has no examples."""
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)

        x, y = examples()
        y = y[:, :1]

        def read(context: Any) -> Any:
            def batch(index: Any) -> Any:
                rows = slice(4 * index, tf.where(tf.equal(index, 5), 4 * index, 4 * index + 4))
                return tf.constant(x)[rows], tf.constant(y)[rows]

            return tf.data.Dataset.range(13 * (1 - context.input_pipeline_id)).map(batch)

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        with in_mode("async") if distribute else contextlib.nullcontext():
            model = kd.distribute(model) if distribute else model
            together = 9 if distribute else 1
            model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"], steps_per_execution=together)
            if distribute:
                history = model.fit(kd.shard(read), epochs=2, verbose=0).history
            else:
                x, y = np.delete(x, np.s_[20:24], 0), np.delete(y, np.s_[20:24], 0)
                history = model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0).history
            assert int(model.optimizer.iterations) == 2 * 12
            return {"history": history, "weights": model.get_weights()}

    assert_same_numbers(pool, alone)


def test_sync_has_the_numbers_of_one_process(pool: WorkerPool) -> None:
    def sync_numbers(distribute: bool) -> dict[str, Any]:
        """Every worker reads the whole, and takes its share of each batch: the numbers of that whole.

        Where workers read unequal parts, the promised case "data-function" has the numbers.
        """
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        x, y = examples()
        y, weights = (y[:, :1] > 0).astype(float), np.linspace(0.5, 2, EXAMPLES)

        def batches() -> Any:
            data = tf.data.Dataset.from_tensor_slices((x, y, weights))
            return data.shuffle(EXAMPLES, seed=5, reshuffle_each_iteration=False).batch(7)

        def labels() -> Any:
            return tf.data.Dataset.from_tensor_slices((x, y[:, 0])).batch(8)

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model = kd.distribute(model, data="sharded") if distribute else model
        # The loss divides by the sum of the weights: the workers have to agree on it.
        loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.Adam(0.02, clipnorm=0.1), loss, weighted_metrics=["mae"], steps_per_execution=3)

        def read(make: Any) -> Any:
            return kd.shard(lambda context: kd.shard(make())) if distribute else make()

        whole, labelled = read(batches), read(labels)
        history = model.fit(whole, epochs=2, validation_data=whole, verbose=0).history
        model.compile(keras.optimizers.SGD(0.1), "mse")
        classes = model.fit(labelled, class_weight={0: 1.0, 1: 3.0}, verbose=0).history
        iterations = int(model.optimizer.iterations)
        return {"history": history, "classes": classes, "last": model.get_weights(), "iterations": iterations}

    assert_same_numbers(pool, sync_numbers)


@contextlib.contextmanager
def counted_shares(results: dict[str, Any]) -> Iterator[None]:
    """Counts how often a share is trained on."""
    submit = engine.SyncEngine._submit
    with mock.patch.object(engine.SyncEngine, "_submit", autospec=True, side_effect=submit) as calls:
        yield
    results["shares"] = sum(getattr(call.args[1], "__name__", "") == "train_share" for call in calls.call_args_list)


@pytest.mark.parametrize("reads", [False, True])
def test_what_depends_on_the_data_alone_takes_no_second_run(reads: bool, pool: WorkerPool) -> None:
    """The loss is divided by the sum of masked weights: each worker has another one."""

    def trained(distribute: bool) -> dict[str, Any]:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        words = np.random.RandomState(1).randint(0, 5, [32, 6]) * np.tri(32, 6, 1, dtype=int)
        parts = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.GRU(4, return_sequences=True)]

        def batches() -> Any:
            examples = words, np.sin(words)[..., None], np.linspace(0.5, 2.0, 32 * 6).reshape(32, 6)
            return tf.data.Dataset.from_tensor_slices(examples).batch(8)

        model = keras.Sequential([keras.Input([6], dtype="int32"), *parts, keras.layers.Dense(1)])
        model = kd.distribute(model) if distribute else model
        model.compile(keras.optimizers.SGD(0.5), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
        data = kd.shard(lambda context: kd.shard(batches())) if distribute and reads else batches()
        result: dict[str, Any] = {}
        with counted_shares(result):
            result["history"] = model.fit(data, epochs=2, verbose=0).history
        return {**result, "weights": model.get_weights(), "shares": result["shares"] if distribute else 2 * 4 * 2}

    assert_same_numbers(pool, trained)


def test_what_depends_on_what_was_told_takes_more_runs(pool: WorkerPool) -> None:
    """All of it depends on the data alone, but the sum of the weights on what the shares tell each other before."""

    def trained(distribute: bool) -> dict[str, Any]:
        class Normalizing(keras.Sequential):  # type: ignore[misc]
            def train_step(self, data: Any) -> Any:
                x, y, weights = data
                whole = kd.gather(weights) if distribute else weights
                return super().train_step((x, y, weights / tf.reduce_sum(whole)))

        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        model = Normalizing([keras.Input([4]), keras.layers.Dense(1)])
        model = kd.distribute(model) if distribute else model
        model.compile(keras.optimizers.SGD(0.5), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
        x, _ = examples()
        result: dict[str, Any] = {}
        with counted_shares(result):
            weights = np.linspace(0.1, 2.0, EXAMPLES)
            fit = model.fit(x, np.sin(x[:, :1]), 10, 2, 0, sample_weight=weights, shuffle=False)
        runs = result["shares"] if distribute else 2 * (5 * 2 * 2)
        return {"history": fit.history, "weights": model.get_weights(), "shares": runs}

    assert_same_numbers(pool, trained)


def refused(case: str) -> None:
    x, y = np.zeros([8, 4]), np.zeros([8, 1])
    outside = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)

    def python(context: Any) -> Any:
        return data().map(lambda x, y: (tf.numpy_function(lambda x: x, [x], tf.float64), y))

    def other_elements(context: Any) -> Any:
        return data() if context.input_pipeline_id else data().map(lambda x, y: x)

    model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    if case == "predict":
        model.predict(kd.shard(lambda context: data()))
    functions = {
        "no data set": lambda context: x,
        "outside": lambda context: outside,
        "table": lambda context: tf.data.Dataset.from_tensors("a").map(table.lookup),
        "python": python,
        "other elements": other_elements,
    }
    kd.shard(functions[case])


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("predict", "NotSupportedError", "What workers read is for `fit`, `evaluate`, `validation_data` and `kd.run`"),
        ("no data set", "ConfigurationError", "must return a tf.data.Dataset.\nReceived: ndarray"),
        ("outside", "ConfigurationError", "uses a dataset that was made outside of it"),
        ("python", "NotSupportedError", "Received: the operation PyFunc in the dataset function"),
        ("table", "NotSupportedError", "can't use a table or a variable of this process"),
        ("other elements", "ConfigurationError", "returns elements of different types for different workers."),
    ],
)
def test_what_is_refused(case: str, error: str, message: str, pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as info:
        pool.run(refused, case, timeout=SECONDS)
    assert type(info.value.error).__name__ == error
    assert message in str(info.value.error)
