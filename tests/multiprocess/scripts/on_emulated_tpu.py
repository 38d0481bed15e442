"""Runs a script, as it is, on one emulated TPU core: `python on_emulated_tpu.py script.py its arguments`.

All is real but for the connection, the compiler, and the chip.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import tensorflow as tf

from keras_dist.backends import tpu_connect
from keras_dist.diagnostics import tpu_compiler


class Emulated(tf.distribute.TPUStrategy):
    def __init__(self, resolver: Any) -> None:
        super().__init__(resolver)
        tpu_compiler.keep_variables_apart(self)


def main() -> None:
    tf.distribute.TPUStrategy = Emulated
    tpu_connect.connect = lambda place, seconds: tpu_compiler.NoTPU(1)  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    with tpu_compiler.runs_on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
