"""Runs a script, unedited, on one emulated TPU core: `python on_emulated_tpu.py script.py its arguments`."""

from __future__ import annotations

import dataclasses
import runpy
import sys

from keras_dist.backends import BACKENDS

for name, entry in BACKENDS.items():
    BACKENDS[name] = dataclasses.replace(entry, backend=entry.emulation or entry.backend)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
