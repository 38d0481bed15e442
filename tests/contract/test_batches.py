"""Batches whose tensors have different lengths: nobody knows which rows belong together, so they are not cut."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.contract.harness import Numbers, contract
from tests.contract.parts import FEATURES, Distribute, compiled, fitted, numbers, outcome


class SimClr(keras.Model):
    """The model of Keras's example `semisupervised_simclr`: no `call`, an encoder that is built by the first step."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential([layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(4)])
        self.projection = keras.Sequential([keras.Input([4]), layers.Dense(3)])
        self.probe = keras.Sequential([keras.Input([4]), layers.Dense(3)])

    def compile(self, contrastive: Any, probe: Any) -> None:
        super().compile()
        self.contrastive_optimizer, self.probe_optimizer = contrastive, probe
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")
        self.seen = keras.metrics.Sum(name="seen")

    @property
    def metrics(self) -> list[Any]:
        return [self.contrastive_tracker, self.probe_tracker, self.probe_accuracy, self.seen]

    def _contrastive(self, first: Any, second: Any) -> Any:
        similarities = tf.matmul(first, second, transpose_b=True)
        labels = tf.range(tf.shape(first)[0])
        return keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)

    def train_step(self, data: Any) -> Any:
        (unlabeled, _), (labeled, labels) = data
        x = tf.concat([unlabeled, labeled], 0)
        with tf.GradientTape() as tape:
            views = [self.projection(self.encoder(view, training=True)) for view in (x, x[:, ::-1])]
            loss = self._contrastive(*views)
        weights = self.encoder.trainable_weights + self.projection.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.contrastive_tracker.update_state(loss)
        self.seen.update_state(tf.shape(x)[0])
        return self._probe(labeled, labels, trains=True)

    def test_step(self, data: Any) -> Any:
        return self._probe(*data, trains=False)

    def _probe(self, x: Any, y: Any, trains: bool) -> Any:
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(x, training=False))
            loss = self.probe_loss(y, logits)
        if trains:
            weights = self.probe.trainable_weights
            self.probe_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.probe_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.probe_accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


@contract("fit-simclr", sizes=(3,), covered_by=("data-ragged", "data-last-batch-odd", "fit-gan"))
def test_simclr(distribute: Distribute) -> Numbers:
    x, y = numbers(33, 3)
    labels = np.argmax(y, axis=1)
    unlabeled = tf.data.Dataset.from_tensor_slices((x[:24], labels[:24])).batch(8)
    labeled = tf.data.Dataset.from_tensor_slices((x[24:], labels[24:])).batch(3)
    model = distribute(SimClr())
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    return fitted(model, tf.data.Dataset.zip((unlabeled, labeled)), validation_data=labeled)


class Graphs(keras.Model):
    """Sums over the neighbors of each node. Its edges are numbers of nodes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        edges, nodes = inputs["edges"], inputs["nodes"]
        sums = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
        return self.dense(nodes + sums)


@contract("data-other-lengths", covered_by=("data-ragged", "data-last-batch-odd"))
def test_other_lengths(distribute: Distribute) -> Numbers:
    """Edges and nodes of graphs, the shorter ones first; predictions, and single batches."""
    x, y = numbers(18)
    edges = [[0, 5], [5, 1]], [[3, 2], [2, 4], [4, 0], [5, 5], [0, 1], [1, 2], [5, 0]], [[1, 0]]
    batches = [
        ({"edges": np.asarray(edges[index]), "nodes": x[6 * index : 6 * index + 6]}, y[6 * index : 6 * index + 6])
        for index in range(3)
    ]
    spec = {"edges": tf.TensorSpec([None, 2], "int64"), "nodes": tf.TensorSpec([None, FEATURES], x.dtype)}
    spec = spec, tf.TensorSpec([None, 1], y.dtype)
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    model = compiled(distribute, model=Graphs(), metrics=["mae"])
    history = fitted(model, data, validation_data=data)["history"]
    results = {"evaluate": model.evaluate(data, verbose=0), "predict": model.predict(data, verbose=0)}
    return {**outcome(model, history), **results, "on_batch": model.train_on_batch(*batches[0])}
