"""The base class of backends with several replicas in one process."""

from __future__ import annotations

import functools

import keras

from keras_dist.backends.local.strategy import LocalStrategy
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.training.loop import Loop
from keras_dist.training.model import LocalTraining
from keras_dist.training.replica_loop import ReplicaLoop


class LocalBackend(LocalTraining, ReplicaBackend):
    """A backend whose replicas are devices of this process. `start` calls `_use`."""

    def strategy_of(self, model: keras.Model, data: str | None) -> LocalStrategy:
        return LocalStrategy(model, self, data)

    @functools.cached_property
    def loop(self) -> Loop:
        return Loop() if self.num_replicas == 1 else ReplicaLoop(self)
