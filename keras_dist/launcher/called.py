"""A rank of `kd.launch`: runs the function that lies in a folder, and leaves there what it returns or raises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.pickled import cloudpickle_module, dumps_failure, loads

CALL, RESULT = "call", "result"


def error_file(rank: int) -> str:
    return f"error-{rank}"


def main(folder: str) -> None:
    """Runs the function: the program of a rank."""
    launch = environment.detect_launch()
    rank = launch.topology.rank if launch else 0
    try:
        function, args = loads(Path(folder, CALL).read_bytes())
        result = function(*args)
        if rank == 0:
            _write(Path(folder, RESULT), _dumps(result))
    except BaseException as error:
        _write(Path(folder, error_file(rank)), dumps_failure(error, __file__))
        raise


def _dumps(result: Any) -> bytes:
    try:
        return bytes(cloudpickle_module().dumps(result))
    except Exception as error:  # pickle raises several kinds
        raise ConfigurationError(
            "What the function has returned can't be sent to the notebook.",
            f"{type(result).__module__}.{type(result).__name__} ({type(error).__name__}: {error})",
            "Return what can be pickled: numbers, arrays, `history.history`, a Keras model; or save it to a file.",
        ) from error


def _write(path: Path, data: bytes) -> None:
    """Writes a file that is complete as soon as it is there: the rank may be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
