"""What backends with one process have in common: nobody else is there to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_dist.comm.backend import Backend
from keras_dist.environment import Launch


class OneProcess(Backend):
    """A backend with one process: the null object, so that nobody above asks whether there are others."""

    def start(self, launch: Launch | None) -> None:
        pass

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
