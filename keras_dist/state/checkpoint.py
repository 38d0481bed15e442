"""Writes models atomically, and on the chief only, and cuts logs that a resumed run writes again.

A resumed run cuts what `CSVLogger` and `TensorBoard` wrote after the commit, so a curve has neither a seam nor a point
twice.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_files as backups
from keras_dist.compat import keras_fit
from keras_dist.errors import DistributionError
from keras_dist.logging import logger
from keras_dist.state.files import finish_writes, write_atomically

# Its name tells when it was made (seconds since 1970), on which host and by which process.
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+\.\d+)\.\d+\.v2")
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

    The callbacks will write the files, which are not open yet. `before` is what `sizes` returned, at `time`, in seconds
    since 1970. In `directory` these runs have called `note_writer`.
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
        folders = getattr(callback, "event_folders", ())  # `kd.callbacks.Timing`
        if isinstance(callback, keras.callbacks.TensorBoard):
            folders = [Path(callback.log_dir) / folder for folder in ("train", "validation")]
        for folder in folders:
            yield from sorted(path for path in folder.absolute().glob("events.*") if _EVENTS.fullmatch(path.name))


def write_model(save: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a plain model's `save`, `save_weights` or `export` in this process, atomically if it writes one file."""
    bound = inspect.signature(save).bind(*args, **kwargs)
    path = bound.arguments.get("filepath")
    keeps_old = not bound.arguments.get("overwrite", True) and path is not None and os.path.exists(path)
    if name == "export" or keeps_old:
        return save(*args, **kwargs)

    def write_to(temporary: Any) -> None:
        bound.arguments["filepath"] = temporary
        save(*bound.args, **bound.kwargs)

    write_atomically(path, write_to)
    logger().debug("model.%s: wrote %s atomically", name, path)
    return None


def make_atomic(callback: Any) -> None:
    """Makes a `BackupAndRestore` replace its files, weights and epoch, together. Other callbacks stay as they are.

    Keras writes one after the other. If the process is killed in between, the next run trains an epoch twice.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        backups.replace_atomically(callback, write_atomically, finish_writes)


def write_on_chief(backend: Backend, call: str, write: Callable[[], Any]) -> Any:
    """Lets the chief write a file. Every rank must call it; all return when the file is complete.

    If the chief raises an error, the other ranks raise `DistributionError` with its text. Returns what `write` returned
    on the chief, `None` elsewhere.
    """
    error: BaseException | None = None
    result = None
    if backend.topology.is_chief:
        try:
            result = write()
        except Exception as caught:
            error = caught
    outcome = backend.all_gather_object(call, None if error is None else f"{type(error).__name__}: {error}")[0]
    if error is not None:
        raise error
    if outcome is not None:
        raise DistributionError(
            "The chief could not write the file.",
            f"{call} on rank 0: {outcome}",
            "Pass a path that rank 0 can write to, on a disk with space left.",
        )
    return result
