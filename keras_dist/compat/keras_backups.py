"""Private names of Keras's `BackupAndRestore`. Keras 3.15, 2026-11.

`tests/unit/test_keras_backups.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from keras_dist.compat.keras_model import attach

# Keras writes the weights, then the epoch, and has no public hook in between.
_PATHS = ("_weights_path", "_training_metadata_path")
_SAVE = "_save_model"
_ATTACHED = "_keras_dist_atomic"


def replace_atomically(callback: Any) -> None:
    """Makes a callback write its files under temporary names, then rename both. A second call does nothing.

    Args:
        callback: A `keras.callbacks.BackupAndRestore`. With a remote path (`gs://...`) it does not change.
    """
    if getattr(callback, _ATTACHED, False) or "://" in str(callback.backup_dir):
        return
    plain = getattr(callback, _SAVE)

    def save(*args: Any, **kwargs: Any) -> None:
        paths = {name: pathlib.Path(getattr(callback, name)) for name in _PATHS}
        temporary = {name: path.with_name(f".new.{path.name}") for name, path in paths.items()}
        try:
            for name, path in temporary.items():
                setattr(callback, name, str(path))
            plain(*args, **kwargs)
        finally:
            for name, path in paths.items():
                setattr(callback, name, str(path))
        for name, path in paths.items():
            os.replace(temporary[name], path)

    attach(callback, _ATTACHED, True)
    attach(callback, _SAVE, save)
