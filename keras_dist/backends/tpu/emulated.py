"""A TPU core emulated on the CPU, for tests: TPUStrategy's own code without a TPU."""

from __future__ import annotations

from typing import Any

from keras_dist.backends.tpu.backend import TPU
from keras_dist.compat import tpu_compiler
from keras_dist.environment import Launch


class EmulatedTPU(TPU):
    """One TPU core. Everything in it is real except the connection, the compiler and the chip."""

    def __init__(self, name: str = "local") -> None:
        super().__init__(name)

    def start(self, launch: Launch | None) -> None:
        self._cpu = tpu_compiler.runs_on_cpu()  # for as long as this process lives
        self._cpu.__enter__()
        super().start(launch)

    def _connect(self) -> Any:
        return tpu_compiler.emulated_strategy(1)

    def describe_devices(self) -> str:
        return "1 TPU core, emulated on the CPU"
