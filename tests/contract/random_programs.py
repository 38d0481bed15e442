"""Random scripts: a seed chooses a model, its data and options, and what is done with it one after the other.

Promised cases prove what somebody thought of; these find what nobody did. `make test-random` compares them with one
process. A choice that plain Keras can't run is no case, one that is refused is allowed, other numbers are not.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks, layers, losses, metrics, ops, optimizers

import keras_dist as kd
from tests.contract.harness import Numbers, asking, plain, same
from tests.contract.parts import Distribute
from tests.contract.random_pipelines import random_pipeline
from tests.contract.test_loop import verbs

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


# What a loop makes its losses of, in place of what `compile` takes.
IN_A_LOOP: dict[Any, type[losses.Loss]] = {
    own_loss: OwnLoss, "mae": losses.MeanAbsoluteError, "binary_crossentropy": losses.BinaryCrossentropy,
    "categorical_crossentropy": losses.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": losses.SparseCategoricalCrossentropy,
}  # fmt: skip


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


class Program:
    """One random script. The plain process and each rank make the same choices."""

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
        inputs, hidden = self.pick("inputs", self.vectors, self.dicts, self.images, self.words, self.texts)()
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
        self.measures = ["accuracy", metrics.AUC, metrics.Precision, metrics.Recall, metrics.BinaryIoU]
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

    def optimizer(self) -> Any:
        options: dict[str, Any] = {}
        clips = {"global_clipnorm": 0.1}, {"global_clipnorm": 1.0}, {"clipnorm": 0.1}, {"clipvalue": 0.05}
        options |= self.pick("clips", *[{}] * 8, *clips)
        options |= self.pick("decay", *[{}] * 6, {"weight_decay": 0.01})
        options |= self.pick("accumulates", *[{}] * 12, *({"gradient_accumulation_steps": steps} for steps in (2, 3)))
        options |= self.pick("averages", *[{}] * 12, *(
            {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": every} for every in (None, 2)
        ))  # fmt: skip
        rate = self.make(
            "rate", fixed=lambda: 0.02, decays=lambda: optimizers.schedules.ExponentialDecay(0.05, 3, 0.8),
            warms_up=lambda: optimizers.schedules.CosineDecay(0.01, 6, warmup_steps=2, warmup_target=0.06),
        )  # fmt: skip
        kinds = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Lamb"]
        kinds += [] if self.has_sequences else ["Adafactor"]  # in attention gradients are 0, and it steps by rounding
        kinds += [] if callable(rate) else ["Muon"]  # its schedules are in float32
        kind = self.pick("optimizer", *kinds)
        if kind == "SGD":
            options["momentum"] = self.pick("momentum", 0.0, 0.9)
        optimizer = getattr(optimizers, kind)(rate, **options)
        if self.step is None and self.pick("scales the loss", *[False] * 9, True):
            return optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)
        return optimizer

    # --- What is done ---

    def compile(self) -> None:
        eagerly, optimizer = self.pick("eagerly", *[False] * 8, self.step != "logs more"), self.optimizer()
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self.accumulates, self.averages = bool(inner.gradient_accumulation_steps), optimizer.use_ema
        self.fixed_rate = isinstance(inner.get_config()["learning_rate"], float)
        self.distributed.compile(
            optimizer, self.loss, loss_weights={"p": 0.3, "q": 1.7} if isinstance(self.y, dict) else None,
            metrics=self.measured(self.measures), weighted_metrics=self.measured(self.measures), run_eagerly=eagerly,
            steps_per_execution=1 if eagerly else self.pick("steps", 1, 1, 1, 2, 3),
            jit_compile=False if eagerly else self.pick("jit", "auto", "auto", "auto", False, True),
        )  # fmt: skip

    def rows(self, rows: Any = slice(None), weighted: bool = True) -> tuple[Any, ...]:
        parts = (self.x, self.y) if self.weights is None or not weighted else (self.x, self.y, self.weights)
        return keras.tree.map_structure(lambda array: array[rows], parts)  # type: ignore[no-any-return]

    def arrays(self) -> dict[str, Any]:
        return dict(zip(("x", "y", "sample_weight"), self.rows(), strict=False))

    def own_shards(self) -> tf.data.Dataset:
        """Returns the batches of some of 12 shards: all ranks' together are those of one process.

        Shards may have fewer batches than others, and none.
        """
        cuts = sorted(self.random.randint(0, self.count) for _ in range(11))
        parts = [range(*bounds) for bounds in zip([0, *cuts], [*cuts, self.count], strict=True)]
        is_plain = self.distribute_plainly is same
        rank, size = (0, 1) if is_plain else (kd.rank(), kd.size())
        own = parts[rank * 12 // size : (rank + 1) * 12 // size]
        batch = self.pick("of each shard", 1, 2, 3)

        def batches() -> Iterator[Any]:
            for start in range(0, max(map(len, own)), batch):
                yield self.rows([index for part in own for index in part[start : start + batch]])

        def spec(array: Any) -> Any:
            return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

        dataset = tf.data.Dataset.from_generator(batches, output_signature=keras.tree.map_structure(spec, self.rows()))
        return dataset.apply(tf.data.experimental.assert_cardinality(-(-max(map(len, own)) // batch)))

    def source(self) -> dict[str, Any]:
        """Returns the arguments of `fit` that give it data."""
        if self.is_sharded:
            return {"x": self.own_shards()}
        kind = self.pick("data", *["arrays"] * 3, "dataset", *["pipeline"] * 3, "repeated", "generator", "PyDataset")
        steps = -(-self.count // self.batch)
        if kind == "arrays":
            some = {} if self.pick("steps an epoch", *[True] * 4, False) else {"steps_per_epoch": max(steps - 1, 1)}
            if self.kinds and self.weights is None and self.pick("weights of classes", True, False, False):
                some["class_weight"] = {kind: 0.5 + kind for kind in range(self.kinds)}
            shuffles = self.pick("shuffles", True, False)
            return {**self.arrays(), **some, "batch_size": self.batch, "shuffle": shuffles}
        if kind == "generator":
            return {"x": self.batches(), "steps_per_epoch": steps}
        if kind == "PyDataset":
            program = self

            class Batches(keras.utils.PyDataset):
                def __len__(self) -> int:
                    return steps

                def __getitem__(self, index: int) -> Any:
                    return program.rows(slice(index * program.batch, (index + 1) * program.batch))

            return {"x": Batches()}
        dataset = tf.data.Dataset.from_tensor_slices(self.rows())
        if kind == "pipeline":
            pipeline = random_pipeline(dataset, self.batch, self.pick)
            is_known = pipeline.cardinality() != tf.data.UNKNOWN_CARDINALITY
            return {"x": pipeline if is_known or not self.needs_length() else dataset.batch(self.batch)}
        if self.pick("shuffles", True, False):
            dataset = dataset.shuffle(100, seed=5)
        if kind == "repeated":
            return {"x": dataset.repeat().batch(self.batch), "steps_per_epoch": self.pick("steps an epoch", 1, 2, 3)}
        dataset = dataset.batch(self.batch, drop_remainder=self.count >= self.batch and self.pick("drops", True, False))
        return {"x": dataset.prefetch(2) if self.pick("prefetches", True, False) else dataset}

    def needs_length(self) -> bool:
        """True for what plain Keras does otherwise at the end of data of unknown length: see docs/limits.md."""
        return self.has_sequences or self.step == "trains twice" or isinstance(self.y, dict)

    def batches(self) -> Iterator[Any]:
        while True:
            for start in range(0, self.count, self.batch):
                yield self.rows(slice(start, start + self.batch))

    def watched(self, seen: list[Any]) -> list[Any]:
        """Returns callbacks, which note what they see."""
        found = []
        if self.pick("logs of batches", True, False, False):
            note = lambda batch, logs: seen.append({name: float(np.mean(log)) for name, log in logs.items()})  # noqa: E731
            found.append(callbacks.LambdaCallback(on_train_batch_end=note))
        if self.pick("evaluates in between", True, False, False, False):
            look = lambda epoch, logs: seen.append(self.evaluate())  # noqa: E731
            found.append(callbacks.LambdaCallback(on_epoch_end=look))
        if self.pick("stops early", True, False, False, False):
            found.append(callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True, mode="min"))
        if self.pick("keeps the best", True, False, False, False):
            found.append(callbacks.ModelCheckpoint("best.weights.h5", "loss", save_best_only=True, mode="min",
                                                   save_weights_only=True))  # fmt: skip
        if self.fixed_rate and self.pick("waits for a plateau", True, False, False, False):
            found.append(callbacks.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=0.05))
        if self.averages and self.pick("swaps averages", True, False):
            found.append(callbacks.SwapEMAWeights(swap_on_epoch=True))
        if self.fixed_rate and self.pick("lowers the rate", True, False, False, False):
            found.append(callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7))
        return found

    def fit(self, *more: callbacks.Callback) -> Any:
        options, seen = self.source(), list[Any]()
        validation = self.pick("validation", None, "split", "rows", "weighted", "dataset")
        if self.is_sharded:
            options["validation_data"] = self.own_shards() if validation else None
        elif validation == "split" and "y" in options:
            options["validation_split"] = 0.3
        elif validation == "dataset":
            options["validation_data"] = tf.data.Dataset.from_tensor_slices(self.rows(slice(7))).batch(3)
        elif validation in ("rows", "weighted"):
            options["validation_data"] = self.rows(slice(7), validation == "weighted")
        options["validation_freq"] = self.pick("validates every", 1, 1, 1, 2)
        options["initial_epoch"] = self.pick("first epoch", 0, 0, 0, 1)
        watched = [*self.watched(seen), *more]
        options |= {"epochs": self.pick("epochs", 1, 2, 3), "callbacks": watched, "verbose": 0}
        return [self.distributed.fit(**options).history, seen]

    def evaluate(self) -> Any:
        if self.is_sharded:
            return self.distributed.evaluate(self.own_shards(), verbose=0, return_dict=True)
        batch = self.pick("evaluated", 3, 4, 32)
        return self.distributed.evaluate(**self.arrays(), batch_size=batch, verbose=0, return_dict=True)

    def predict(self) -> Any:
        return self.distributed.predict(self.x, batch_size=self.pick("predicted", 2, 5, 32), verbose=0)

    def on_batches(self) -> Any:
        trained = self.distributed.train_on_batch(*self.rows(slice(6)), return_dict=True)
        return [trained, self.distributed.test_on_batch(*self.rows(slice(5)), return_dict=True)]

    def loop(self) -> Any:
        """Trains for an epoch in a loop of its own."""
        shard, run, reduce = verbs(self.distribute_plainly)
        optimizer = self.distribute_plainly(self.optimizer())
        losses_of = keras.tree.map_structure(lambda loss: IN_A_LOOP[loss]() if loss in IN_A_LOOP else loss, self.loss)
        mean = metrics.Mean()

        def step(batch: Any) -> Any:
            x, y, *weights = batch
            with tf.GradientTape() as tape:
                predictions = self.distributed(x, training=True)
                weights = weights or [keras.tree.map_structure(lambda _: None, y)]
                parts = keras.tree.map_structure(lambda loss, *args: loss(*args), losses_of, y, predictions, *weights)
                loss = sum(keras.tree.flatten(parts)) + sum(self.distributed.losses)
            variables = self.distributed.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            mean.update_state(loss)
            return loss

        function = tf.function(lambda batch: reduce("mean", run(step, (batch,))), reduce_retracing=True)
        data = tf.data.Dataset.from_tensor_slices(self.rows()).batch(self.batch)
        return [[float(function(batch)) for batch in shard(data)], float(mean.result())]

    def freeze(self) -> None:
        for layer in self.distributed.layers[: self.pick("frozen", 1, 2)]:
            layer.trainable = not layer.trainable
        self.compile()

    def reload(self) -> None:
        self.distributed.save_weights("saved.weights.h5")
        self.distributed.set_weights([0.5 * weight for weight in self.distributed.get_weights()])
        self.distributed.load_weights("saved.weights.h5")

    def perturb(self) -> None:
        for variable in self.distributed.trainable_variables:
            variable.assign(0.95 * variable + 0.01)

    def clone(self) -> None:
        clone = keras.models.clone_model(self.distributed)
        clone.set_weights(self.distributed.get_weights())
        self.distributed = self.distribute(clone)
        self.compile()

    def weights_of(self, y: Any) -> Any:
        words = (self.pick("weights of words", 1, y.shape[1]),) if self.has_tags else ()
        shape = (self.count, *words)
        return self.numbers.uniform(0.1, 2, shape) * (self.numbers.uniform(size=shape) < 0.8)

    def begin(self, distribute: Distribute) -> None:
        """Makes the model, and compiles it."""
        data = self.pick("reads", *[None] * 12, "chief", *["sharded"] * 3)
        self.is_sharded = data == "sharded"
        self.distribute_plainly = distribute
        self.distribute = asking(distribute, exact=self.exact or None, data=data)
        self.distributed = self.distribute(self.model())
        self.weights = None
        if self.pick("weights", True, False, False):
            self.weights = keras.tree.map_structure(self.weights_of, self.y)
        self.compile()

    def run(self, distribute: Distribute) -> Iterator[tuple[str, Any]]:
        self.begin(distribute)
        actions = [self.fit, self.fit, self.evaluate, self.compile, self.freeze, self.reload, self.perturb]
        actions += [] if self.is_sharded else [self.predict, self.on_batches, self.loop]
        actions += [] if self.step else [self.clone]
        for number, action in enumerate([self.fit, *self.random.choices(actions, k=3), self.fit]):
            self.chosen.setdefault("actions", []).append(action.__name__)
            yield f"{number} {action.__name__}", [action(), self.distributed.get_weights()]
        # On the chief is what all ranks have accumulated. Of two optimizers in a step parameter servers build the first
        # for all weights.
        if not self.accumulates and self.step != "two optimizers":
            yield "optimizer", [np.asarray(variable) for variable in self.distributed.optimizer.variables]


def run_program(seed: int, distribute: Distribute) -> tuple[Numbers, str]:
    """Returns the numbers of a program, and what it chose."""
    program = Program(seed)
    return {name: plain(value) for name, value in program.run(distribute)}, str(program.chosen)
