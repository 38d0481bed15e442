"""Files that grow while a model trains: those of `CSVLogger` and `TensorBoard`.

A run that goes on cuts what was written after the commit, so a curve has neither a seam nor a point twice.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_dist.compat import keras_fit

# Its name tells when it was made (seconds since 1970), on which host and by which process.
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+\.\d+)\.\d+\.v2")
_FOLDERS = ("train", "validation")
_WRITERS = ".event-writers"  # what the names of event files of each process have in common


def note_writer(directory: Path) -> None:
    """Notes in a folder that this process writes event files: it may be killed before its first commit."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / _WRITERS, "a") as noted:
        noted.write(f"{socket.gethostname()}.{os.getpid()}\n")


def sizes(callbacks: Iterable[Any]) -> dict[str, int]:
    """Returns the size of each of these files in bytes, after all that was logged has been written."""
    callbacks = list(callbacks)
    for callback in callbacks:
        keras_fit.flush_files(callback)
    return {str(path): path.stat().st_size for path in _files(callbacks)}


def cut(callbacks: Iterable[Any], before: Mapping[str, int], time: float, directory: Path) -> None:
    """Cuts the files to the sizes that they had at a commit. Removes event files that runs with it made after it.

    Args:
        callbacks: Those that will write the files, which are not open yet.
        before: What `sizes` returned.
        time: When that was, in seconds since 1970.
        directory: Where these runs have called `note_writer`.
    """
    noted = directory / _WRITERS
    writers = noted.read_text().splitlines() if noted.exists() else []
    for path in _files(callbacks):
        size = before.get(str(path))
        if size is not None:
            if path.stat().st_size > size:
                os.truncate(path, size)
        elif (made := _EVENTS.fullmatch(path.name)) and made[2] in writers and int(made[1]) >= int(time):
            path.unlink()


def _files(callbacks: Iterable[Any]) -> Iterable[Path]:
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            path = Path(callback.filename).absolute()
            if path.is_file():
                yield path
        for folder in _event_folders(callback):
            yield from sorted(path for path in folder.absolute().glob("events.*") if _EVENTS.fullmatch(path.name))


def _event_folders(callback: Any) -> Iterable[Path]:
    if isinstance(callback, keras.callbacks.TensorBoard):
        return [Path(callback.log_dir) / folder for folder in _FOLDERS]
    return getattr(callback, "event_folders", ())  # `kd.callbacks.Timing`
