"""The options of `kd.distribute`."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_dist.data import sources
from keras_dist.errors import ConfigurationError, check_choice
from keras_dist.step import learning_rate

_BATCHES = ("global", "per_replica")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the script has asked for; `None` where it has said nothing.

    Args:
        data: Where data come from, one of `sources.MODES`.
        batch: Whose batch the script's is: `"global"` that of all ranks together, `"per_replica"` that of each.
        scale_learning_rate: How the learning rate grows with the number of ranks, one of `learning_rate.RULES`.

    Raises:
        ConfigurationError: If a value is unknown.
    """

    data: str | None = None
    batch: str | None = None
    scale_learning_rate: str | None = None

    def __post_init__(self) -> None:
        if self.data is not None:
            check_choice("option", "data", self.data, sources.MODES)
        if self.batch is not None:
            check_choice("option", "batch", self.batch, _BATCHES)
        if self.scale_learning_rate is not None:
            rules = learning_rate.RULES
            check_choice("option", "scale_learning_rate", self.scale_learning_rate, rules, also=", or None")

    def scale(self, optimizer: Any, num_replicas: int) -> None:
        """Scales an optimizer's learning rate by the number of replicas, if the script has asked for it."""
        if self.scale_learning_rate is not None and num_replicas > 1:
            learning_rate.scale(optimizer, self.scale_learning_rate, num_replicas)

    def check_again(self, later: Options) -> None:
        """Raises `ConfigurationError` if a second `kd.distribute` asks for something else than the first."""
        given = {name: value for name, value in dataclasses.asdict(later).items() if value is not None}
        other = {name: value for name, value in given.items() if value != getattr(self, name)}
        if other:
            raise ConfigurationError(
                "The model is distributed already, with other options.",
                ", ".join(f"{name}={value!r} after {name}={getattr(self, name)!r}" for name, value in other.items()),
                "Call kd.distribute(model) once, or with the same options.",
            )

    def check_for_optimizer(self) -> None:
        """Raises `ConfigurationError` if an option is of no use in a custom loop."""
        if self.batch is not None:
            raise ConfigurationError(
                "The option `batch` is for a model and its `fit`.",
                f"batch={self.batch!r} for an optimizer",
                "In a loop of your own, make the batches that kd.shard gets kd.num_replicas() times as large.",
            )
