"""`kd.shard`, `kd.run` and `kd.reduce` with parameter servers: data that workers read, for `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.reading import OnWorkers
from keras_dist.backends.parameter_server.source import Function, current_context
from keras_dist.data.shares import examples_of, shard_dataset
from keras_dist.training.loop import FitOnly


class CoordinatorLoop(FitOnly):
    """The coordinator gives `kd.shard` a dataset function. That is traced for each worker, and may shard a dataset."""

    _backend: Coordinator

    def _sharded(self, source: Function) -> Any:
        context = current_context()
        return OnWorkers(source, self._backend) if context is None else source(context)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        context = current_context()
        if context is None:
            raise self._refused()
        # A share may be empty. It is read all the same: the shares of a batch are read in the same step.
        return shard_dataset(dataset, context.input_pipeline_id, context.num_input_pipelines).map(examples_of)
