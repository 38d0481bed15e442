"""What backends with one process have in common: nobody else is there to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_dist.backends.base import Backend
from keras_dist.environment import Launch


class OneProcess(Backend):
    """A backend with one process: the null object, so that nobody above asks whether there are others."""

    def start(self, launch: Launch | None) -> None:
        pass

    def exchange(self, call: str, value: Any = None) -> list[Any]:
        return [value]

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def sum_gradients(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        return list(gradients), row[None, :]

    def sum_numbers(self, numbers: Any, name: str) -> Any:
        return numbers

    def scatter_bytes(self, payload: Any, lengths: Any, name: str) -> Any:
        return payload

    def gather_rows(self, tensor: Any, name: str) -> Any:
        return tensor
