"""The proof that a number is a mean over examples: it must not prove what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from keras_dist.step.means import Proof

X = [None, 5]
WEIGHTS = tf.Variable(tf.ones([5]))


def is_mean(function: Callable[..., Any], *shapes: Any) -> bool:
    found = []

    @tf.function(autograph=False)
    def traced(*args: Any) -> None:
        found.append(Proof(args).is_mean(function(*args)))

    traced.get_concrete_function(*[tf.TensorSpec(shape, tf.float32) for shape in shapes])
    return found[-1]


def masked(y: Any, losses: Any) -> Any:
    mask = tf.cast(y != 0, losses.dtype)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


MEANS: dict[str, tuple[Any, ...]] = {
    "scaled": (lambda x: 0.1 * ops.mean(ops.abs(x)), X),
    "of each example": (lambda x: ops.mean(ops.sum(ops.square(x), axis=-1)), X),
    "sum of a mean": (lambda y, p: ops.sum(ops.mean(ops.square(y - p), axis=0)), X, X),
    "divergence": (lambda m, v: -0.5 * ops.mean(1 + v - ops.square(m) - ops.exp(v)), X, X),
    "of a split": (lambda x: ops.mean(ops.split(x, [2], axis=1)[0]) + ops.mean(x[:, 2:]), X),
    "two terms": (
        lambda x, q: 0.25 * ops.mean((tf.stop_gradient(q) - x) ** 2) + ops.mean((q - tf.stop_gradient(x)) ** 2),
        [None, 7, 7, 4], [None, 7, 7, 4],
    ),
    "crossentropy": (lambda y, p: ops.mean(keras.losses.sparse_categorical_crossentropy(y, p)), [None], X),
    "loss object": (lambda y, p: 2.0 * keras.losses.BinaryCrossentropy(from_logits=True)(y, p), X, X),
    "by the number of examples": (lambda x: tf.reduce_sum(x * x) / tf.cast(tf.shape(x)[0], "float32"), X),
    "by the number of entries": (lambda x: (ops.sum(x) - ops.sum(ops.abs(x))) / ops.cast(ops.size(x), 'float32'), X),
    "of weights": (lambda x: ops.sum(ops.square(WEIGHTS)), X),
    "softmax": (lambda x: ops.mean(ops.softmax(x)), X),
}  # fmt: skip

OTHERS: dict[str, tuple[Any, ...]] = {
    "sum": (lambda x: 0.1 * ops.sum(x), X),
    "root": (lambda x: ops.sqrt(ops.mean(ops.square(x))), X),
    "times the number of examples": (lambda x: ops.mean(x) * ops.cast(ops.shape(x)[0], "float32"), X),
    "sum by its square": (lambda x: ops.sum(x) / tf.cast(tf.size(x) * tf.size(x), "float32"), X),
    "by the product of two counts": (
        lambda x: ops.sum(x) / ops.cast(ops.prod(tf.stack([ops.shape(x)[0], ops.shape(x)[0]])), "float32"), X),
    "loss object that sums": (lambda y, p: keras.losses.BinaryCrossentropy(reduction="sum")(y, p), X, X),
    "mean and sum": (lambda x: ops.mean(x) + ops.sum(x), X),
    "by a width": (lambda x: ops.sum(x) / tf.cast(tf.shape(x)[1], "float32"), [None, None]),
    "count": (lambda x: tf.cast(tf.shape(x)[0], "float32"), X),
    "masked": (masked, X, X),
    "variance": (lambda x: ops.var(x), X),
    "centered": (lambda x: ops.mean(ops.square(x - ops.mean(x, axis=0))), X),
    "softmax over the batch": (lambda x: ops.mean(ops.softmax(x, axis=0)), X),
    "reversed": (lambda x: ops.mean(x * x[::-1]), X),
    "without the first": (lambda x: ops.mean(x[1:]), X),
    "similarities": (lambda x: ops.mean(ops.matmul(x, ops.transpose(x))), X),
    "broadcast": (lambda y, p: ops.mean(ops.square(y - p)), [None, 1], [None]),
    "largest": (lambda x: ops.max(x), X),
    "product of means": (lambda x: ops.mean(x) * ops.mean(x), X),
}


@pytest.mark.parametrize("case", MEANS)
def test_means_are_proven(case: str) -> None:
    assert is_mean(*MEANS[case])


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_not(case: str) -> None:
    assert not is_mean(*OTHERS[case])
