"""Which steps are checked by default, on which rows, and that the check leaves nothing behind."""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.local.serial import Serial
from keras_dist.compat import keras_random
from keras_dist.compat.keras_model import Attributes
from keras_dist.data.shares import Share, first_rows, take_share
from keras_dist.step.trial import Quantity, Trial, differences_in, table_of
from keras_dist.training import own_code

layers = keras.layers


def squared(y: Any, prediction: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - prediction), -1)


class Own(layers.Layer):
    def call(self, x: Any) -> Any:
        return x


class Loss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared(y_true, y_pred)


class Optimizer(keras.optimizers.SGD):
    pass


class Evaluated(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class Counted(keras.Sequential):
    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_metrics(*args, **kwargs)


def model_of(cls: Any = keras.Sequential, own: Any = None, **options: Any) -> keras.Model:
    model = cls([keras.Input([2]), *([] if own is None else [own]), layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


@pytest.mark.parametrize(
    ("kinds", "arguments"),
    [
        ("", {}),
        ("", {"loss": keras.losses.Huber(), "metrics": ["mae", keras.metrics.AUC()]}),
        ("", {"loss": keras.losses.mean_squared_error, "optimizer": keras.optimizers.Adam()}),
        ("train test", {"loss": squared}),
        ("train test", {"loss": [Loss()]}),
        ("train test", {"metrics": [squared]}),
        ("train test", {"weighted_metrics": [squared]}),
        ("train test", {"own": Own()}),
        ("train test", {"own": layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))}),
        ("train", {"optimizer": Optimizer()}),
        ("test", {"cls": Evaluated}),
        ("train test", {"cls": Counted}),
    ],
)  # fmt: skip
def test_which_steps_run_code_of_the_script(kinds: str, arguments: dict[str, Any]) -> None:
    model = model_of(**arguments)
    assert [kind for kind in ("train", "test") if own_code.is_in_step(model, kind)] == kinds.split()


def test_the_first_rows_of_all_kinds_of_tensors() -> None:
    ragged = tf.ragged.constant([[1], [2, 2], [3], []])
    batch = tf.reshape(tf.range(8), [4, 2]), ragged, tf.sparse.from_dense(tf.eye(4)), tf.constant(5), None
    share = first_rows(take_share(batch, 1, 2), 1)
    rows, ragged, sparse, scalar, nothing = share.data
    assert (int(share.count), rows.numpy().tolist(), ragged.to_list()) == (1, [[4, 5]], [[3]])
    assert (tf.sparse.to_dense(sparse).numpy().tolist(), int(scalar), nothing) == ([[0, 0, 1, 0]], 5, None)


def test_rows_of_the_first_batch_are_kept() -> None:
    """Of all kinds of tensors, in a traced step; those of later batches are not."""
    rows = own_code.FirstRows(Serial())

    def batch(first: int) -> Any:
        numbers = tf.range(first, first + 5)
        texts, ragged = tf.strings.as_string(numbers), tf.RaggedTensor.from_row_lengths(numbers, [2, 0, 2, 1, 0])
        return {"numbers": numbers[:, None], "texts": texts, "ragged": ragged}, None, tf.sparse.from_dense(tf.eye(5))

    @tf.function
    def step(data: Any) -> None:
        rows.keep([Share(data, tf.constant(5), tf.constant(5), tf.constant(0.0))])

    step(batch(0))
    step(batch(7))
    x, nothing, sparse = rows.batch()
    assert x["numbers"].numpy().tolist() == [[0], [1], [2]]
    assert x["texts"].numpy().tolist() == [b"0", b"1", b"2"]
    assert x["ragged"].to_list() == [[0, 1], [], [2, 3]]
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), np.eye(5)[:3])
    assert nothing is None


def test_rows_that_do_not_belong_together_are_none() -> None:
    nodes_and_edges = tf.zeros([3, 1]), tf.zeros([5, 2])
    assert int(first_rows(take_share(nodes_and_edges, 0, 2), 2).count) == 0
    empty = Share(tf.zeros([1]), tf.constant(0), tf.constant(1), tf.constant(0.0))
    assert int(first_rows(empty, 2).count) == 0


def test_draws_of_the_script_are_those_without_a_check() -> None:
    """If this fails, TensorFlow keeps the seeds of eager operations elsewhere."""

    def drawn(is_checked: bool) -> list[float]:
        tf.random.set_seed(1)
        first = float(tf.random.normal([]))
        if is_checked:
            with keras_random.kept_draws():
                other = [float(tf.random.normal([])) for _ in range(3)]
            assert first not in other
        return [first, float(tf.random.normal([])), float(tf.random.normal([]))]

    assert drawn(is_checked=True) == drawn(is_checked=False)


def test_steps_of_the_check_run_eagerly() -> None:
    """Also those of a `tf.function` of the script, whose trace is that of the shares. No warning says that it is slow.
    """
    warns = functools.partial(logging.getLogger("tensorflow").isEnabledFor, logging.WARNING)
    model, function = model_of(), tf.function(lambda: tf.constant(tf.executing_eagerly()))
    assert not function()
    with own_code.without_graph(model, [model.optimizer]):
        assert (model.run_eagerly, bool(function()), warns()) == (True, True, False)
    assert (model.run_eagerly, bool(function()), warns()) == (False, False, True)


def test_what_a_step_leaves_in_python_is_undone_and_named() -> None:
    layer = Own(name="own")
    layer.count, layer.seen, layer.table, layer.array = 1, [1], {"a": 1}, np.zeros(2)
    layer.variable, layer.variables_of_it = tf.Variable(1.0), [tf.Variable(2.0)]
    attributes = Attributes([layer])
    assert list(attributes.variables()) == ["own.variable", "own.variables_of_it[0]"]
    trial = Trial([variable.handle for variable in attributes.variables().values()], attributes)
    held, seen = attributes.now(), layer.seen

    def step() -> None:
        layer.count += 1
        layer.seen.append(2)
        layer.table["b"] = 2
        layer.array += 1
        layer.new = 3
        layer.variable.assign_add(1)

    trial.run(step)
    assert (layer.count, layer.seen, layer.table, layer.array.tolist()) == (1, [1], {"a": 1}, [0, 0])
    assert layer.seen is seen
    assert not hasattr(layer, "new")
    assert float(layer.variable) == 1
    assert attributes.different(held, trial.left) == ["own.count"]
    with trial.beginning_with(trial.left):
        assert layer.count == 2
    assert layer.count == 1


def test_rounding_that_a_model_amplifies_is_no_difference() -> None:
    """What rounding the weights changes by 2 % may be off by 19 %, and not by 40 %; its group is measured together."""
    values = {"a": 1.0, "b": 1.0}
    expected = [Quantity(name, "update 1", tf.constant([value])) for name, value in values.items()]

    def wrong(off: float, disturbed: float) -> list[bool]:
        tables = [
            table_of(expected, [each._replace(value=each.value + change) for each in expected]).numpy()
            for change in (off, disturbed)
        ]
        tables[1][1, 0] = 0  # by chance
        return [found.is_wrong for found in differences_in(expected, tables[0], 3.5e-4, tables[1])]

    assert wrong(0.19, 0.02) == [False, False]
    assert wrong(0.4, 0.02) == [True, True]
    assert wrong(0.4, 0.0) == [True, True]


def test_numbers_are_drawn_alike_for_each_row() -> None:
    """In a share as in the batch, of each function, by its name; the draws of one row differ, and so do two draws."""
    generator = tf.random.Generator.from_seed(1)

    def drawn(rows: int) -> list[np.ndarray]:
        with keras_random.drawn_alike():
            numbers = [
                tf.random.normal([rows, 2], mean=5.0), tf.random.normal((rows, 2), 5.0), tf.random.uniform([rows, 2]),
                tf.random.uniform([rows, 2], maxval=1000, dtype=tf.int32), tf.random.truncated_normal([rows, 2]),
                generator.normal([rows, 2]), generator.uniform(tf.constant([rows, 2])), tf.random.uniform([]),
                tf.random.categorical(tf.zeros([rows, 1000]), 2),
            ]  # fmt: skip
        return [each.numpy() for each in numbers]

    state = generator.state.numpy().tolist()
    batch, share = drawn(5), drawn(2)
    for whole, part in zip(batch, share, strict=True):
        np.testing.assert_array_equal(whole[:2] if whole.ndim else whole, part)
        assert whole.ndim == 0 or whole[0, 0] != whole[0, 1]
    assert len({float(whole.flat[0]) for whole in batch}) == len(batch)
    assert abs(batch[0].mean() - 5) < 5
    assert generator.state.numpy().tolist() == state
    assert len(set(tf.random.normal([9]).numpy())) == 9


def test_numbers_of_keras_are_drawn_alike_for_each_row() -> None:
    """Also of rows that are not those of the batch, such as real and made ones together (a GAN with Dropout)."""

    def drawn(rows: int) -> list[np.ndarray]:
        seeds, x = keras.random.SeedGenerator(3), tf.ones([rows, 8])
        with keras_random.drawn_alike():
            numbers = [
                keras.random.normal([rows, 8], seed=seeds), keras.random.uniform([rows, 8], seed=seeds),
                keras.random.randint([rows, 8], 0, 1000, seed=seeds), keras.random.dropout(x, 0.5, seed=seeds),
                layers.Dropout(0.5, noise_shape=(None, 8), seed=4)(x, training=True),
            ]  # fmt: skip
        return [np.asarray(each) for each in numbers]

    for whole, part in zip(drawn(10), drawn(4), strict=True):
        np.testing.assert_array_equal(whole[:4], part)
        assert len(set(whole[0])) > 1
    assert not np.array_equal(*drawn(2)[:2])
    noise = keras.random.normal([9], seed=1)
    assert len(set(np.asarray(noise))) == 9


def test_a_graph_draws_as_before_where_numbers_are_drawn_alike() -> None:
    @tf.function
    def draw() -> Any:
        return tf.random.normal([9]) + tf.cast(tf.random.categorical([[0.0, 0.0]], 9)[0], tf.float32)

    with keras_random.drawn_alike():
        drawn = draw()
    assert len(set(drawn.numpy())) == 9
