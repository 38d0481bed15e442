"""What the coordinator and the workers tell each other about a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.data.shares import any_batch_size
from keras_dist.errors import NotSupportedError
from keras_dist.step.step import Step

Logs = dict[str, Any]


class Known(NamedTuple):
    """What earlier runs of a step have told the coordinator.

    Args:
        gathered: What the shares have told each other, in the order of the shares; empty in the first run.
        kept: For each phase that was applied the values that the step needs again.
    """

    gathered: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()

    def of_any_length(self) -> Known:
        """Returns these specifications with any number of shares and examples."""
        return self._replace(gathered=tf.nest.map_structure(any_batch_size, self.gathered))


class Outputs(NamedTuple):
    """What a worker returns of a step.

    Args:
        logs: What the step has returned, except for what is computed from the metrics.
        metrics: Their states. They start from a reset.
        seeds: The random states after the step.
        statistics: Values of what else the step has assigned, such as BatchNormalization's moving averages.
        gradients: For each call of `apply` what this share counts in the gradients of the batch.
        told: What this share has told the others, for losses that are no mean over the examples.
    """

    logs: Logs
    metrics: Sequence[Any]
    seeds: Sequence[Any]
    statistics: Sequence[Any]
    gradients: Sequence[Sequence[Any]] = ()
    told: Sequence[Any] = ()


@dataclasses.dataclass
class Exchange:
    """What the shares tell each other. They can't meet within a step, so the coordinator gathers it between two runs.

    Args:
        gathered: The concatenated tensors of all shares; empty in the first run, which only notes what this one tells.
    """

    gathered: Sequence[Any]
    told: list[Any] = dataclasses.field(default_factory=list)

    def step(self, data: Any, count: Any, total: Any, index: Any) -> Step:
        """Returns the step on a share. In the first run this share is the only one."""
        return Step(count, total, tf.constant(0.0), replica=index if self.gathered else 0, data=data)

    def all_gather(self, tensor: Any, name: str) -> Any:
        self.told.append(tensor)
        return self.gathered[len(self.told) - 1] if self.gathered else tensor

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return tf.reduce_sum(self.all_gather(numbers[None], name), 0)

    def check_layer(self, name: str) -> None:
        raise NotSupportedError(
            "Workers can't gather a batch within a step, but a layer needs the whole batch: it collects state from it, "
            "or adds a loss that is no mean over the examples.",
            f"the layer {name!r}",
            "Use a backend that reduces in the step: horovod, multi_worker, mirrored.",
        )
