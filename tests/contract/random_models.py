"""Random models for random scripts, with data, losses and metrics that go with them."""

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops, optimizers

Layer = Callable[[Any], Any]


@keras.saving.register_keras_serializable("random_programs")
class Centered(layers.Layer):
    """Subtracts a moving average, as it was before the step, and counts examples."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, aggregation="mean")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x: Any, training: bool = False) -> Any:
        mean = ops.stop_gradient(ops.convert_to_tensor(self.mean))
        if training:
            axes = tuple(range(len(x.shape) - 1))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(ops.stop_gradient(x), axes))
            self.seen.assign_add(ops.cast(ops.shape(x)[0], self.seen.dtype))
        return x - 0.1 * mean


@keras.saving.register_keras_serializable("random_programs")
class Penalized(layers.Layer):
    """Adds a loss, and a metric of its own."""

    def build(self, shape: Any) -> None:
        self.size = metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * ops.mean(ops.square(x)))
        self.size.update_state(ops.abs(x))
        return x


@keras.saving.register_keras_serializable("random_programs")
def own_loss(y: Any, p: Any) -> Any:
    return ops.mean(ops.log(1 + ops.square(ops.cast(y, p.dtype) - p)), -1)


class OwnLoss(losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return own_loss(y, p)


class Own(keras.Model):
    """A model with a training step of its own. What it does besides the usual is in `extra`."""

    extra = "nothing"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.other_optimizer = optimizers.SGD(0.02, momentum=0.5)

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        loss = super().compute_loss(*args, **named)
        return loss + 0.01 * ops.sum(ops.square(self.trainable_variables[0])) if self.extra == "penalizes" else loss

    def compute_metrics(self, *args: Any, **named: Any) -> Any:
        logs = super().compute_metrics(*args, **named)
        return {**logs, "twice": 2 * logs["loss"]} if self.extra == "logs more" else logs

    def test_step(self, data: Any) -> Any:
        if self.extra != "tests twice":
            return super().test_step(data)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        first, second = self(x, training=False), self(x, training=False)
        predictions = keras.tree.map_structure(lambda one, two: 0.5 * (one + two), first, second)
        loss = self.compute_loss(x, y, predictions, weights, training=False)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(keras.tree.flatten(x)[0])[0])
        return self.compute_metrics(x, y, predictions, weights)

    def train_step(self, data: Any) -> Any:
        if self.extra in ("penalizes", "logs more", "tests twice"):
            return super().train_step(data)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions, weights)
            if self.extra == "decays":
                loss *= ops.exp(-0.1 * ops.cast(self.optimizer.iterations, loss.dtype))
            elif self.extra == "distills":
                first = keras.tree.flatten(predictions)[0]
                loss += 0.2 * ops.mean(ops.square(first - ops.stop_gradient(ops.tanh(first))))
        gradients = tape.gradient(loss, variables)
        if self.extra == "scales":
            gradients = [None if each is None else 1.5 * tf.convert_to_tensor(each) for each in gradients]
        pairs = list(zip(gradients, variables, strict=True))
        if self.extra == "two optimizers":
            self.other_optimizer.apply_gradients(pairs[:1])
        self.optimizer.apply_gradients(pairs[1:] if self.extra == "two optimizers" else pairs)
        if self.extra == "trains twice":
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weights)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(keras.tree.flatten(x)[0])[0])
        return self.compute_metrics(x, y, predictions, weights)


class RandomModel:
    """Makes a random model, data, losses and metrics. The plain process and each rank make the same choices."""

    def __init__(self, seed: int) -> None:
        self.random, self.chosen = random.Random(seed), dict[str, Any]()
        self.numbers = np.random.RandomState(seed)
        keras.utils.set_random_seed(seed)
        self.arguments: dict[Any, dict[str, Any]] = {}  # of metrics
        self.kinds = 0  # of integer labels, which can have weights
        self.has_tags = False  # a label for each word of a text
        self.has_sequences = False  # perhaps: layers of sequences
        self.exact = self.random.random() < 0.25  # then layers may draw random numbers, or normalize the batch
        self.count, self.batch = self.random.randint(7, 45), self.random.choice((1, 2, 3, 4, 5, 7, 8, 16, 64))
        self.chosen.update(exact=self.exact, count=self.count, batch=self.batch)

    def pick(self, _what: str, *options: Any) -> Any:
        """Chooses a value."""
        option = self.random.choice(options)
        self.chosen[_what] = [*self.chosen.get(_what, []), getattr(option, "__name__", option)]
        return option

    def make(self, _what: str, **options: Callable[[], Any]) -> Any:
        """Chooses by name, and makes what is chosen."""
        return options[self.pick(_what, *options)]()

    # --- Models ---

    def hidden(self, x: Any) -> Any:
        """Adds one to three layers that keep the number of axes."""
        kinds: dict[str, Layer] = {2: self.of_vectors, 3: self.of_sequences, 4: self.of_images}[len(x.shape)]()
        for _ in range(self.random.randint(1, 3)):
            x = kinds[self.pick("layers", *kinds)](x)
        return x

    def of_vectors(self) -> dict[str, Layer]:
        pick, last = self.pick, lambda x: x.shape[-1]
        regularizers = None, None, "l2", "l1", "orthogonal_regularizer"
        kinds: dict[str, Layer] = {
            "dense": lambda x: layers.Dense(
                5, pick("activation", "relu", "tanh", "gelu", "selu", "softplus", "mish", None),
                kernel_regularizer=pick("regularizer", *regularizers), bias_regularizer=pick("regularizer", None, "l2"),
                kernel_constraint=pick("constraint", None, None, "max_norm", "unit_norm", "non_neg"),
                activity_regularizer=pick("regularizer", None, None, "l2"),
            )(x),
            "nested": lambda x: keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)])(x),
            "shared": lambda x: layers.Add()([(both := layers.Dense(last(x), "tanh"))(x), both(both(x))]),
            "residual": lambda x: layers.Add()([x, layers.Dense(last(x))(x)]),
            "gated": lambda x: layers.Multiply()([x, layers.Dense(last(x), "sigmoid")(x)]),
            "joined": lambda x: layers.Concatenate()([x, layers.Dense(3, "tanh")(x)]),
            "normalized": lambda x: layers.LayerNormalization()(x),
            "groups": lambda x: layers.GroupNormalization(1)(x),
            "prelu": lambda x: layers.PReLU()(x),
            "operations": lambda x: ops.tanh(x * 1.5 + 0.1),
            "centered": lambda x: Centered()(x),
            "penalized": lambda x: Penalized()(x),
        }  # fmt: skip
        of_batch: dict[str, Layer] = {
            "dropout": lambda x: layers.Dropout(0.4)(x),
            "seeded dropout": lambda x: layers.Dropout(0.3, seed=3)(x),
            "noise": lambda x: layers.GaussianNoise(0.2)(x),
            "alpha dropout": lambda x: layers.AlphaDropout(0.2)(x),
            "batch": lambda x: layers.BatchNormalization(scale=pick("scale", True, False), momentum=0.5)(x),
        }
        return {**kinds, **of_batch} if self.exact else kinds

    def of_sequences(self) -> dict[str, Layer]:
        self.has_sequences = True
        kinds: dict[str, Layer] = {
            "lstm": lambda x: layers.LSTM(5, return_sequences=True, recurrent_regularizer="l2")(x),
            "gru": lambda x: layers.GRU(4, return_sequences=True, go_backwards=self.pick("backwards", True, False))(x),
            "both ways": lambda x: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True))(x),
            "convolution": lambda x: layers.Conv1D(5, 3, padding="same", activation="relu")(x),
            "attention": lambda x: layers.MultiHeadAttention(2, 4, dropout=0.2 if self.exact else 0.0)(x, x),
            "each step": lambda x: layers.TimeDistributed(layers.Dense(5, "tanh"))(x),
            "normalized": lambda x: layers.LayerNormalization()(x),
        }
        return {**kinds, "dropout": lambda x: layers.SpatialDropout1D(0.3)(x)} if self.exact else kinds

    def of_images(self) -> dict[str, Layer]:
        kinds: dict[str, Layer] = {
            "convolution": lambda x: layers.Conv2D(4, 3, padding="same", activation="relu")(x),
            "depthwise": lambda x: layers.DepthwiseConv2D(3, padding="same")(x),
            "separable": lambda x: layers.SeparableConv2D(4, 3, padding="same", depthwise_constraint="max_norm")(x),
            "transposed": lambda x: layers.Conv2DTranspose(3, 3, padding="same")(x),
            "pooled": lambda x: layers.MaxPooling2D(2, padding="same")(x),
            "groups": lambda x: layers.GroupNormalization(1)(x),
        }
        of_batch: dict[str, Layer] = {
            "batch": lambda x: layers.BatchNormalization()(x), "dropout": lambda x: layers.SpatialDropout2D(0.3)(x)
        }  # fmt: skip
        return {**kinds, **of_batch} if self.exact else kinds

    def model(self) -> keras.Model:
        """Makes a model, and `x`, `y`, losses and metrics to go with it."""
        inputs, hidden = self.pick(
            "inputs", self.vectors, self.dicts, self.columns, self.images, self.words, self.texts
        )()
        heads = self.real, self.binary, self.labels, self.one_hot, self.several, self.two
        outputs = self.pick("outputs", *[self.tags] if self.has_tags else heads)(hidden)
        steps = ("nothing", "decays", "distills", "scales", "trains twice", "two optimizers", "penalizes", "logs more",
                 "tests twice")  # fmt: skip
        self.step = self.pick("step", *[None] * len(steps), *steps)
        if self.step is None:
            return keras.Model(inputs, outputs)
        model = Own(inputs, outputs)
        model.extra = self.step
        return model

    def vectors(self) -> tuple[Any, Any]:
        self.x = self.numbers.normal(size=(self.count, 5))
        return (inputs := keras.Input([5])), self.hidden(inputs)

    def dicts(self) -> tuple[Any, Any]:
        self.x = {"a": self.numbers.normal(size=(self.count, 4)), "b": self.numbers.normal(size=(self.count, 3))}
        inputs = {name: keras.Input([array.shape[1]], name=name) for name, array in self.x.items()}
        return inputs, self.hidden(layers.Concatenate()([inputs["a"], inputs["b"]]))

    def columns(self) -> tuple[Any, Any]:
        """Columns of a table, which layers of the model preprocess."""
        self.x = {
            "name": tf.constant(self.numbers.choice(["red", "green", "blue"], (self.count, 1))),
            "kind": self.numbers.randint(0, 4, (self.count, 1)), "size": self.numbers.normal(2.0, 3.0, (self.count, 2)),
        }  # fmt: skip
        types = {"name": "string", "kind": "int64", "size": None}
        inputs = {name: keras.Input([self.x[name].shape[1]], name=name, dtype=types[name]) for name in self.x}
        (scaling := layers.Normalization()).adapt(self.x["size"])
        sizes = self.make(
            "sizes", scaled=lambda: scaling(inputs["size"]),
            binned=lambda: layers.Discretization([0.0, 2.0], output_mode="multi_hot")(inputs["size"]),
        )  # fmt: skip
        lookup = layers.StringLookup(vocabulary=["red", "blue"], output_mode="one_hot")
        hashing = layers.Hashing(3, output_mode="multi_hot")
        names = self.make("names", known=lambda: lookup(inputs["name"]), hashed=lambda: hashing(inputs["name"]))
        kinds = layers.Flatten()(layers.Embedding(4, 2)(inputs["kind"]))
        return inputs, self.hidden(layers.Concatenate()([names, kinds, sizes]))

    def images(self) -> tuple[Any, Any]:
        self.x = self.numbers.normal(size=(self.count, 6, 6, 2))
        inputs = keras.Input([6, 6, 2])
        return inputs, layers.GlobalAveragePooling2D()(self.hidden(inputs))

    def words(self) -> tuple[Any, Any]:
        self.x = self.numbers.randint(0, 9, (self.count, 5)).astype("int32")
        inputs = keras.Input([5], dtype="int32")
        embedded = layers.Embedding(9, 4, mask_zero=self.pick("masks", True, False))(inputs)
        hidden = self.hidden(embedded)
        return inputs, hidden if self.has_tags else layers.GlobalAveragePooling1D()(hidden)

    def texts(self) -> tuple[Any, Any]:
        """Words that each have an output."""
        self.has_tags = True
        return self.words()

    # --- Outputs, with what they are trained and measured by ---

    def real(self, x: Any, name: str | None = None) -> Any:
        self.y = self.numbers.normal(size=(self.count, 2))
        reduction = self.pick("reduction", *["sum_over_batch_size"] * 3, "sum", "mean", "mean_with_sample_weight")
        self.loss = self.make(
            "loss", squares=lambda: losses.MeanSquaredError(reduction=reduction), name=lambda: "mae",
            huber=lambda: losses.Huber(0.5, reduction=reduction), log_cosh=lambda: losses.LogCosh(reduction=reduction),
            cosine=lambda: losses.CosineSimilarity(), own=lambda: own_loss,
        )  # fmt: skip
        self.measures = ["mae", own_loss, metrics.RootMeanSquaredError, metrics.CosineSimilarity]
        if 1 not in (self.batch, self.count % self.batch):  # of one example R2 divides by 0, or by rounding
            self.measures.append(metrics.R2Score)
        return layers.Dense(2, name=name)(x)

    def binary(self, x: Any) -> Any:
        self.y = self.numbers.randint(0, 2, (self.count, 1)).astype(self.pick("type of y", "float64", "int32"))
        self.loss = self.make(
            "loss", name=lambda: "binary_crossentropy", smoothed=lambda: losses.BinaryCrossentropy(label_smoothing=0.1),
            focal=lambda: losses.BinaryFocalCrossentropy(), hinge=lambda: losses.Hinge(), own=lambda: own_loss,
        )  # fmt: skip
        self.measures = ["accuracy", metrics.AUC, metrics.Precision, metrics.Recall, metrics.BinaryIoU,
                         metrics.PrecisionAtRecall, metrics.TruePositives, metrics.Hinge]  # fmt: skip
        self.arguments = {metrics.PrecisionAtRecall: {"recall": 0.5}}
        return layers.Dense(1, "sigmoid")(x)

    def labels(self, x: Any, name: str | None = None) -> Any:
        self.y = self.numbers.randint(0, 3, self.count).astype("int32")
        self.loss = self.make(
            "loss", name=lambda: "sparse_categorical_crossentropy",
            ignored=lambda: losses.SparseCategoricalCrossentropy(ignore_class=2),
        )  # fmt: skip
        self.measures, self.kinds = ["accuracy", metrics.SparseCategoricalCrossentropy], 3
        return layers.Dense(3, "softmax", name=name)(x)

    def tags(self, x: Any) -> Any:
        """A label for each word."""
        outputs = self.labels(x)
        self.y, self.kinds = self.numbers.randint(0, 3, (self.count, 5)).astype("int32"), 0
        return outputs

    def one_hot(self, x: Any) -> Any:
        self.y = np.eye(3)[self.numbers.randint(0, 3, self.count)]
        self.loss = self.make(
            "loss", name=lambda: "categorical_crossentropy", focal=lambda: losses.CategoricalFocalCrossentropy(),
            divergence=lambda: losses.KLDivergence(), hinge=lambda: losses.CategoricalHinge(),
            dice=lambda: losses.Dice(),
        )  # fmt: skip
        self.measures = ["accuracy", metrics.F1Score, metrics.OneHotMeanIoU, metrics.AUC, metrics.KLDivergence]
        self.arguments = {metrics.OneHotMeanIoU: {"num_classes": 3}}
        return layers.Dense(3, "softmax")(x)

    def several(self, x: Any) -> Any:
        self.y = self.numbers.randint(0, 2, (self.count, 4)).astype("float64")
        self.loss = self.make(
            "loss", name=lambda: "binary_crossentropy", focal=lambda: losses.BinaryFocalCrossentropy(gamma=1.0),
            tversky=lambda: losses.Tversky(), dice=lambda: losses.Dice(), own=lambda: own_loss,
        )  # fmt: skip
        self.measures = ["accuracy", metrics.AUC, metrics.FBetaScore, metrics.Precision]
        self.arguments = {metrics.FBetaScore: {"threshold": 0.5}}
        return layers.Dense(4, "sigmoid")(x)

    def two(self, x: Any) -> Any:
        numbers, first, loss, measures = self.real(x, "p"), self.y, self.loss, self.measures
        labels, self.kinds = self.labels(x, "q"), 0
        self.y, self.loss = {"p": first, "q": self.y}, {"p": loss, "q": self.loss}
        self.measures = {"p": measures, "q": self.measures}
        return {"p": numbers, "q": labels}

    def measured(self, measures: Any) -> Any:
        if isinstance(measures, dict):
            return {name: self.measured(of_output) for name, of_output in measures.items()}
        chosen = self.random.sample(measures, self.random.randint(0, 2))
        self.chosen.setdefault("metrics", []).extend(getattr(each, "__name__", each) for each in chosen)
        return [each(**self.arguments.get(each, {})) if isinstance(each, type) else each for each in chosen]
