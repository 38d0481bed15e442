"""Writing files: whole or not at all, and by the chief only."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_backups as backups
from keras_dist.errors import DistributionError
from keras_dist.logging import logger


def write_atomically(path: Any, write: Callable[[Any], None]) -> None:
    """Writes a file under another name in the same directory, then renames it.

    Whoever reads `path` finds the old file or the new one, whole; a full disk or a kill leaves the old one.
    Remote paths (`gs://…`) are written as they are: there a file appears when it is whole.

    Args:
        path: Where the file will be.
        write: Writes a file to the path that it is given. The name ends as `path` does: Keras goes by it.
    """
    if not isinstance(path, str | os.PathLike) or "://" in str(path):
        write(path)
        return
    target = pathlib.Path(path)
    temporary = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    try:
        write(str(temporary))
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_model(save: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a model's own `save`, `save_weights` or `export` in this process; atomically where it writes one file.

    Args:
        save: The method of the plain model.
        name: Its name.
        args: What the user called it with.
        kwargs: The same, by name.
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
    logger().debug("model.%s: wrote %s, by another name first", name, path)
    return None


def save_at_once(callback: Any) -> None:
    """Lets a `BackupAndRestore` replace its two files, weights and epoch, at one moment. Other callbacks stay.

    Keras writes one after the other: killed in between, the next start trains an epoch twice.

    Args:
        callback: Of `fit`.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore) and not callback.double_checkpoint:
        backups.write_elsewhere_first(callback)


def write_on_chief(backend: Backend, call: str, write: Callable[[], Any]) -> Any:
    """Lets the chief write; every rank returns when the file is whole, or raises if it could not be written.

    Args:
        backend: How the ranks talk.
        call: What the user called.
        write: Does the writing. Called on the chief only.

    Returns:
        What `write` returned on the chief, `None` elsewhere.

    Raises:
        DistributionError: On the other ranks, with the chief's error; the chief raises the error itself.
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
            "The chief could not write.",
            f"{call} on rank 0: {outcome}",
            "Give a path that rank 0 can write to, with space left.",
        )
    return result
