"""Writes models atomically, and on the chief only."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_files as backups
from keras_dist.errors import DistributionError
from keras_dist.logging import logger
from keras_dist.state.files import finish_writes, write_atomically


def write_model(save: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a plain model's `save`, `save_weights` or `export` in this process, atomically if it writes one file.

    Args:
        save: The method of the plain model.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
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

    Args:
        backend: The backend.
        call: What the user called, for messages.
        write: Writes the file. Called on the chief only.

    Returns:
        What `write` returned on the chief, `None` elsewhere.

    Raises:
        DistributionError: On the other ranks, with the text of the error that the chief raises.
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
