"""The options of `kd.distribute`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import keras

from keras_dist import environment
from keras_dist.comm.backend import Backend
from keras_dist.data import sources
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.logging import logger
from keras_dist.step.optimizer import RULES, scale
from keras_dist.training.executions import AutoExecutions


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that the script passed, see `kd.distribute`; `None` for an option that it did not pass."""

    data: str | None = None
    batch: str | None = None
    scale_learning_rate: str | None = None
    exact: bool | None = None
    verify: bool | Literal["auto"] | None = None
    steps_per_execution: str | None = None

    def __post_init__(self) -> None:
        for name, choices, also in (
            ("data", sources.MODES, ""),
            ("batch", ("global", "per_replica"), ""),
            ("verify", ("auto", True, False), ""),
            ("scale_learning_rate", RULES, ", or None"),
            ("steps_per_execution", ("auto",), ". A number is for `compile`"),
        ):
            if (value := getattr(self, name)) is not None:
                check_choice("option", name, value, choices, also=also)

    def verifies_on(self, backend: Backend) -> bool:
        """True if the script or the environment asks for a verification.

        Raises `NotSupportedError` if the script asks for it, and steps are not meant to be those of one process. What
        the environment asks for is for any script.
        """
        from_environment = environment.get(environment.VERIFY) not in (None, "0", "auto")
        is_asked = from_environment if self.verify is None else self.verify is True
        if not is_asked or (reason := backend.not_of_one_process) is None:
            return is_asked
        if self.verify:
            raise NotSupportedError(
                f"A verification compares steps with those of one process, but {reason}.",
                f"verify=True on the backend {backend.name!r}",
                "Leave `verify` out, or verify the script with another mode or backend.",
            )
        _note_ignored(reason, backend.topology.is_chief)
        return False

    def checks_own_code(self, backend: Backend) -> bool:
        """True if the first steps that run code of the script are compared with one process on a few rows."""
        asked = environment.get(environment.VERIFY, "auto") if self.verify is None else self.verify
        return asked == "auto" and backend.not_of_one_process is None

    def automatic_executions(self, model: keras.Model, backend: Backend) -> AutoExecutions | None:
        """Returns what chooses the number of steps in one execution, `None` if the script does not ask for it."""
        if self.steps_per_execution is None or backend.puts_steps_together:
            return None
        return AutoExecutions(model, backend, self.verifies_on(backend))

    def scale(self, optimizer: Any, num_replicas: int) -> None:
        if self.scale_learning_rate is not None and num_replicas > 1:
            scale(optimizer, self.scale_learning_rate, num_replicas)

    def check_again(self, later: Options) -> None:
        """Raises `ConfigurationError` if a later call of `kd.distribute` passes other options."""
        passed = {name: value for name, value in dataclasses.asdict(later).items() if value is not None}
        changed = {name: value for name, value in passed.items() if value != getattr(self, name)}
        if changed:
            raise ConfigurationError(
                "The model is already distributed, with other options.",
                ", ".join(f"{name}={value!r} after {name}={getattr(self, name)!r}" for name, value in changed.items()),
                "Call kd.distribute(model) once, or with the same options.",
            )

    def check_for_optimizer(self) -> None:
        """Raises `ConfigurationError` if an option does not apply to a custom training loop."""
        for name, remedy in (
            ("batch", "pass kd.shard batches that are kd.num_replicas() times as large."),
            ("steps_per_execution", "put several calls of kd.run into one tf.function."),
        ):
            if (value := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f"The option `{name}` is for models only: it changes `fit`.",
                    f"{name}={value!r} for an optimizer",
                    f"In a custom training loop, {remedy}",
                )


@functools.cache
def _note_ignored(reason: str, is_chief: bool) -> None:
    if is_chief:
        logger().warning("%s is ignored: %s.", environment.VERIFY, reason)
