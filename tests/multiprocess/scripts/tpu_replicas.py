"""Steps as on TPU cores, on devices of a CPU: prints what one process gets, and what they get, as JSON.

MirroredStrategy runs the steps, one by one: its own iterator loses int32 between devices (TensorFlow 2.21).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.backends.tpu import data as tpu_data
from keras_dist.compat.keras_random import SEED_OFFSET
from tests.contract import parts
from tests.tpus import distribute_on_strategy

Layers = keras.layers
BATCH = 29  # so shares of 4 on 8 replicas, each filled up; the last batch has 12 of the 70 examples
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 6)), RNG.integers(0, 3, 70)
WORDS, WEIGHTS = RNG.integers(0, 5, (70, 7)), RNG.uniform(size=70)


class AddsLoss(Layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class OwnStep(keras.Model):
    """A hand-written mean, of which the strategy knows nothing."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"own": loss}


def model_of(kind: str) -> keras.Model:
    layers: list[Any] = [Layers.Dense(5, "tanh"), Layers.Dense(3, kernel_regularizer=None if kind == "none" else "l2")]
    if kind == "masked":
        layers = [Layers.Embedding(5, 4, mask_zero=True), Layers.Dense(3)]
    if kind.startswith("batchnorm"):
        layers[1:1] = [Layers.BatchNormalization(synchronized="synchronized" in kind, momentum=0.7)]
    if kind == "batchnorm_masked":
        layers = [Layers.Embedding(5, 4, mask_zero=True), Layers.BatchNormalization(), Layers.Dense(3)]
    if kind == "dropout":
        layers[1:1] = [Layers.Dropout(0.5, seed=3)]
    if kind == "add_loss":
        layers[1:1] = [AddsLoss()]
    if kind == "own_step":
        inputs = keras.Input((6,))
        return OwnStep(inputs, keras.Sequential(layers)(inputs))
    return keras.Sequential(layers)


def scalar_loss(y: Any, logits: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))


def loss_of(kind: str) -> Any:
    if kind == "scalar":
        return scalar_loss
    reduction = kind if kind in ("sum", "none", "mean_with_sample_weight") else "sum_over_batch_size"
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


EVEN = ("sum", "scalar", "none", "add_loss", "own_step")  # nothing is filled up


def data_of(kind: str) -> tf.data.Dataset:
    words = kind in ("masked", "batchnorm_masked")
    data = (WORDS, np.repeat(Y[:, None], 7, 1)) if words else (X, Y)
    data = (*data, WEIGHTS) if kind in ("weighted", "mean_with_sample_weight") else data
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.take(48).batch(24, drop_remainder=True) if kind in EVEN else dataset.batch(BATCH)


def compiled(kind: str, strategy: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = model_of(kind)
    model.build((None, 7) if "masked" in kind else (None, 6))
    if strategy is not None:
        model = distribute_on_strategy(model, strategy)
    rate = 0.01 if kind in ("sum", "none") else 0.5
    metrics = None if kind == "own_step" else ["accuracy"]
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.4), loss_of(kind), metrics=metrics)
    return model


def results(model: keras.Model, logs: dict[str, Any], predicted: Any) -> dict[str, Any]:
    return {"logs": logs, "predicted": predicted.tolist(), "weights": [w.tolist() for w in model.get_weights()]}


def alone(kind: str) -> dict[str, Any]:
    model = compiled(kind)
    history = model.fit(data_of(kind), epochs=2, verbose=0).history
    logs = {name: values[-1] for name, values in history.items()}
    return results(model, logs, model.predict(data_of(kind), verbose=0) if kind in ON_8 else np.empty(0))


def on_shares(kind: str) -> dict[str, Any]:
    """What couples the examples of a share: the mean of the shares' gradients, as on the other backends."""
    parts.BATCH = BATCH
    model = compiled(kind)
    loss = loss_of(kind)

    def with_regularizer(y: Any, logits: Any) -> Any:
        return loss(y, logits) + sum(model.losses)

    offset = SEED_OFFSET if kind == "dropout" else 0
    count = 8 if kind in ON_8 else 3
    parts.trained_on_shares(model, with_regularizer, (X, Y), count, seed_offset=offset, in_one_process=True)
    return results(model, {}, model.predict(data_of(kind), verbose=0) if kind in ON_8 else np.empty(0))


def on_replicas(kind: str, strategy: Any) -> dict[str, Any]:
    model, data, count = compiled(kind, strategy), data_of(kind), strategy.num_replicas_in_sync
    batches = tpu_data.even(data, 24) if kind in EVEN else tpu_data.filled(data, BATCH, count)
    replicas = model.distribute_strategy
    replicas.build(data.element_spec, True)
    shares = list(tpu_data.shares(batches, count, 0, 1))

    def values(first: int) -> Callable[[Any], Any]:
        return lambda context: shares[first + context.replica_id_in_sync_group]

    starts = range(0, len(shares), count)
    elements = [strategy.experimental_distribute_values_from_function(values(start)) for start in starts]
    train = tf.function(lambda batch: replicas.run(model.train_step, (batch,)))
    predict = tf.function(lambda batch: replicas.run(model.predict_step, (batch,)))
    for _ in range(2):
        model.reset_metrics()
        for element in elements:
            logs = train(element)
        logs = logs if kind == "own_step" else model.get_metrics_result()
    logs = {} if kind in ("batchnorm", "dropout") else {name: float(value) for name, value in logs.items()}
    predicted = np.concatenate([predict(element) for element in elements]) if kind in ON_8 else np.empty(0)
    return results(model, logs, predicted)


def by_batches(kind: str, strategy: Any = None) -> dict[str, Any]:
    """`train_on_batch` and its like, with a batch that the replicas don't divide."""
    model = compiled(kind, strategy)
    for _ in range(3):
        logs = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    tested = model.test_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    logs = {name: float(value) for name, value in {**logs, **{f"test_{n}": v for n, v in tested.items()}}.items()}
    return results(model, logs, np.asarray(model.predict_on_batch(X[:BATCH])))


def per_replica(strategy: Any = None) -> dict[str, Any]:
    """`fit` on 3 replicas with the script's batches of 4 for each, as one process on batches of 12."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Layers.Dense(5, "tanh"), Layers.Dense(1)])
    if strategy is not None:
        model = distribute_on_strategy(model, strategy, batch="per_replica", scale_learning_rate="linear")
    count, size, rate = (1, 12, 0.3) if strategy is None else (3, 4, 0.1)
    model.compile(keras.optimizers.SGD(rate), "mse")
    data = tf.data.Dataset.from_tensor_slices((X, WEIGHTS))
    logs = [model.fit(X, WEIGHTS, batch_size=size, epochs=2, shuffle=False, verbose=0).history["loss"][-1]]
    logs += model.fit(data.repeat().batch(size), epochs=2, steps_per_epoch=2 * count, verbose=0).history["loss"]
    return results(model, {"steps": int(model.optimizer.iterations.numpy()), **dict(enumerate(logs))}, np.empty(0))


ON_8 = ("batchnorm", "batchnorm_synchronized")
# Tracing 8 replicas takes long; 3 don't divide anything either.
ON_3 = ("masked", "dropout", "weighted", "mean_with_sample_weight", "sum", "scalar", "none", "add_loss", "own_step")


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    keras.config.set_floatx("float64")
    one: dict[str, Any] = {"batches": by_batches("batchnorm_synchronized")}
    several: dict[str, Any] = {}
    for count, kinds in ((8, ON_8), (3, ON_3)):
        devices, by_hand = [f"CPU:{index}" for index in range(count)], tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=by_hand)  # collectives know one group only
        for kind in kinds:
            one[kind] = on_shares(kind) if kind in ("batchnorm", "dropout") else alone(kind)
            with strategy.scope():
                several[kind] = on_replicas(kind, strategy)
    one["per_replica"] = per_replica()
    with strategy.scope():
        several["per_replica"] = per_replica(strategy)
        several["batches"] = by_batches("batchnorm_synchronized", strategy)
    print(json.dumps([one, several]))


if __name__ == "__main__":
    main()
