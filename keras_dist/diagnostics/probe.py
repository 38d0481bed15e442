"""What `keras-dist env` learns by importing TensorFlow: a process of its own, since that takes seconds or fails."""

from __future__ import annotations

import json
from typing import Any

from keras_dist import environment
from keras_dist.backends import backend_class, choose
from keras_dist.errors import ConfigurationError


def main() -> None:
    """Prints the facts as a last line of JSON."""
    print(json.dumps({"horovod": _horovod(), "tpu": _tpu(), "backend": _backend()}))


def _horovod() -> dict[str, Any] | None:
    """Returns what Horovod was built with, `None` if it is not installed."""
    from keras_dist.backends.horovod.runtime import load

    try:
        hvd = load()
    except ConfigurationError as error:
        is_missing = isinstance(error.__cause__, ModuleNotFoundError)
        return None if is_missing else {"error": str(error).replace("\n", " ")}
    return {part: bool(getattr(hvd, f"{part}_built")()) for part in ("gloo", "mpi", "nccl", "ccl", "cuda", "rocm")}


def _tpu() -> dict[str, Any]:
    try:
        launch = environment.detect_launch()
    except ConfigurationError:  # the fact "launcher" has it
        launch = None
    affinity = backend_class("tpu").affinity(launch)
    return {"is_used": affinity.score > 0, "reason": affinity.reason}


def _backend() -> dict[str, Any]:
    """Returns the backend that `kd.init()` would choose in this environment, and why."""
    try:
        backend, affinity = choose(environment.detect_launch())
    except ConfigurationError as error:
        return {"error": str(error).replace("\n", " ")}
    return {"name": backend.name, "reason": affinity.reason}
