"""A function that runs on a worker, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_dist.backends.parameter_server.shards import ShardBatch


@dataclasses.dataclass(eq=False)
class Job:
    """A function to run on a worker, and its result.

    Args:
        function: A `RemoteFunction` or `RemoteSteps`; `None` to read only.
        args: Its arguments, tensors of the coordinator.
        batch: A batch that the worker reads itself, the function's first argument.
        attempts: How often it has failed.
        started: When it was started.
        runs: How often it was started.
        view: Of the cluster, when it was started.
        done: True once it has ended.
        value: What the function returned, see `RemoteFunction.results`.
        error: What it raised.
    """

    function: Any
    args: Sequence[Any]
    batch: ShardBatch | None = None
    attempts: int = 0
    started: float = 0.0
    runs: int = 0
    view: int = 0
    done: bool = False
    value: Any = None
    error: BaseException | None = None

    @property
    def steps(self) -> int:
        """How many steps it makes, at most."""
        return 1 if self.batch is None else self.batch.count
