"""Writes files so that a reader finds the complete old ones or the complete new ones, whatever ends the process.

Files are written under their names in a temporary folder beside their place, flushed to the disk, and moved. Several
files are moved together: the folder gets another name first, which says that it is complete. What a process that was
killed has left is finished if it was complete, and else removed, when the next one writes there.

A whole folder is written under a hidden name, and gets its own when it is complete. Only one process may write such
folders into one place, so what else is hidden there is left of processes that have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_BEGUN, _COMPLETE = ".keras_dist-begun-", ".keras_dist-complete-"
_PART = ".part"


def write_atomically(path: Any, write: Callable[[Any], None]) -> None:
    """Writes a file, and others beside it, all or none of them.

    A link stays, and the file that it names is replaced. A file keeps its permissions, and its owner if this process
    may set it. Remote paths (`gs://…`) are written directly: there a file only appears when it is complete.

    Args:
        path: Path of the file.
        write: Writes a file to the path that it is passed, which has the same name. It may write others beside it.
    """
    if not isinstance(path, str | os.PathLike) or "://" in str(path):
        write(path)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        write(path)  # raises, and names the path
        return
    finish_writes(target.parent)
    with _temporary_folder(target.parent) as folder:
        write(str(folder / target.name))
        files = list(folder.iterdir())
        for file in files:
            _prepare(file, target.with_name(file.name))
        flush(folder)
        if len(files) > 1:
            folder = folder.rename(folder.with_name(folder.name.replace(_BEGUN, _COMPLETE)))
            flush(target.parent)
        _move_all(folder)


def finish_writes(folder: Path) -> None:
    """Finishes or removes what processes that were killed have left in a folder."""
    for left in [*folder.glob(f"{_BEGUN}*"), *folder.glob(f"{_COMPLETE}*")]:
        with _locked(left) as is_ours:
            if is_ours and left.name.startswith(_COMPLETE):
                _move_all(left)
            if is_ours:
                shutil.rmtree(left, ignore_errors=True)


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder so that it is there completely or not at all.

    Args:
        target: Path of the folder. Nothing may be there.
        write: Writes files into the folder that it is passed, which is hidden and on the same file system.
    """
    part = _hidden(target)
    part.mkdir()
    try:
        write(part)
        for file in part.iterdir():
            flush(file)
        flush(part)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    flush(target.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder, or a file, so that it is there completely or not at all."""
    hidden = _hidden(folder)
    folder.rename(hidden)
    _remove(hidden)


def remove_parts(parent: Path, prefix: str) -> None:
    """Removes what processes that were killed in `write_folder` and `remove_folder` have left.

    Args:
        parent: Where they wrote. No other process may write there now.
        prefix: How the names of their folders begin.
    """
    for name in os.listdir(parent):
        if name.startswith(f".{prefix}") and name.endswith(_PART):
            with contextlib.suppress(OSError):  # it does no harm but for the space that it takes
                _remove(parent / name)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_PART}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Makes a folder that is locked while this process lives, and removed at the end of this context."""
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_BEGUN, dir=parent))
            stack.enter_context(_locked(folder, waits=True))
            if folder.is_dir():  # not if another process took it for one that was left, before it was locked
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def _locked(folder: Path, waits: bool = False) -> Iterator[bool]:
    """Locks a folder in this context. Yields False if a living process has it, or the file system has no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # removed meanwhile
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _prepare(file: Path, old: Path) -> None:
    """Gives a new file the permissions and the owner of the old one, and flushes it to the disk."""
    if old.is_file():
        before = old.stat()
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(file, before.st_uid, before.st_gid)
        file.chmod(stat.S_IMODE(before.st_mode))
    flush(file)


def _move_all(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        os.replace(file, folder.with_name(file.name))
    folder.rmdir()
    flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems can't flush a folder
            raise
    finally:
        os.close(descriptor)
