"""The three verbs of a custom training loop where several replicas are in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.backends.local.replicas import ReplicaBackend
from keras_dist.compat import tf_compat
from keras_dist.data import sources
from keras_dist.data.shares import Shares, examples_of, take_shares
from keras_dist.step import step as step_module
from keras_dist.step.step import Step
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.loop import RankLoop


class LocalLoop(RankLoop):
    """A custom loop on the replicas of this process.

    Args:
        backend: Runs the replicas.
    """

    _backend: ReplicaBackend

    def __init__(self, backend: ReplicaBackend) -> None:
        super().__init__(backend)
        with tf.device("CPU:0"), tf.init_scope():
            zeros = tf.zeros([backend.replicas], tf.int32)
            self._count_of_each = tf.Variable(zeros, trainable=False, name="keras_dist_loop_counts")

    def _share(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return sources.in_shares(dataset, self._backend.replicas)

    def _own(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        return self._share(source(tf.distribute.InputContext(1, 0, self._backend.replicas)))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`. What the replicas return is a `tf.distribute.DistributedValues`, for `kd.reduce`."""
        if not any(isinstance(arg, Shares) for arg in args):
            args = self._cut(args)
        parts = next(arg for arg in args if isinstance(arg, Shares)).parts
        self._count_of_each.assign(tf.stack([part.count for part in parts]))
        function = tf_compat.converted(function)

        def run(index: int) -> Any:
            own = [examples_of(arg.parts[index]) if isinstance(arg, Shares) else arg for arg in args]
            part = parts[index]
            with step_module.entered(Step(part.count, part.total, part.fingerprint)):
                return function(*own)

        with whole_batch(self._backend):
            outputs = self._backend.run(run, [part.count for part in parts])
        return tf.nest.map_structure(_of_each_replica, *outputs)

    def _cut(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Without `kd.shard` the examples are those of all replicas, and cut here."""
        tensors = [tf.convert_to_tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        return tuple(
            take_shares(arg, self._backend.replicas) if _has_examples(arg) else arg for arg in tensors
        )

    def _reduce(self, operation: str, value: Any) -> Any:
        if not isinstance(value, tf.distribute.DistributedValues):
            return value
        parts = tf_compat.parts_of(value)
        if operation == "sum":
            return tf.add_n(parts)
        counts = tf.cast(self._count_of_each, parts[0].dtype)
        weights = counts / tf.reduce_sum(counts)
        return tf.add_n([tf.math.multiply_no_nan(part, weights[index]) for index, part in enumerate(parts)])


def _has_examples(arg: Any) -> bool:
    leaves = tf.nest.flatten(arg)
    return bool(leaves) and all(tf.is_tensor(leaf) and leaf.shape.rank != 0 for leaf in leaves)


def _of_each_replica(*parts: Any) -> Any:
    return tf_compat.per_replica(parts) if tf.is_tensor(parts[0]) else parts[-1]
