"""TPU cores emulated on the CPU, for tests: TPUStrategy's own code without a TPU."""

from __future__ import annotations

from typing import Any

from keras_dist.backends.tpu.backend import TPU
from keras_dist.compat import tpu_emulation
from keras_dist.environment import Launch


class EmulatedTPU(TPU):
    """TPU cores. Everything in them is real except the connection, the compiler and the chip."""

    def __init__(self, cores: int = 1) -> None:
        super().__init__("local")
        self._cores = cores

    def start(self, launch: Launch | None) -> None:
        self._cpu = tpu_emulation.runs_on_cpu()  # for as long as this process lives
        self._cpu.__enter__()
        super().start(launch)

    def _connect(self) -> Any:
        return tpu_emulation.emulated_strategy(self._cores)

    def describe_devices(self) -> str:
        return f"{self._cores} TPU core{'s' if self._cores > 1 else ''}, emulated on the CPU"
