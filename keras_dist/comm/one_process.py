"""What backends with one process have in common: there are no other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_dist.comm.backend import Backend
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError


class OneProcess(Backend):
    """A backend with one process: a null object, so that no caller asks whether there are other ranks."""

    def start(self, launch: Launch | None) -> None:
        pass

    def refuse_launch(self, launch: Launch | None) -> None:
        """Raises `ConfigurationError` if this process is one of several: each would train alone, on all devices."""
        if launch is not None and launch.topology.size > 1:
            raise ConfigurationError(
                f"The backend {self.name!r} needs one process for all devices, but several were started.",
                f"{launch.topology}, started by {launch.launcher}",
                "Start the script with plain `python`, or use backend='auto'.",
            )

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        return [value]

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        return list(gradients), row[None, :]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return numbers

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        return payload

    def all_gather(self, tensor: Any, name: str) -> Any:
        return tensor
