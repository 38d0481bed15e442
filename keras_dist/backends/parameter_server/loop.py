"""`kd.shard`, `kd.run` and `kd.reduce` with parameter servers: data that workers read, for `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_dist.backends.parameter_server.reading import shard
from keras_dist.training.loop import FitOnly

if TYPE_CHECKING:
    from keras_dist.backends.parameter_server.backend import ParameterServer


class CoordinatorLoop(FitOnly):
    """Hands what `kd.shard` is given to the workers."""

    _backend: ParameterServer

    def shard(self, source: Any) -> Any:
        on_workers = shard(source, self._backend)
        if on_workers is None:
            raise self._refused()
        return on_workers
