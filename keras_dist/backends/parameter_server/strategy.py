"""What Keras sees in place of a `tf.distribute.Strategy` on the coordinator: it reads, and feeds the workers."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.reading import stood_for
from keras_dist.compat import keras_fit
from keras_dist.data import groups
from keras_dist.training.strategy import RankStrategy


class CoordinatorStrategy(RankStrategy):
    """Reads the script's own batches, or as many of them together as there are workers."""

    def local(self) -> contextlib.AbstractContextManager[None]:
        """There is no model of this process alone: its variables are on the servers."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if (on_workers := stood_for(dataset)) is not None:  # each worker reads a batch of its own anyway
            self.element_spec, self._groups_next = on_workers.element_spec, False
            return dataset
        return super().experimental_distribute_dataset(dataset)

    def prepare(self, epoch_iterator: Any) -> None:
        if isinstance(keras_fit.distributed_dataset(epoch_iterator), tf.data.Dataset):
            super().prepare(epoch_iterator)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return dataset

    def _group_batches(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return groups.group_for_replicas(dataset, self._backend.num_replicas, per_epoch)
