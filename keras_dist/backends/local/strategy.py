"""What Keras sees in place of a `tf.distribute.Strategy` when several replicas are in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.backends.local.replicas import ReplicaBackend
from keras_dist.compat import keras_model
from keras_dist.data import groups, sources
from keras_dist.data.shares import Shares, take_shares
from keras_dist.step import step as step_module
from keras_dist.step.step import Step
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.strategy import RankStrategy, as_tensors, rows_that_count


class LocalStrategy(RankStrategy):
    """The replicas of one model in this process, which all read one dataset."""

    _backend: ReplicaBackend

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.in_shares(dataset, self._backend.replicas)

    def _in_groups(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return groups.in_groups_of_shares(dataset, self._backend.replicas, per_epoch)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs one step of Keras on the shares of all replicas."""
        (batch,) = args
        if self.is_local:
            return function(batch)
        shares = batch if isinstance(batch, Shares) else take_shares(as_tensors(batch), self._backend.replicas)
        if function not in (self._model.train_step, self._model.test_step):
            outputs = self._backend.run(lambda index: function(shares.parts[index].data), shares.counts)
            return _in_order(outputs, shares)
        self._last_count.assign(shares.parts[0].total)
        with whole_batch(self._backend, self._model):
            outputs = self._backend.run(_step_on(shares, function), shares.counts, self._model.metrics_variables)
        if keras_model.logs_are_metrics(self._model, outputs[-1]):
            return outputs[-1]  # the last replica has counted the others' shares too
        return tf.nest.map_structure(lambda *leaves: mean(leaves, shares), *outputs)


def _step_on(shares: Shares, function: Callable[..., Any]) -> Callable[[int], Any]:
    def run(index: int) -> Any:
        share = shares.parts[index]
        with step_module.entered(Step(share.count, share.total, share.fingerprint)):
            return function(share.data)

    return run


def mean(values: Any, shares: Shares) -> Any:
    """Returns the mean of the replicas' values, by the number of examples; of no numbers the last one."""
    if not tf.is_tensor(values[-1]) or not values[-1].dtype.is_floating:
        return values[-1]
    part_of = [Step(part.count, part.total, part.fingerprint).part for part in shares.parts]
    parts = [
        tf.math.multiply_no_nan(value, tf.cast(part, value.dtype)) for value, part in zip(values, part_of, strict=True)
    ]
    return tf.add_n(parts)


def _in_order(outputs: list[Any], shares: Shares) -> Any:
    """Puts the predictions of all replicas behind one another."""

    def together(*parts: Any) -> Any:
        counted = zip(parts, shares.counts, strict=True)
        return tf.concat([rows_that_count(part, count) for part, count in counted], 0)

    return tf.nest.map_structure(together, *outputs)
