"""Private names of Keras's `BackupAndRestore`. Keras 3.15, 2026-11.

`tests/unit/test_keras_backups.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_dist.compat.keras_model import attach

# Keras writes the weights, then the epoch, and has no public hook in between.
_PATHS = ("_weights_path", "_training_metadata_path")
_COPIES = ("_prev_weights_path", "_prev_training_metadata_path")  # if `double_checkpoint`
_SAVE, _BEGIN = "_save_model", "on_train_begin"
_ATTACHED = "_keras_dist_atomic"


def replace_atomically(
    callback: Any, write: Callable[[Any, Callable[[Any], None]], None], finish: Callable[[Path], None]
) -> None:
    """Makes a callback replace its files together. A second call does nothing.

    Args:
        callback: A `keras.callbacks.BackupAndRestore`. With a remote path (`gs://...`) it does not change.
        write: Calls its second argument with a path whose name is that of its first one, and moves what that writes.
        finish: Finishes what `write` has left unfinished in a folder.
    """
    if getattr(callback, _ATTACHED, False) or "://" in str(callback.backup_dir):
        return
    plain_save, plain_begin, folder = getattr(callback, _SAVE), getattr(callback, _BEGIN), Path(callback.backup_dir)

    def save(*args: Any, **kwargs: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write(getattr(callback, _PATHS[0]), lambda path: save_to(Path(path).parent, *args, **kwargs))

    def save_to(temporary: Path, *args: Any, **kwargs: Any) -> None:
        paths = {name: getattr(callback, name) for name in _PATHS}
        for name, copy in zip(_PATHS, _COPIES, strict=True):
            if callback.double_checkpoint and Path(paths[name]).exists():
                shutil.copy(paths[name], temporary / Path(getattr(callback, copy)).name)
        try:
            for name, path in paths.items():
                setattr(callback, name, str(temporary / Path(path).name))
            plain_save(*args, **kwargs)
        finally:
            for name, path in paths.items():
                setattr(callback, name, path)

    def begin(*args: Any, **kwargs: Any) -> None:
        finish(folder)
        plain_begin(*args, **kwargs)

    attach(callback, _ATTACHED, True)
    attach(callback, _SAVE, save)
    attach(callback, _BEGIN, begin)


def begin_without_loading(callback: Any) -> None:
    """Lets a callback begin once without loading what it has saved."""
    begin = getattr(callback, _BEGIN)

    def begin_once(*args: Any, **kwargs: Any) -> None:
        attach(callback, _BEGIN, begin)

    attach(callback, _BEGIN, begin_once)
