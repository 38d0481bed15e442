"""One process: the null object, so that nobody above asks whether training is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.base import Affinity, Backend
from keras_dist.environment import Launch


class Serial(Backend):
    """One process on its own, plain Keras.

    Example:

    >>> import keras_dist as kd
    >>> kd.init("serial")
    >>> kd.size()
    1
    """

    name = "serial"

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        return Affinity(1, "no launcher found; to use more processes: keras-dist run -np N script.py")

    def start(self, launch: Launch | None) -> None:
        pass

    def describe_devices(self) -> str:
        gpus = len(tf.config.list_physical_devices("GPU"))
        return f"{gpus} GPU" if gpus else "CPU"

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
