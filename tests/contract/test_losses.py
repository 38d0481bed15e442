"""Losses with any denominator: the same numbers, also with uneven shares and weights."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.contract.harness import NOT_TPU, Numbers, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    Distribute,
    Linear,
    Tracked,
    classes,
    compiled,
    computed,
    descend,
    evaluated,
    fitted,
    mlp,
    numbers,
    predictions,
    stack,
)

STEPS = 5  # the length of a sequence


def weights(count: int = COUNT) -> np.ndarray:
    """Uneven between shares. Some examples have weight 0."""
    return np.where(np.arange(count) % 5 == 1, 0.0, np.linspace(0.1, 2, count))


def trained(
    distribute: Distribute, loss: Any, data: Any = None, model: Any = None, compiles: Any = None, **options: Any
) -> Numbers:
    """Trains in batches of 8, 8, 8 and 1 examples, and evaluates."""
    model = compiled(distribute, loss=loss, model=model, **(compiles or {}))
    data = data or numbers()
    result = fitted(model, *data, **options)
    weight = {key: value for key, value in options.items() if key == "sample_weight"}
    return {**result, "evaluation": evaluated(model, *data, **weight)}


def weighted(distribute: Distribute, loss: Any, data: Any = None, model: Any = None, compiles: Any = None) -> Numbers:
    return trained(distribute, loss, data, model, compiles, sample_weight=weights())


def slow() -> dict[str, Any]:
    """For a loss that is a sum."""
    return {"optimizer": keras.optimizers.SGD(0.02)}


def of_reduction(distribute: Distribute, reduction: str) -> Numbers:
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return {
        "weighted": weighted(distribute, loss, compiles=slow()),
        "unweighted": trained(distribute, loss, compiles=slow()),
    }


contract("loss-sum", covered_by=("together-losses", "loss-none"))(lambda distribute: of_reduction(distribute, "sum"))
contract("loss-mean", covered_by=("together-losses",))(lambda distribute: of_reduction(distribute, "mean"))
contract("loss-sum-over-batch-size", covered_by=("together-losses",))(
    lambda distribute: of_reduction(distribute, "sum_over_batch_size")
)
contract("loss-mean-with-sample-weight", sizes=(3,), covered_by=("together-losses", "loss-class-weight"))(
    lambda distribute: of_reduction(distribute, "mean_with_sample_weight")
)
# A loss for each example. The gradient is that of their sum.
contract("loss-none")(
    lambda distribute: weighted(distribute, keras.losses.MeanSquaredError(reduction="none"), compiles=slow())
)
# One value for each example.
contract("loss-function", covered_by=("loss-class-weight",))(
    lambda distribute: weighted(distribute, lambda y, prediction: tf.square(y - prediction)[:, 0] ** 2)
)
# A scalar counts as a mean.
contract("loss-scalar-function", covered_by=("together-losses",))(
    lambda distribute: trained(distribute, lambda y, prediction: tf.reduce_mean(tf.abs(y - prediction)))
)


@keras.saving.register_keras_serializable("contract")
class Contrastive(keras.losses.Loss):
    """As in Keras's example `supervised-contrastive-learning`: everything is in `__call__`."""

    def __call__(self, labels: Any, features: Any, sample_weight: Any = None) -> Any:
        features = keras.utils.normalize(features, axis=1, order=2)
        similarities = keras.ops.matmul(features, keras.ops.transpose(features))
        same = keras.ops.cast(keras.ops.equal(labels[:, None], labels[None, :]), similarities.dtype)
        same /= keras.ops.sum(same, axis=1, keepdims=True)
        return keras.ops.mean(keras.losses.categorical_crossentropy(same, similarities, from_logits=True))


def contrastive(labels: Any, vectors: Any) -> Any:
    """One value for each example, which compares it with all."""
    same = keras.ops.cast(keras.ops.equal(labels, keras.ops.transpose(labels)), vectors.dtype)
    similarities = keras.ops.matmul(vectors, keras.ops.transpose(vectors))
    return keras.losses.categorical_crossentropy(same, similarities, from_logits=True)


@contract("loss-whole-batch", sizes=(3,))
def test_loss_whole_batch(distribute: Distribute) -> Numbers:
    x, labels = classes(24)
    y, column, weight = np.eye(3)[labels], labels[:, None].astype("float64"), {"sample_weight": weights(24)}

    def segments(loss: Any, **options: Any) -> Numbers:
        return trained(distribute, loss, (x, y), mlp(3, "sigmoid"), epochs=1, **options)

    def embeddings(loss: Any, labels: Any, **options: Any) -> Numbers:
        model = stack(layers.Dense(6, "tanh"), layers.UnitNormalization())
        return trained(distribute, loss, (x, labels), model, epochs=1, **options)

    variants = {
        "dice": lambda: segments(keras.losses.Dice()),
        "dice by class": lambda: segments(keras.losses.Dice(axis=0)),
        "dice by example": lambda: segments(keras.losses.Dice(axis=1), **weight),
        "weighted": lambda: segments("dice", **weight),
        "tversky": lambda: segments(keras.losses.Tversky(alpha=0.3)),
        "contrastive": lambda: embeddings(Contrastive(), labels),
        "circle": lambda: embeddings(keras.losses.Circle(gamma=4.0), labels, **weight),
        "by example": lambda: embeddings(contrastive, column, **weight),
    }
    return computed(variants, "weighted", "by example")


@keras.saving.register_keras_serializable("contract")
class RootMeanSquare(keras.losses.Loss):
    def call(self, y: Any, prediction: Any) -> Any:
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - prediction)))


def masked_loss(label: Any, prediction: Any) -> Any:
    """As in TensorFlow's tutorial on transformers."""
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, prediction)
    mask = tf.cast(mask, dtype=loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


@contract("loss-one-number", sizes=(3,), covered_by=("loss-whole-batch", "loss-mask-zero"))
def test_loss_one_number(distribute: Distribute) -> Numbers:
    """The last batch has one example, so that shares are empty."""
    weight = {"sample_weight": weights()}
    inputs, words, (x, y) = keras.Input([FEATURES]), sequences()[0], numbers()

    def once(loss: Any, data: Any = None, model: Any = None, compiles: Any = None, **options: Any) -> Numbers:
        return trained(distribute, loss, data, model, compiles, epochs=1, **options)

    def total(y: Any, prediction: Any) -> Any:
        return tf.reduce_sum(tf.abs(y - prediction))

    def two() -> keras.Model:
        return keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])

    return {
        "masked": once(masked_loss, (words, words[:, ::-1].copy()), masked_model(7)),
        "root": once(RootMeanSquare(), **weight),
        "sum": once(total, compiles=slow()),
        "weighted mean": once(lambda y, prediction: tf.reduce_mean((y - prediction) ** 2), **weight),
        "outputs": once([RootMeanSquare(), total], (x, [y, -y]), two(), {**slow(), "loss_weights": [1.0, 0.1]}),
        "eagerly": once(RootMeanSquare(), compiles={"run_eagerly": True}),
    }


@contract("loss-drops-entries", sizes=(3,))
def test_drops_entries(distribute: Distribute) -> Numbers:
    x, y = numbers(24, 3)
    labels = np.argmax(y, axis=1)
    labels[np.random.RandomState(5).uniform(size=24) < np.linspace(0, 0.9, 24)] = -1
    labels[4:8] = -1

    def known(function: Any) -> Any:
        def of_known(y: Any, prediction: Any) -> Any:
            has_label = tf.not_equal(y[:, 0], -1)
            return function(tf.boolean_mask(y[:, 0], has_label), tf.boolean_mask(prediction, has_label))

        return of_known

    loss = known(keras.losses.sparse_categorical_crossentropy)
    metrics = {"metrics": [known(keras.metrics.sparse_categorical_accuracy)]}
    return trained(distribute, loss, (x, labels[:, None]), mlp(3, "softmax"), metrics, shuffle=False)


@keras.saving.register_keras_serializable("contract")
class Asymmetric(keras.losses.Loss):
    def call(self, y: Any, prediction: Any) -> Any:
        error = y - prediction
        return tf.reduce_mean(tf.maximum(2 * error, -error), -1)


contract("loss-subclass", covered_by=("loss-class-weight",))(
    lambda distribute: {
        reduction: weighted(distribute, Asymmetric(reduction=reduction))
        for reduction in ("sum_over_batch_size", "mean_with_sample_weight")
    }
)


# --- What layers add ---


class Penalized(layers.Dense):
    """A layer that adds a loss, which counts as a mean."""

    def call(self, x: Any) -> Any:
        outputs = super().call(x)
        self.add_loss(0.1 * tf.reduce_mean(tf.abs(outputs)))
        return outputs


contract("loss-add-loss", covered_by=("together-losses",))(
    lambda distribute: trained(distribute, "mse", model=stack(Penalized(4, "tanh"), layers.Dense(1)))
)


class ActivityRegularization(layers.Layer):
    """As in Keras's guide on layers, but a function of the script adds the loss."""

    def call(self, inputs: Any) -> Any:
        add_sum(self, inputs)
        return inputs


def add_sum(layer: layers.Layer, values: Any) -> None:
    layer.add_loss(keras.ops.sum(values) * 0.1)


class Eager(Linear):
    """A model that can't be traced: it looks at numbers before it adds a loss."""

    def call(self, x: Any) -> Any:
        outputs = super().call(x)
        assert np.all(np.isfinite(outputs.numpy()))
        add_sum(self, outputs)
        return outputs

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1])) + sum(self.losses)
        descend(tape, loss, self)
        return {"loss": loss}


class Centered(layers.Layer):
    """A center loss: two inputs, one of them labels; the root of a mean, and a mean."""

    def build(self, shapes: Any) -> None:
        self.centers = self.add_weight(shape=(3, shapes[0][-1]), initializer="ones", name="centers")

    def call(self, inputs: Any) -> Any:
        x, labels = inputs
        distances = keras.ops.square(x - keras.ops.take(self.centers, labels[:, 0], axis=0))
        self.add_loss([keras.ops.sqrt(keras.ops.mean(distances)), 0.5 * keras.ops.mean(distances)])
        return x - keras.ops.mean(x, axis=0)


@contract("loss-add-loss-sum", sizes=(3,), covered_by=("loss-whole-batch", "together-losses"))
def test_add_loss_sum(distribute: Distribute) -> Numbers:
    (x, y), labels = numbers(24), np.arange(24)[:, None] % 3

    def centered(**compiles: Any) -> Numbers:
        inputs, kinds = keras.Input([FEATURES]), keras.Input([1], dtype="int32")
        hidden = Centered()((layers.Dense(5, "tanh")(inputs), kinds))
        model = keras.Model([inputs, kinds], layers.Dense(1)(hidden))
        return trained(distribute, "mse", ([x, labels], y), model, compiles, batch_size=BATCH)

    summed = stack(layers.Dense(5, "tanh"), ActivityRegularization(), layers.Dense(1))
    return {
        "sum": trained(distribute, "mse", (x, y), summed),
        "centers": centered(),
        # It squares the rows of a table's gradient before it adds them.
        "adam": centered(optimizer=keras.optimizers.Adam(0.05)),
    }


@contract("loss-add-loss-eagerly")
def test_add_loss_eagerly(distribute: Distribute) -> Numbers:
    model = Eager()
    model(numbers()[0][:1])
    return fitted(compiled(distribute, loss=None, model=model, run_eagerly=True), *numbers())


@contract("loss-regularizers", sizes=(3,), since="3.14", covered_by=("together-losses",))
def test_regularizers(distribute: Distribute) -> Numbers:
    """L2 counts once. Keras divides activity regularizers by the number of examples. A sum scales neither."""

    def model() -> keras.Model:
        first = layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(0.1))
        return stack(first, layers.Dense(1, bias_regularizer="l1"))

    of_sum = keras.losses.MeanSquaredError(reduction="sum")
    return {
        "mean": trained(distribute, "mse", model=model()),
        "sum": trained(distribute, of_sum, model=model(), compiles=slow()),
    }


# --- Masks ---


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """Returns padded words and a number for each. Shares have different numbers of words."""
    words = np.random.RandomState(3).randint(1, 7, [COUNT, STEPS])
    words[np.arange(STEPS)[None, :] >= 1 + (np.arange(COUNT) * 3 % STEPS)[:, None]] = 0
    return words, np.sin(words * 1.0)[..., None]


def masked_model(outputs: int = 1) -> keras.Model:
    parts = [layers.Embedding(7, 3, mask_zero=True), layers.LSTM(4, return_sequences=True), layers.Dense(outputs)]
    return keras.Sequential([keras.Input([STEPS], dtype="int32"), *parts])


@contract("loss-mask-zero", sizes=(3,))
def test_mask_zero(distribute: Distribute) -> Numbers:
    """Keras divides by the number of words that are not padding."""
    of_words = weights()[:, None] * np.linspace(0.5, 1, STEPS)
    variants = {
        "plain": lambda: trained(distribute, "mse", sequences(), masked_model()),
        "weighted": lambda: trained(distribute, "mae", sequences(), masked_model(), sample_weight=of_words),
    }
    return computed(variants, "weighted")


@contract("loss-ignore-class", sizes=(3,), covered_by=("loss-mask-zero",))
def test_ignore_class(distribute: Distribute) -> Numbers:
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0, from_logits=True)
    return {
        "plain": trained(distribute, loss, classes(), mlp(3)),
        "weighted": weighted(distribute, loss, classes(), mlp(3)),
    }


# --- By hand ---


class HandmadeLosses(Tracked):
    def __init__(self) -> None:
        super().__init__(layers.Dense(1))
        self.mean, self.sum = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError(reduction="sum")
        self.each = keras.losses.Huber(reduction="none")

    def loss_of(self, data: Any) -> Any:
        x, y, weight = data
        prediction = self(x)
        each = tf.reduce_mean(self.each(y, prediction) * weight)
        return self.mean(y, prediction, sample_weight=weight) + 0.01 * self.sum(y, prediction) + each


contract("loss-by-hand", sizes=(3,), covered_by=("fit-own-train-step", "loss-class-weight"))(
    lambda distribute: weighted(distribute, None, model=HandmadeLosses())
)


class AddedLosses(Tracked):
    """The losses of single examples are added up by TensorFlow: as in its tutorials, as in masked language models."""

    def __init__(self, kind: str) -> None:
        super().__init__(layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1)))
        self.kind, self.loss_fn = kind, keras.losses.MeanSquaredError(reduction=None)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            each = self.loss_fn(y, self(x, training=True))
            loss = {
                "each": lambda: each,
                "average": lambda: tf.nn.compute_average_loss(each) + tf.nn.scale_regularization_loss(self.losses),
                "weighted": lambda: tf.nn.compute_average_loss(each * tf.square(y[:, 0]), None, BATCH),
            }[self.kind]()
        descend(tape, loss, self)
        self.tracker.update_state(each)
        return {"loss": self.tracker.result()}


@contract("loss-added-by-hand", sizes=(3,))
def test_loss_added_by_hand(distribute: Distribute) -> Numbers:
    results = {}
    for kind in ("each", "average", "weighted"):
        keras.utils.set_random_seed(1)
        model = compiled(distribute, loss=None, model=AddedLosses(kind), **slow())
        results[kind] = fitted(model, *numbers(24))
    return results


@contract("loss-class-weight")
def test_class_weight(distribute: Distribute) -> Numbers:
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight", from_logits=True)
    return trained(distribute, loss, classes(), mlp(3), class_weight={0: 0.2, 1: 1.0, 2: 3.0})


class Tagger(keras.Model):
    """Its own loss is a mean over the entries that are no padding, as in many models of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = layers.Embedding(7, 3, embeddings_regularizer="l2"), layers.Dense(7)
        self.seen = keras.metrics.Mean("seen")

    def call(self, x: Any) -> Any:
        return self.last(self.embed(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        mask = keras.ops.cast(keras.ops.not_equal(x, 0), each.dtype)
        loss = keras.ops.sum(each * mask) / keras.ops.sum(mask)
        self.seen.update_state(loss)
        return loss + keras.ops.sum(self.losses)


class Retrieval(keras.Model):
    """Two towers: the other rows of the batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = layers.Embedding(20, 4), layers.Embedding(30, 4)
        self.cross_entropy = keras.losses.CategoricalCrossentropy(from_logits=True)

    def call(self, x: Any) -> Any:
        return {"user": self.user(x["user"]), "item": self.item(x["item"])}

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **options: Any) -> Any:
        scores = tf.matmul(y_pred["user"], y_pred["item"], transpose_b=True)
        return self.cross_entropy(tf.eye(tf.shape(scores)[0], dtype=scores.dtype), scores)


class Ranked(Retrieval):
    """A value for each row, which compares it with the others."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **options: Any) -> Any:
        scores = tf.matmul(y_pred["user"], y_pred["item"], transpose_b=True)
        return tf.reduce_logsumexp(scores, -1) - tf.linalg.diag_part(scores)


class Guided(keras.Model):
    """As in Keras's guide on `fit`: a mean by hand, what layers add, and a metric of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Penalized(4, "tanh"), layers.Dense(1)
        self.tracker = keras.metrics.Mean("own_loss")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **options: Any) -> Any:
        loss = tf.reduce_mean(tf.math.squared_difference(y_pred, y)) + tf.add_n(self.losses)
        self.tracker.update_state(loss)
        return loss


@contract("loss-of-the-model", sizes=(3,), also=("mirrored-2",))
def test_of_the_model(distribute: Distribute) -> Numbers:
    """`compute_loss` of the model's own: a masked mean, negatives of the batch, values that compare rows, a mean.

    Of 21 rows: 8, 8, 5.
    """
    words, random = sequences()[0][:21], np.random.RandomState(4)
    words[4:8, 1:] = 0
    pairs = {"user": random.randint(0, 20, 21), "item": random.randint(0, 30, 21)}

    def retrieval(model: keras.Model) -> Numbers:
        data = tf.data.Dataset.from_tensor_slices(pairs).batch(BATCH)
        return fitted(compiled(distribute, keras.optimizers.Adagrad(0.5), None, model), data)

    def by_hand(**options: Any) -> Numbers:
        return fitted(compiled(distribute, loss=None, model=Guided(), **options), *numbers(21), shuffle=False)

    variants = {
        "masked": lambda: trained(distribute, None, (words, words[:, ::-1].copy()), Tagger(), shuffle=False),
        "retrieval": lambda: retrieval(Retrieval()),
        "ranked": lambda: retrieval(Ranked()),
        "by hand": by_hand,
        "eagerly": lambda: by_hand(run_eagerly=True),
    }
    return computed(variants, "ranked", "eagerly")


@contract("loss-weights", covered_by=("together-losses",))
def test_loss_weights(distribute: Distribute) -> Numbers:
    inputs, (x, y) = keras.Input([FEATURES]), numbers()
    shared = layers.Dense(5, "tanh")(inputs)
    model = keras.Model(inputs, {name: layers.Dense(1, name=name)(shared) for name in ("a", "b", "c")})
    losses = {
        "a": keras.losses.MeanSquaredError(reduction="sum"),
        "b": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    }
    weight = {"a": weights(), "b": weights()[::-1].copy()}
    compiles = {"loss_weights": {"a": 0.05, "b": 2.0}, "optimizer": keras.optimizers.SGD(0.05)}
    return trained(distribute, losses, (x, {"a": y, "b": -y}), model, compiles, sample_weight=weight)


@contract("together-losses", of=NOT_TPU)
def test_together_losses(distribute: Distribute) -> Numbers:
    inputs = keras.Input([FEATURES])
    penalized = ActivityRegularization()(Penalized(4, "tanh")(inputs))
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")(penalized)
    model = keras.Model(inputs, {name: layers.Dense(1, name=name)(hidden) for name in "abcd"})
    losses = {
        "a": keras.losses.MeanSquaredError(reduction="sum"),
        "b": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        "c": lambda y, prediction: tf.reduce_mean(tf.abs(y - prediction)),
        "d": "mse",
    }
    options = {"loss_weights": {"a": 0.05, "b": 2.0, "c": 1.0, "d": 0.5}, "metrics": {"d": "mae"}}
    model = compiled(distribute, keras.optimizers.SGD(0.05), losses, model, **options)
    x, y = numbers()
    data = x, {"a": y, "b": -y, "c": 2 * y, "d": y**2}
    weight = {"a": weights(), "b": weights()[::-1].copy(), "c": np.ones(COUNT), "d": weights()}
    result = fitted(model, *data, batch_size=BATCH, sample_weight=weight)
    evaluation = model.evaluate(*data, batch_size=BATCH, sample_weight=weight, verbose=0, return_dict=True)
    return {**result, "evaluation": evaluation, "predictions": predictions(model, x)}
