"""`kd.shard`, `kd.run` and `kd.reduce` when this process leads several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.comm.replicas import ReplicaBackend, mean_of_shares
from keras_dist.compat import tf_compat
from keras_dist.data import sources
from keras_dist.data.shares import Shares, examples_of, take_shares
from keras_dist.step import step as step_module
from keras_dist.step.draws import placed
from keras_dist.step.step import Step
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.loop import RankLoop
from keras_dist.training.rows import batch_of_shares


class ReplicaLoop(RankLoop):
    """The functions of a custom training loop on the replicas that this process leads."""

    _backend: ReplicaBackend

    def __init__(self, backend: ReplicaBackend) -> None:
        super().__init__(backend)
        with tf.init_scope(), tf_compat.variables_made_by(), tf.device("CPU:0"):
            zeros = tf.zeros([backend.replicas], tf.int32)
            self._counts_by_replica = tf.Variable(zeros, trainable=False, name="keras_dist_loop_counts")

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return sources.split_for_replicas(dataset, self._backend.replicas)

    def _sharded(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        return self._split(source(tf.distribute.InputContext(1, 0, self._backend.replicas)))

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Returns the replicas' outputs as `tf.distribute.DistributedValues`, for `kd.reduce`."""
        return super()._run(function, args if any(isinstance(arg, Shares) for arg in args) else self._cut(args))

    def _total_of(self, args: tuple[Any, ...]) -> Any:
        return next(arg for arg in args if isinstance(arg, Shares)).parts[0].total

    def whole(self, args: tuple[Any, ...]) -> Any:
        return tuple(batch_of_shares(arg.parts) if isinstance(arg, Shares) else arg for arg in args)

    def _run_on_shares(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        shares = next(arg for arg in args if isinstance(arg, Shares))
        self._counts_by_replica.assign(tf.stack(shares.counts))
        function = tf_compat.converted(function)

        def run(index: int) -> Any:
            replica_args = [examples_of(arg.parts[index]) if isinstance(arg, Shares) else arg for arg in args]
            step = Step.of(shares.parts[index], index)
            step.applied = self._applied if index == 0 else None
            if self.exact:
                replica_args = placed(self._backend, step, replica_args)
            with step_module.entered(step):
                return function(*replica_args)

        with whole_batch(self._backend, self._distribute, exact=self.exact):
            outputs = self._backend.run(run, shares.counts)
        return tf.nest.map_structure(_of_each_replica, *outputs)

    def _cut(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cuts the shares of all replicas, where the script passes tensors without `kd.shard`."""
        return tuple(take_shares(arg, self._backend.replicas) if has_examples(arg) else arg for arg in as_batches(args))

    def _reduce(self, operation: str, value: Any) -> Any:
        if not isinstance(value, tf.distribute.DistributedValues):
            return value
        values = tf_compat.replica_values(value)
        if operation == "sum":
            return tf.add_n(values)
        return mean_of_shares(values, tf.unstack(self._counts_by_replica))


def as_batches(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of `kd.run` with tensors in place of arrays."""
    return tuple(tf.convert_to_tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args)


def has_examples(arg: Any) -> bool:
    """True if an argument of `kd.run` is a batch: a structure of tensors that are no scalars."""
    leaves = tf.nest.flatten(arg)
    return bool(leaves) and all(tf.is_tensor(leaf) and leaf.shape.rank != 0 for leaf in leaves)


def _of_each_replica(*values: Any) -> Any:
    return tf_compat.per_replica(values) if tf.is_tensor(values[0]) else values[-1]
