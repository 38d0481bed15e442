"""Runs a script, as it is, on one emulated TPU core: `python on_emulated_tpu.py script.py its arguments`."""

from __future__ import annotations

import runpy
import sys

from keras_dist.backends import BACKENDS
from keras_dist.diagnostics.emulated_tpu import EmulatedTPU

BACKENDS["tpu"] = f"{EmulatedTPU.__module__}:{EmulatedTPU.__name__}"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
