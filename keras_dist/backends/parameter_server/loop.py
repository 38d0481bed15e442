"""`kd.shard`, `kd.run` and `kd.reduce` with parameter servers: the workers are replicas in the coordinator's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.reading import OnWorkers
from keras_dist.backends.parameter_server.source import Function, current_context
from keras_dist.data.shares import examples_of, shard_dataset
from keras_dist.errors import NotSupportedError
from keras_dist.training.replica_loop import ReplicaLoop


class CoordinatorLoop(ReplicaLoop):
    """A step is one TensorFlow function, of which each worker runs its part. It needs no engine, and waits for all.

    The coordinator gives `kd.shard` a dataset function. That is traced for each worker, and may shard a dataset.
    """

    _backend: Coordinator

    def _sharded(self, source: Function) -> Any:
        context = current_context()
        return OnWorkers(source, self._backend) if context is None else source(context)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        context = current_context()
        if context is None:
            check_mode(self._backend, "kd.shard(dataset)")
            return super()._split(dataset)
        # A share may be empty. It is read all the same: the shares of a batch are read in the same step.
        return shard_dataset(dataset, context.input_pipeline_id, context.num_input_pipelines).map(examples_of)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        check_mode(self._backend, "kd.run")
        return super().run(function, args)


def check_mode(backend: Coordinator, call: str) -> None:
    """Raises `NotSupportedError` in asynchronous mode, for what belongs to a custom training loop."""
    if backend.mode == "async":
        raise NotSupportedError(
            "A custom training loop waits for the result of each step, so its workers can't run ahead of each other.",
            f"{call} with kd.ParameterServer(mode='async')",
            "Use mode='sync', or put the step into `train_step` of a keras.Model and use `fit`.",
        )
