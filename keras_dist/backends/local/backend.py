"""What backends with several replicas in one process have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.replicas import ReplicaBackend, mean_of_shares
from keras_dist.data import sources
from keras_dist.data.shares import Share, Shares, take_shares
from keras_dist.step import step as step_module
from keras_dist.step.gathering import placed
from keras_dist.step.step import Step, check_shapes
from keras_dist.training.loop import Loop, ReplicaLoop
from keras_dist.training.model import LocalTraining
from keras_dist.training.own_code import as_tensors, batch_of_shares, real_rows
from keras_dist.training.strategy import RankStrategy


class LocalStrategy(RankStrategy):
    """The strategy of a process with several replicas, which read one dataset."""

    _backend: ReplicaBackend

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.split_for_replicas(dataset, self._backend.replicas)

    def _group_batches(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return sources.group_for_replicas(dataset, self._backend.replicas, per_epoch)

    def describe_share(self) -> str:
        size = self._backend.replicas
        return f"a step of each of the {size} replicas computes its share only: about n / {size} rows of n."

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        self.has_run = True
        shares = Shares(tuple(self._shares_of(batch)))
        if (kind := self.kind_of(function)) is None:
            with self._whole_batch():
                outputs = self._backend.run(self._step_on(shares, function), shares.counts)
            return _concatenate(outputs, shares)
        self._last_count.assign(shares.parts[0].total)
        self._has_whole_batches.assign(shares.parts[0].is_whole)
        with self._whole_batch(), self.logs.recording():
            step = self._step_on(shares, lambda data: self.logs.note(kind, function(data)))
            outputs = self._backend.run(step, shares.counts, self._model.metrics_variables)
        if not isinstance(outputs[-1], dict):
            return outputs[-1]
        # The last replica's metrics include the other shares.
        return {
            name: last if self.logs.is_known(kind, name) else _combined([logs[name] for logs in outputs], shares.counts)
            for name, last in outputs[-1].items()
        }

    def _shares_of(self, batch: Any) -> Sequence[Share]:
        return (batch if isinstance(batch, Shares) else take_shares(as_tensors(batch), self._backend.replicas)).parts

    # --- Verification ---

    def _total_of(self, batch: Any) -> Any:
        return batch.parts[0].total if isinstance(batch, Shares) else super()._total_of(batch)

    def whole(self, batch: Any) -> Any:
        return batch_of_shares(batch.parts) if isinstance(batch, Shares) else as_tensors(batch)

    def _step_on(self, shares: Shares, function: Callable[..., Any]) -> Callable[[int], Any]:
        def run(index: int) -> Any:
            share = shares.parts[index]
            step = Step.of(share, index)
            step.applied = self._applied if index == 0 else None
            data = placed(self._backend, step, share.data) if self.exact else share.data
            with step_module.entered(step):
                return function(data)

        return run


def _combined(leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
    """Returns the mean of the replicas' floats. Otherwise the last value: that replica has seen the other shares."""
    is_float = tf.is_tensor(leaves[-1]) and leaves[-1].dtype.is_floating
    return mean_of_shares(leaves, counts) if is_float else leaves[-1]


def _concatenate(outputs: list[Any], shares: Shares) -> Any:
    def concatenate(*by_replica: Any) -> Any:
        rows = [real_rows(rows, count) for rows, count in zip(by_replica, shares.counts, strict=True)]
        if isinstance(rows[0], tf.Tensor):
            rows[0] = check_shapes(tf.stack([tf.shape(part)[1:] for part in rows]), rows[0])
        return tf.concat(rows, 0)

    return tf.nest.map_structure(concatenate, *outputs)


class LocalBackend(LocalTraining, ReplicaBackend):
    """A backend whose replicas are devices of this process. `start` calls `_use`."""

    def strategy_of(self, model: keras.Model, data: str | None) -> LocalStrategy:
        return LocalStrategy(model, self, data)

    @functools.cached_property
    def loop(self) -> Loop:
        return Loop() if self.num_replicas == 1 else ReplicaLoop(self)
