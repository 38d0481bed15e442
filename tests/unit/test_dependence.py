"""How a tensor depends on the examples: what is proven holds. What a metric adds; which optimizers a step has."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_dist.errors import NotSupportedError
from keras_dist.step import metrics
from keras_dist.step.dependence import Arguments, Kind, Proof, traced

X = [None, 5]
WEIGHTS = tf.Variable(tf.ones([5]))


def masked(y: Any, losses: Any) -> Any:
    mask = tf.cast(y != 0, losses.dtype)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def along_axis(y: Any, p: Any) -> Any:
    indices = ops.argmax(y, axis=-1)[:, None]
    return -ops.squeeze(ops.take_along_axis(p, indices, axis=1), -1)


def of_tokens(p: Any) -> Any:
    scores = keras.losses.sparse_categorical_crossentropy(ops.argmax(p, -1), p, from_logits=True)
    return ops.sum(scores, -1) / ops.maximum(ops.sum(ops.cast(scores > 1.5, "float32"), -1), 1)


def confusion(y: Any, p: Any) -> Any:
    return tf.math.confusion_matrix(ops.argmax(y, -1), ops.argmax(p, -1), 5)


FILTERS = tf.Variable(tf.random.stateless_normal([2, 2, 3, 2], [1, 2]))
IMAGES, T = [None, 4, 4, 3], [None, None, 5]
X3 = [None, 3]
# Functions, the shapes of their arguments, and what is proven.
PROVEN: dict[str, tuple[Any, ...]] = {
    "scaled": (lambda x: 0.1 * ops.mean(ops.abs(x)), "MEAN", X),
    "of each example": (lambda x: ops.mean(ops.sum(ops.square(x), axis=-1)), "MEAN", X),
    "sum of a mean": (lambda y, p: ops.sum(ops.mean(ops.square(y - p), axis=0)), "MEAN", X, X),
    "divergence": (lambda m, v: -0.5 * ops.mean(1 + v - ops.square(m) - ops.exp(v)), "MEAN", X, X),
    "of a split": (lambda x: ops.mean(ops.split(x, [2], axis=1)[0]) + ops.mean(x[:, 2:]), "MEAN", X),
    "two terms": (
        lambda x, q: 0.25 * ops.mean((tf.stop_gradient(q) - x) ** 2) + ops.mean((q - tf.stop_gradient(x)) ** 2),
        "MEAN", [None, 7, 7, 4], [None, 7, 7, 4],
    ),
    "crossentropy": (lambda y, p: ops.mean(keras.losses.sparse_categorical_crossentropy(y, p)), "MEAN", [None], X),
    "loss object": (lambda y, p: 2.0 * keras.losses.BinaryCrossentropy(from_logits=True)(y, p), "MEAN", X, X),
    "by the number of examples": (lambda x: tf.reduce_sum(x * x) / tf.cast(tf.shape(x)[0], "float32"), "MEAN", X),
    "by the number of entries": (
        lambda x: (ops.sum(x) - ops.sum(ops.square(x))) / ops.cast(ops.size(x), "float32"), "MEAN", X),
    "of weights": (lambda x: ops.sum(ops.square(WEIGHTS)), "CONSTANT", X),
    "softmax": (lambda x: ops.mean(ops.softmax(x)), "MEAN", X),
    "sum": (lambda x: 0.1 * ops.sum(x), "SUM", X),
    "root": (lambda x: ops.sqrt(ops.mean(ops.square(x))), "OTHER", X),
    "times the number of examples": (lambda x: ops.mean(x) * ops.cast(ops.shape(x)[0], "float32"), "OTHER", X),
    "sum by its square": (lambda x: ops.sum(x) / tf.cast(tf.size(x) * tf.size(x), "float32"), "OTHER", X),
    "by the product of two counts": (
        lambda x: ops.sum(x) / ops.cast(ops.prod(tf.stack([ops.shape(x)[0], ops.shape(x)[0]])), "float32"), "OTHER", X),
    "loss object that sums": (lambda y, p: keras.losses.BinaryCrossentropy(reduction="sum")(y, p), "SUM", X, X),
    "mean and sum": (lambda x: ops.mean(x) + ops.sum(x), "OTHER", X),
    "by a width": (lambda x: ops.sum(x) / tf.cast(tf.shape(x)[1], "float32"), "SUM", [None, None]),
    "count": (lambda x: tf.cast(tf.shape(x)[0], "float32"), "COUNT", X),
    "masked": (masked, "OTHER", X, X),
    "variance": (lambda x: ops.var(x), "OTHER", X),
    "centered": (lambda x: ops.mean(ops.square(x - ops.mean(x, axis=0))), "OTHER", X),
    "softmax over the batch": (lambda x: ops.mean(ops.softmax(x, axis=0)), "OTHER", X),
    "reversed": (lambda x: ops.mean(x * x[::-1]), "OTHER", X),
    "without the first": (lambda x: ops.mean(x[1:]), "OTHER", X),
    "similarities": (lambda x: ops.mean(ops.matmul(x, ops.transpose(x))), "OTHER", X),
    "broadcast": (lambda y, p: ops.mean(ops.square(y - p)), "OTHER", [None, 1], [None]),
    "largest": (lambda x: ops.max(x), "OTHER", X),
    "product of means": (lambda x: ops.mean(x) * ops.mean(x), "OTHER", X),
    "focal": (lambda y, p: -ops.mean(ops.power(1 - p, 2) * ops.where(y > 0, ops.log(ops.abs(p)), p), -1), "ROWS", X, X),
    "of flat images": (lambda x: ops.sum(ops.reshape(x, [ops.shape(x)[0], -1]), -1), "ROWS", IMAGES),
    "convolved": (lambda x: ops.mean(tf.nn.conv2d(x, FILTERS, 1, "SAME"), [1, 2, 3]), "ROWS", IMAGES),
    "ssim": (lambda x: tf.image.ssim(x, x / 2, 1.0, filter_size=2), "ROWS", IMAGES),
    "image gradients": (lambda x: ops.sum(tf.image.image_gradients(x)[0], [1, 2, 3]), "ROWS", IMAGES),
    "along an axis": (along_axis, "ROWS", X, X),
    "looked up by rows": (lambda y, p: tf.gather(p, tf.argmax(y, -1), batch_dims=1), "ROWS", X, X),
    "of tokens": (of_tokens, "ROWS", T),
    "einsum": (lambda y, p: tf.einsum("bi,bi->b", y, p), "ROWS", X, X),
    "last entry": (lambda x: x[..., -1], "ROWS", T),
    "repeated": (lambda x: ops.sum(ops.ones_like(x) * ops.tile(x, [1, 1]), -1), "ROWS", X),
    "split rows": (lambda x: ops.reshape(x, [-1, 2]), "ROWS", [None, 4]),
    "largest entries": (lambda x: ops.sum(ops.top_k(x, 2)[0], -1), "ROWS", X),
    "in a function": (lambda x: tf.function(lambda x: ops.sum(x, -1), autograph=False)(x), "ROWS", X),
    "outer product": (lambda y, p: tf.linalg.matmul(y, p, transpose_a=True), "OTHER", X, X),
    "einsum over the batch": (lambda y, p: tf.einsum("bi,bj->ij", y, p), "SUM", X, X),
    "confusion": (confusion, "SUM", X, X),
    "entries": (lambda x: tf.cast(tf.size(x), "float32") + ops.sum(x), "SUM", X),
    "of columns": (
        lambda x: ops.sum(ops.tile(ops.reshape(x, [1, -1]), [3, 1]) > [[0.0], [0.5], [1.0]], 1), "OTHER", [None, 1]),
    "unstacked": (lambda x: tf.unstack(x, axis=-1)[1], "ROWS", X),
    "scaled count": (lambda x: ops.sum(x) / (0.5 * tf.cast(tf.size(x), "float32")), "MEAN", X),
    "pairs": (lambda x: ops.sum(ops.reshape(x, [tf.cast(tf.shape(x)[0] / 2, "int32"), -1]), -1), "OTHER", X),
    "two in one row": (lambda x: ops.sum(ops.reshape(x, [-1, 6]), -1), "OTHER", X3),
    "cumulated": (lambda x: ops.cumsum(x, axis=0), "OTHER", X),
    "rolled": (lambda x: ops.roll(x, 1, axis=0), "OTHER", X),
    "transposed": (lambda x: ops.transpose(x), "OTHER", X),
    "in-batch": (lambda y, p: ops.sum(ops.matmul(y, ops.transpose(p)), -1), "OTHER", X, X),
    "einsum in the batch": (lambda y, p: tf.einsum("bi,ci->bc", y, p), "OTHER", X, X),
    "numbered": (lambda x: ops.sum(x, -1) * ops.cast(ops.arange(ops.shape(x)[0]), "float32"), "OTHER", X),
    "padded": (lambda x: ops.pad(x, [[1, 0], [0, 0]]), "OTHER", X),
    "first columns": (lambda x: tf.einsum("bi,bj->bij", x, x)[:, : ops.shape(x)[0]], "OTHER", X),
    "normalized": (lambda x: (x - ops.mean(x, 0)) / ops.std(x, 0), "OTHER", X),
}  # fmt: skip


@pytest.mark.parametrize("case", PROVEN)
def test_what_is_proven_holds(case: str) -> None:
    function, expected, *shapes = PROVEN[case]
    found: list[Kind] = []

    @tf.function(autograph=False)
    def traced(*args: Any) -> Any:
        value = function(*args)
        found.append(Proof(args).kind(tf.convert_to_tensor(value)))
        return value

    step = traced.get_concrete_function(*[tf.TensorSpec(shape, tf.float32) for shape in shapes])
    assert found[-1].name == expected
    random = np.random.RandomState(0)
    sizes = [[6, *(size or 7 for size in shape[1:])] for shape in shapes]
    batch = [tf.constant(random.uniform(0.1, 2, size), tf.float32) for size in sizes]
    whole, *parts = (np.asarray(step(*[part[rows] for part in batch])) for rows in (np.s_[:], np.s_[:4], np.s_[4:]))
    if expected == "ROWS":
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    elif expected == "MEAN":
        np.testing.assert_allclose(np.average(parts, axis=0, weights=[4, 2]), whole, rtol=1e-5, atol=1e-6)
    elif expected == "SUM":
        np.testing.assert_allclose(np.add(*parts), whole, rtol=1e-5, atol=1e-6)


def test_a_tensor_of_another_function_may_be_anything() -> None:
    found = []

    @tf.function(autograph=False)
    def outer(x: Any) -> None:
        largest, fixed = tf.reduce_max(x), tf.constant([1.0, 2.0])
        inspect = lambda rows: [Proof(rows).kind(ops.sum(rows[0]) * part) for part in (largest, fixed[0])]  # noqa: E731
        found.extend(traced(Arguments([x]), inspect))

    outer.get_concrete_function(tf.TensorSpec(X, tf.float32))
    assert [kind.name for kind in found] == ["OTHER", "OTHER"]


Y, P = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])


class Counting(keras.metrics.Metric):
    def __init__(self, update: Callable[..., Any], dtype: Any = None) -> None:
        super().__init__(name="counting")
        self.update = update
        self.total = self.add_variable([], "zeros", name="total")
        self.count = self.add_variable([], "zeros", dtype=dtype, name="count")

    def update_state(self, *args: Any) -> None:
        self.update(self, *args)

    def result(self) -> Any:
        return self.total


def of_batches(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign_add(ops.mean(ops.abs(y - prediction)))
    metric.count.assign_add(1)


def largest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.maximum(metric.total, ops.max(prediction)))


def smallest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.minimum(metric.total, ops.min(prediction)))


def latest(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(ops.mean(prediction))


def smoothed(metric: Any, y: Any, prediction: Any) -> None:
    metric.total.assign(0.9 * metric.total + 0.1 * ops.mean(prediction))


def kinds(metric: Any, *specs: Any) -> Any:
    found: list[Any] = []

    @tf.function(input_signature=specs, autograph=False)
    def step(*args: Any) -> None:
        found.append(metrics._kinds_of(metric, metric.update_state, Arguments((args, {}))))

    step.get_concrete_function()
    return found[-1]


@pytest.mark.parametrize(
    ("update", "dtype"),
    [(largest, None), (latest, None), (smallest, None), (smoothed, None), (of_batches, "int32")],
)
def test_what_is_no_sum_is_named(update: Callable[..., Any], dtype: str | None) -> None:
    found = kinds(Counting(update, dtype), Y, P)
    assert isinstance(found, NotSupportedError)
    assert "metric 'counting' (Counting), variable 'counting/" in str(found)


def test_what_cannot_be_traced_is_no_sum() -> None:
    found = kinds(Counting(lambda metric, y, prediction: metric.total.assign_add(float(ops.max(y)))), Y, P)
    assert "keras_dist can't tell what this metric counts: `update_state` can't be traced" in str(found)


def test_a_number_that_is_no_mean_is_named() -> None:
    """Its share cannot be gathered."""
    square = lambda metric, loss: metric.total.assign_add(loss**2)  # noqa: E731
    assert "variable 'counting/total'" in str(kinds(Counting(square), tf.TensorSpec([])))
