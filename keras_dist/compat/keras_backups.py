"""The private names of Keras's `BackupAndRestore`, each with the reason. Keras 3.15, 2026-11.

`tests/unit/test_keras_backups.py` fails when one of them moves, or when it is no longer needed.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from keras_dist.compat.keras_model import attach

# Keras writes the weights, then the epoch that they belong to. There is no public way between.
_PATHS = ("_weights_path", "_training_metadata_path")
_SAVE = "_save_model"
_ATTACHED = "_keras_dist_elsewhere_first"


def write_elsewhere_first(callback: Any) -> None:
    """Makes a callback write its files by other names in the same folder, then rename both. Twice is the same as once.

    Args:
        callback: A `keras.callbacks.BackupAndRestore`. One that writes to a remote path (`gs://...`) stays as it is.
    """
    if getattr(callback, _ATTACHED, False) or "://" in str(callback.backup_dir):
        return
    plain = getattr(callback, _SAVE)

    def save(*args: Any, **kwargs: Any) -> None:
        paths = {name: pathlib.Path(getattr(callback, name)) for name in _PATHS}
        others = {name: path.with_name(f".new.{path.name}") for name, path in paths.items()}
        try:
            for name, other in others.items():
                setattr(callback, name, str(other))
            plain(*args, **kwargs)
        finally:
            for name, path in paths.items():
                setattr(callback, name, str(path))
        for name, path in paths.items():
            os.replace(others[name], path)

    attach(callback, _ATTACHED, True)
    attach(callback, _SAVE, save)
