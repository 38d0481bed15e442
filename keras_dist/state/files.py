"""Writes files so that a reader finds the complete old ones or the complete new ones, whatever ends the process.

Files are written under their names in a temporary folder beside their place, flushed to the disk, and moved. Several
files are moved together: the folder gets another name first, which says that it is complete. What a process that was
killed has left is finished if it was complete, and else removed, when the next one writes there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_BEGUN, _COMPLETE = ".keras_dist-begun-", ".keras_dist-complete-"


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
        _flush(folder)
        if len(files) > 1:
            folder = folder.rename(folder.with_name(folder.name.replace(_BEGUN, _COMPLETE)))
            _flush(target.parent)
        _move_all(folder)


def finish_writes(folder: Path) -> None:
    """Finishes or removes what processes that were killed have left in a folder."""
    for left in [*folder.glob(f"{_BEGUN}*"), *folder.glob(f"{_COMPLETE}*")]:
        with _locked(left) as is_ours:
            if is_ours and left.name.startswith(_COMPLETE):
                _move_all(left)
            if is_ours:
                shutil.rmtree(left, ignore_errors=True)


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
    _flush(file)


def _move_all(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        os.replace(file, folder.with_name(file.name))
    folder.rmdir()
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems can't flush a folder
            raise
    finally:
        os.close(descriptor)
