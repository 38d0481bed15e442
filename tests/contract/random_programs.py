"""Random scripts: a seed chooses a model, its data and options, and what is done with it one after the other.

Promised cases prove what somebody thought of; these find what nobody did. `make test-random` compares them with one
process. A choice that plain Keras can't run is no case, one that is refused is allowed, other numbers are not.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks, losses, metrics, optimizers

import keras_dist as kd
from tests.contract.harness import Numbers, asking, plain, same
from tests.contract.parts import Distribute
from tests.contract.random_models import OwnLoss, RandomModel, own_loss
from tests.contract.random_pipelines import random_pipeline
from tests.contract.test_loop import verbs

# What a loop makes its losses of, in place of what `compile` takes.
IN_A_LOOP: dict[Any, type[losses.Loss]] = {
    own_loss: OwnLoss, "mae": losses.MeanAbsoluteError, "binary_crossentropy": losses.BinaryCrossentropy,
    "categorical_crossentropy": losses.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": losses.SparseCategoricalCrossentropy,
}  # fmt: skip


def joined(data: Any, size: int, per_epoch: int | None) -> Iterator[Any]:
    """Yields the batches that one process must get: `size` batches of an epoch, concatenated."""
    batches = iter(data)
    while epoch := list(itertools.islice(batches, per_epoch)):
        for start in range(0, len(epoch), size):
            yield tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *epoch[start : start + size])


def joined_in_pipeline(data: tf.data.Dataset, size: int, per_epoch: int | None) -> tf.data.Dataset:
    """As `joined`. A shuffle begins with each iterator, though Keras may not read from it: a generator's would not."""

    def join(*parts: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(parts).unbatch().batch(10**6)

    def join_epoch(*parts: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(parts).window(size).flat_map(join)

    return data.window(per_epoch).flat_map(join_epoch) if per_epoch else data.window(size).flat_map(join)


class Program(RandomModel):
    """One random script."""

    def __init__(self, seed: int, replicas: int) -> None:
        super().__init__(seed)
        self.replicas = replicas  # with which it is compared

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
        kinds = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"]
        # In attention the gradient of a bias is 0, and these step by its rounding. Muon's schedules are in float32.
        kinds += [] if self.has_sequences else ["Adafactor", "Lamb", *["Muon"] * (not callable(rate))]
        kind = self.pick("optimizer", *kinds)
        variants: dict[str, list[dict[str, Any]]] = {
            "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], "Adam": [{"amsgrad": True}],
            "RMSprop": [{"centered": True, "momentum": 0.5}],
        }  # fmt: skip
        options |= self.pick("variant", {}, *variants.get(kind, []))
        optimizer = getattr(optimizers, kind)(rate, **options)
        if self.step is None and self.pick("scales the loss", *[False] * 9, True):
            return optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)
        return optimizer

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

        def take(array: Any) -> Any:
            return tf.gather(array, rows) if tf.is_tensor(array) and isinstance(rows, list) else array[rows]

        return keras.tree.map_structure(take, parts)  # type: ignore[no-any-return]

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
        source = self.source_of_script()
        is_joined = self.is_per_replica and self.distribute_plainly is same
        return self.source_of_larger_batches(source) if is_joined else source

    def source_of_larger_batches(self, source: dict[str, Any]) -> dict[str, Any]:
        """Returns in one process what `batch="per_replica"` makes of a source of batches."""
        if "batch_size" in source:
            return source | {"batch_size": self.batch * self.replicas}
        data, steps = source["x"], source.get("steps_per_epoch")
        options = {"steps_per_epoch": -(-steps // self.replicas)} if steps else {}
        if not isinstance(data, tf.data.Dataset):
            return {"x": joined(data, self.replicas, steps), **options}
        batches = joined_in_pipeline(data, self.replicas, steps)
        if (count := int(data.cardinality())) > 0:
            batches = batches.apply(tf.data.experimental.assert_cardinality(-(-count // self.replicas)))
        return {"x": batches, **options}

    def source_of_script(self) -> dict[str, Any]:
        more = [] if self.is_per_replica else ["PyDataset"]  # whose batches Keras shuffles
        kind = self.pick("data", *["arrays"] * 3, "dataset", *["pipeline"] * 3, "repeated", "generator", *more)
        steps = -(-self.count // self.batch)
        if kind == "arrays":
            is_whole = self.is_per_replica or self.pick("steps an epoch", *[True] * 4, False)
            some = {} if is_whole else {"steps_per_epoch": max(steps - 1, 1)}
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
            look = lambda epoch, logs: seen.append(self.evaluate_in_between())  # noqa: E731
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
        if self.fixed_rate and self.pick("sets the rate of a batch", True, False, False, False):
            change = lambda batch, logs: setattr(self.distributed.optimizer, "learning_rate", 0.02 / (1 + batch))  # noqa: E731
            found.append(callbacks.LambdaCallback(on_train_batch_begin=change))
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
        watched = [*self.watched(seen), *more]
        options["epochs"] = epochs = self.pick("epochs", 1, 2, 3)
        options["initial_epoch"] = self.pick("first epoch", 0, 0, 0, epochs - 1)
        options |= {"callbacks": watched, "verbose": 0}
        return [self.distributed.fit(**options).history, seen]

    def evaluate(self) -> Any:
        if self.is_sharded:
            return self.distributed.evaluate(self.own_shards(), verbose=0, return_dict=True)
        batch = self.pick("evaluated", 3, 4, 32)
        data = self.make(
            "evaluates", arrays=lambda: {**self.arrays(), "batch_size": batch},
            dataset=lambda: {"x": tf.data.Dataset.from_tensor_slices(self.rows()).batch(batch)},
            generator=lambda: {"x": self.batches(), "steps": 2},
        )  # fmt: skip
        return self.distributed.evaluate(**data, verbose=0, return_dict=True)

    def evaluate_in_between(self) -> Any:
        """A run that is resumed does not evaluate after each epoch again, and then chooses the same all the same."""
        state = self.random.getstate()
        try:
            return self.evaluate()
        finally:
            self.random.setstate(state)

    def predict(self) -> Any:
        batch = self.pick("predicted", 2, 5, 32)
        data = self.make(
            "predicts", arrays=lambda: {"x": self.x, "batch_size": batch},
            dataset=lambda: {"x": tf.data.Dataset.from_tensor_slices(self.x).batch(batch).repeat(), "steps": 2},
            labeled=lambda: {"x": tf.data.Dataset.from_tensor_slices(self.rows()).batch(batch)},
        )  # fmt: skip
        return self.distributed.predict(**data, verbose=0)

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

    def load(self) -> None:
        """Goes on with the model and the optimizer of a file."""
        self.distributed.save("saved.keras")
        self.distributed = self.distribute(keras.saving.load_model("saved.keras"))

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
        model = self.model()
        are_arrays = not any(map(tf.is_tensor, keras.tree.flatten([self.x, self.y])))
        can_join = are_arrays and not self.is_sharded and not self.has_sequences
        self.is_per_replica = can_join and self.pick("batches for each replica", *[False] * 4, True)
        batch = "per_replica" if self.is_per_replica else None
        self.distribute = asking(distribute, exact=self.exact or None, data=data, batch=batch)
        self.distributed = self.distribute(model)
        self.weights = None
        if self.pick("weights", True, False, False):
            self.weights = keras.tree.map_structure(self.weights_of, self.y)
        self.compile()

    def run(self, distribute: Distribute) -> Iterator[tuple[str, Any]]:
        self.begin(distribute)
        actions = [self.fit, self.fit, self.evaluate, self.compile, self.freeze, self.reload, self.perturb]
        actions += [] if self.is_sharded else [self.predict, self.on_batches, self.loop]
        actions += [] if self.step else [self.clone, self.load]
        for number, action in enumerate([self.fit, *self.random.choices(actions, k=3), self.fit]):
            self.chosen.setdefault("actions", []).append(action.__name__)
            yield f"{number} {action.__name__}", [action(), self.distributed.get_weights()]
        yield "optimizer", self.optimizer_variables()

    def optimizer_variables(self) -> list[Any]:
        """Returns those that all engines have alike.

        What all ranks have accumulated is on the chief. Of two optimizers in a step parameter servers build the first
        for all weights.
        """
        is_alike = not self.accumulates and self.step != "two optimizers"
        return [np.asarray(variable) for variable in self.distributed.optimizer.variables] if is_alike else []


def run_program(seed: int, distribute: Distribute, replicas: int) -> tuple[Numbers, str]:
    """Returns the numbers of a program, and what it chose."""
    program = Program(seed, replicas)
    return {name: plain(value) for name, value in program.run(distribute)}, str(program.chosen)
