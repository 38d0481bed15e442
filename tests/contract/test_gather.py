"""What compares the examples of a batch: `kd.gather`, and losses that say so by `kd.losses.WholeBatch`."""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.compat import keras_losses
from tests.contract.harness import Numbers, contract, same
from tests.contract.parts import (
    COUNT,
    FEATURES,
    Distribute,
    Tracked,
    classes,
    compiled,
    descend,
    fitted,
    mlp,
    numbers,
    saved_config,
    stack,
    used,
)
from tests.contract.test_loop import Loop
from tests.contract.test_losses import contrastive, slow, trained, weights


def gatherer(distribute: Any) -> Callable[[Any], Any]:
    """`kd.gather`, or its plain equivalent."""
    return same if distribute is same else kd.gather


def whole(distribute: Any, loss: Any) -> Any:
    """`kd.losses.WholeBatch(loss)`, or its plain equivalent."""
    return loss if distribute is same else kd.losses.WholeBatch(loss)


def encoder() -> keras.Model:
    return stack(keras.layers.Dense(6, "tanh"), keras.layers.Dense(5), keras.layers.UnitNormalization())


class SimCLR(Tracked):
    """As in Keras's example `semisupervised_simclr`, with the views in the data and a trained temperature."""

    def __init__(self, distribute: Any, kind: str) -> None:
        super().__init__(encoder(), name="c_loss")
        self.gather, self.kind, self.projection = gatherer(distribute), kind, keras.layers.Dense(3)
        self.scale = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0), name="scale")

    def call(self, x: Any) -> Any:
        return self.projection(self.net(x))

    def loss_of(self, data: Any) -> Any:
        (first, second), identities = data
        first, second = (keras.ops.normalize(self(view, training=True), axis=1) for view in (first, second))
        if self.kind == "whole":
            anchors, others = self.gather(first), self.gather(second)
            labels = keras.ops.arange(keras.ops.shape(anchors)[0])
        else:  # the own rows, compared with all
            anchors, others = first, self.gather(second)
            labels = keras.ops.argmax(identities == keras.ops.transpose(self.gather(identities)), axis=1)
        similarities = keras.ops.matmul(anchors, keras.ops.transpose(others)) * self.scale
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True))


def views(count: int) -> tf.data.Dataset:
    x, _ = numbers(count)
    pairs = (x, 0.5 * x + 0.1 * np.sin(7 * x)), np.arange(count)[:, None]
    return tf.data.Dataset.from_tensor_slices(pairs).batch(8)


def contrasted(distribute: Any, count: int, kind: str, optimizer: Any = None, **options: Any) -> Numbers:
    keras.utils.set_random_seed(1)
    model = compiled(distribute, optimizer, None, SimCLR(distribute, kind), **options)
    result = fitted(model, views(count))
    return {**result, "evaluation": model.evaluate(views(count), verbose=0, return_dict=True)}


@contract("gather", sizes=(3,), covered_by=("gather-in-layer",))
def test_gather(distribute: Distribute) -> Numbers:
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    return {
        "whole": contrasted(distribute, 24, "whole"),
        "own anchors": contrasted(distribute, 24, "own"),
        "clipped": contrasted(distribute, 24, "own", keras.optimizers.Adam(0.01, global_clipnorm=0.1)),
        "loss scaling": contrasted(distribute, 24, "own", scaling),
    }


# The last batch has one example, so that shares are empty.
contract("gather-last-batch", sizes=(3,), covered_by=("gather-in-layer",))(
    lambda distribute: {
        "whole": contrasted(distribute, COUNT, "whole"),
        "own anchors": contrasted(distribute, COUNT, "own"),
        "eagerly": contrasted(distribute, COUNT, "own", run_eagerly=True),
    }
)


class BetweenExamples(keras.layers.Layer):
    """Attention of each example to all of its batch."""

    def __init__(self, distribute: Any) -> None:
        super().__init__()
        self.gather = gatherer(distribute)
        self.query, self.key = keras.layers.Dense(4), keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        scores = keras.ops.matmul(self.query(x), keras.ops.transpose(self.gather(self.key(x))))
        return x + keras.ops.matmul(keras.ops.softmax(scores), self.gather(x))


@contract("gather-in-layer", sizes=(3,))
def test_gather_in_layer(distribute: Distribute) -> Numbers:
    model = stack(keras.layers.Dense(5, "tanh"), BetweenExamples(distribute), keras.layers.Dense(1))
    return used(compiled(distribute, model=model, metrics=["mae"]), *numbers(24))


class Gathering(Loop):
    """A contrastive loss of labels, of own rows against all, and other dtypes."""

    def step(self, batch: Any) -> Any:
        gather, (x, y) = gatherer(self.distribute), batch
        with tf.GradientTape() as tape:
            vectors = self.model(x, training=True)
            same = tf.cast(y[:, None] == gather(y)[None, :], vectors.dtype)
            similarities = tf.matmul(vectors, gather(vectors), transpose_b=True)
            loss = tf.reduce_mean(keras.losses.categorical_crossentropy(same, similarities, from_logits=True))
        descend(tape, loss, self.model, self.optimizer)
        rows = [gather(part) for part in (y > 0, tf.cast(y, tf.uint8), tf.cast(y, tf.int64) + 2**40)]
        order = tf.cast(tf.range(tf.shape(rows[0])[0]), tf.float64)
        return loss, [tf.reduce_sum(tf.cast(row, tf.float64) * order) for row in rows]


# Full batches, as a TPU takes them.
contract("gather-in-loop", sizes=(3,), covered_by=("gather-in-layer", "loop"))(
    lambda distribute: Gathering(distribute, model=encoder()).train(
        distribute, tf.data.Dataset.from_tensor_slices(classes(24)).batch(8, drop_remainder=True), epochs=1
    )
)


@keras.saving.register_keras_serializable("contract")
class SemiHardTriplet(keras.losses.Loss):
    """As `TripletSemiHardLoss` of TensorFlow Addons, but with a value for each anchor."""

    def call(self, labels: Any, vectors: Any) -> Any:
        same = tf.equal(labels, tf.transpose(labels))
        distances = tf.reduce_sum(tf.square(vectors[:, None] - vectors[None, :]), -1)
        positive = tf.reduce_max(tf.where(same, distances, tf.zeros_like(distances)), 1, keepdims=True)
        far = tf.where(same, tf.fill(tf.shape(distances), tf.constant(9.0, distances.dtype)), distances)
        semi_hard = tf.where(far > positive, far, tf.fill(tf.shape(far), tf.constant(9.0, far.dtype)))
        return tf.maximum(positive[:, 0] - tf.reduce_min(semi_hard, 1) + 1.0, 0.0)


@contract("loss-whole-batch-forced", sizes=(3,), covered_by=("loss-whole-batch",))
def test_loss_whole_batch_forced(distribute: Distribute) -> Numbers:
    """Losses with a value for each example, which say that they compare them."""
    x, kinds = classes(24)
    labels, weight = kinds[:, None].astype("float64"), {"sample_weight": weights(24)}

    def on_whole(loss: Any) -> Any:
        return whole(distribute, loss)

    def once(loss: Any, y: Any = labels, model: Any = None, **options: Any) -> Numbers:
        return trained(distribute, loss, (x, y), model or encoder(), epochs=1, **options)

    inputs = keras.Input([FEATURES])
    two = keras.Model(inputs, {"vectors": encoder()(inputs), "class": keras.layers.Dense(1)(inputs)})
    losses, outputs = {"vectors": on_whole(SemiHardTriplet()), "class": "mse"}, {"vectors": labels, "class": labels}
    by_hand = on_whole(contrastive), on_whole(SemiHardTriplet(reduction="sum"))
    return {
        "function": once(on_whole(contrastive)),
        "weighted": once(on_whole(contrastive), **weight),
        "object": once(on_whole(SemiHardTriplet()), **weight),
        "outputs": once(losses, outputs, two),
        "sum": once(on_whole(SemiHardTriplet(reduction="sum")), compiles=slow()),
        "name": once(on_whole("dice"), np.eye(3)[kinds], mlp(3, "sigmoid")),
        "by hand": [once(None, model=Tracked(encoder(), loss), compiles=slow()) for loss in by_hand],
    }


def refused(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kd.ConfigurationError, match=words):
        call()


@contract("refuses-gather")
def test_refuses_gather(distribute: Distribute) -> Numbers:
    """Also what a file of a model has whose loss sees the whole batch: no trace of it."""
    if distribute is not same:
        if kd.num_replicas() > 1:
            refused(r"kd.gather\(\) outside of kd.run", lambda: kd.gather(tf.zeros([2, 1])))
        else:
            assert kd.gather(tf.zeros([2, 1])).shape == [2, 1]
        for value in ([1.0, 2.0], tf.constant(1.0), tf.constant(["a"]), tf.ragged.constant([[1]]), keras.Input([1])):
            refused("kd.gather.. takes a tensor", lambda value=value: kd.gather(value))
        for loss in (None, "no loss", {"a": "mse"}, keras.losses.Dice, lambda y, prediction: y - prediction):
            refused("takes one loss", lambda loss=loss: kd.losses.WholeBatch(loss))
        if kd.num_replicas() > 1:
            for loss in (keras.losses.Dice(), keras.losses.MeanSquaredError(reduction="sum")):
                of_all = lambda y, prediction, loss=loss: loss(kd.gather(y), kd.gather(prediction))  # noqa: E731
                model = compiled(distribute, loss=None, model=Tracked(encoder(), of_all))
                with pytest.raises(Exception, match="gets other rows"):
                    fitted(model, *numbers(24))
    own = SemiHardTriplet(name="own")
    losses = [whole(distribute, loss) for loss in (own, contrastive, registered)]
    assert isinstance(losses[0], SemiHardTriplet)
    assert not keras_losses.compares_examples(own)
    saved = {}
    for at, loss in enumerate(losses):
        compiled(distribute, loss=loss).save(f"{at}.keras")
        saved[str(at)] = json.dumps(saved_config(f"{at}.keras")["compile_config"]["loss"], sort_keys=True)
    loaded = keras.saving.load_model("2.keras")
    return {**saved, "is_plain": str(loaded.loss is registered)}


@keras.saving.register_keras_serializable("contract")
def registered(y: Any, prediction: Any) -> Any:
    return keras.ops.abs(y - prediction)
