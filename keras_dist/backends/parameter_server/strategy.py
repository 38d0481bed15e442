"""What Keras sees in place of a `tf.distribute.Strategy` on the coordinator: it reads, and feeds the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.backends.parameter_server.batches import whole_of
from keras_dist.backends.parameter_server.reading import stood_for
from keras_dist.compat import keras_fit
from keras_dist.data import groups
from keras_dist.training.strategy import RankStrategy


class Tried(NamedTuple):
    """A step that a verification tries out. The engine knows how.

    Args:
        read: Returns the shares of the batch, one after the other.
        run: Makes the step on the workers, with exact noise and statistics. Takes a list as of `Step.applied`.
        spec: What the step is traced for, `None` for these data.
    """

    read: Callable[[], list[Any]]
    run: Callable[[list[Any]], Any]
    spec: Any


class CoordinatorStrategy(RankStrategy):
    """Reads the script's own batches, or as many of them together as there are workers."""

    _spec: Any = None  # what the step that is tried out is traced for
    run_rows: Callable[..., Any]  # makes a step of a kind on a few rows; set by the engine

    def local(self) -> contextlib.AbstractContextManager[None]:
        """There is no model of this process alone: its variables are on the servers."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if (on_workers := stood_for(dataset)) is not None:  # each worker reads a batch of its own anyway
            self.given, self.element_spec, self._groups_next = dataset, on_workers.element_spec, False
            self.distribute = None
            return dataset
        return super().experimental_distribute_dataset(dataset)

    def prepare(self, epoch_iterator: Any) -> None:
        if isinstance(keras_fit.distributed_dataset(epoch_iterator), tf.data.Dataset):
            super().prepare(epoch_iterator)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return dataset

    # --- Verification: the engine asks for it. Its steps are not run by Keras. ---

    def whole(self, batch: Tried) -> Any:
        self._spec = batch.spec
        return whole_of(batch.read())

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        """Keras may compute something else if it knows the number of rows: it counts a batch, or each row of it."""
        if self._spec is not None and not tf.executing_eagerly():
            whole = tf.nest.map_structure(_of_shape, whole, self._spec)
        return super().plain(function, whole)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        assert self._applied is not None
        if isinstance(batch, Tried):
            return batch.run(self._applied)
        return self.run_rows(self.kind_of(function), batch, self._applied)

    def _group_batches(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return groups.group_for_replicas(dataset, self._backend.num_replicas, per_epoch)


def _of_shape(leaf: Any, spec: Any) -> Any:
    return tf.compat.v1.placeholder_with_default(leaf, spec.shape) if isinstance(leaf, tf.Tensor) else leaf
