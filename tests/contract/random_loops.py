"""Random training loops of the script's own: `make test-random` compares them with one process."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import metrics

from tests.contract.harness import Numbers, asking, plain
from tests.contract.parts import Distribute
from tests.contract.random_pipelines import random_pipeline
from tests.contract.random_programs import IN_A_LOOP, Program
from tests.contract.test_loop import reducer, verbs


class RandomLoop(Program):
    """One random loop: epochs of training steps, and of steps that evaluate."""

    def begin(self, distribute: Distribute) -> None:
        self.step, self.is_sharded = None, False
        self.shard, self.run_step, self.reduce = verbs(distribute)
        self.all_reduce = reducer(distribute)
        self.distribute = asking(distribute, exact=self.exact or None)
        self.distributed = self.model()
        if self.pick("distributes the model", True, False):
            self.distributed = self.distribute(self.distributed)
        self.weights = None
        if self.pick("weights", True, False, False):
            self.weights = keras.tree.map_structure(self.weights_of, self.y)
        self.own_optimizer = self.distribute(self.optimizer())
        self.losses = keras.tree.map_structure(lambda loss: IN_A_LOOP[loss]() if loss in IN_A_LOOP else loss, self.loss)
        self.mean, self.seen, self.tested = metrics.Mean(), metrics.Mean(), metrics.Mean()
        self.way = self.make(
            "applies", apply=lambda: self.apply, pairs=lambda: self.apply_pairs, clipped=lambda: self.apply_clipped
        )
        self.adds_losses, self.returns = self.pick("adds losses", True, False), self.pick("returns", "loss", "more")
        self.is_persistent = self.pick("persistent", False, False, True)

    def loss_of(self, batch: Any, training: bool) -> Any:
        x, y, *weights = batch
        predictions = self.distributed(x, training=training)
        weights = weights or [keras.tree.map_structure(lambda _: None, y)]
        parts = keras.tree.map_structure(lambda loss, *args: loss(*args), self.losses, y, predictions, *weights)
        loss = sum(keras.tree.flatten(parts))
        if self.adds_losses:
            loss += sum(self.distributed.losses)
        (self.seen if training else self.tested).update_state(keras.tree.flatten(predictions)[0])
        return loss

    def train_step(self, batch: Any) -> Any:
        variables = self.distributed.trainable_variables
        with tf.GradientTape(self.is_persistent) as tape:
            loss = self.loss_of(batch, training=True)
        self.way(tape.gradient(loss, variables), variables)
        self.mean.update_state(loss)
        if self.returns == "loss":
            return loss
        first = keras.tree.flatten(batch[0])[0]
        return {"loss": loss, "squares": tf.reduce_mean(tf.square(keras.tree.flatten(self.distributed.weights)[0])),
                "rows": [tf.reduce_mean(tf.ones(tf.shape(first)[:1], "float64"))]}  # fmt: skip

    def apply(self, gradients: Any, variables: Any) -> None:
        self.own_optimizer.apply(gradients, variables)

    def apply_pairs(self, gradients: Any, variables: Any) -> None:
        self.own_optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def apply_clipped(self, gradients: Any, variables: Any) -> None:
        """Clips them by their norm over the batch."""
        clipped, _ = tf.clip_by_global_norm(self.all_reduce(gradients), 0.5)
        self.own_optimizer.apply(clipped, variables)

    def test_step(self, batch: Any) -> Any:
        return self.loss_of(batch, training=False)

    def data(self) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(self.rows())
        return self.make(
            "data", plain=lambda: dataset.batch(self.batch), shuffled=lambda: dataset.shuffle(9, 3).batch(self.batch),
            pipeline=lambda: random_pipeline(dataset, self.batch, self.pick),
        )  # fmt: skip

    def driver(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what trains on all batches of data that each rank has its share of."""

        def one(batch: Any) -> Any:
            return self.reduce("mean", self.run_step(step, (batch,)))

        traced, function = (tf.function(each, reduce_retracing=True) for each in (one, step))

        @tf.function(reduce_retracing=True)
        def all_in_graph(data: Any) -> None:
            for batch in data:
                one(batch)

        return self.make(
            "driven", batches=lambda: lambda data: [traced(batch) for batch in data],
            eagerly=lambda: lambda data: [one(batch) for batch in data],
            step=lambda: lambda data: [self.reduce("mean", self.run_step(function, (b,))) for b in data],
            in_graph=lambda: all_in_graph,
        )  # fmt: skip

    def run(self, distribute: Distribute) -> Iterator[tuple[str, Any]]:
        self.begin(distribute)
        train, test = self.driver(self.train_step), self.driver(self.test_step)
        data, other = self.shard(self.data()), self.shard(self.data())
        for epoch in range(2):
            yield f"{epoch}", [train(data), test(other), self.distributed.get_weights()]
            yield f"{epoch} metrics", [float(metric.result()) for metric in (self.mean, self.seen, self.tested)]
            for metric in (self.mean, self.seen, self.tested):
                metric.reset_state()
        if not getattr(self.own_optimizer, "gradient_accumulation_steps", None):
            yield "optimizer", [np.asarray(variable) for variable in self.own_optimizer.variables]


def run_loop(seed: int, distribute: Distribute, replicas: int) -> tuple[Numbers, str]:
    """Returns the numbers of a loop, and what it chose."""
    loop = RandomLoop(seed, replicas)
    return {name: plain(value) for name, value in loop.run(distribute)}, str(loop.chosen)
