"""Writes files so that a reader finds the complete old ones or the complete new ones, whatever ends the process.

Files are written under their names in a temporary folder next to their place, flushed to the disk, and moved. For
several files the folder is first renamed, which marks it as complete, so that they are moved together. When the next
process writes there, it finishes what a killed process has left if that was complete, and removes it otherwise.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger

_BEGUN, _COMPLETE = ".keras_dist-begun-", ".keras_dist-complete-"


def write_atomically(path: Any, write: Callable[[Any], None]) -> None:
    """Writes a file, and others beside it, all or none of them; or a folder, where nothing may be.

    A link stays, and the file that it names is replaced. A file keeps its permissions, and its owner if this process
    may set it. Remote paths (`gs://…`) are written directly: there a file only appears when it is complete.
    `write` is passed a path of the same name. It may write others beside it.
    """
    if not isinstance(path, str | os.PathLike) or "://" in str(path):
        write(path)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        write(path)  # raises, and names the path
        return
    finish_writes(target.parent)
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_BEGUN, dir=target.parent))
            stack.enter_context(_locked(folder, waits=True))
            if folder.is_dir():  # not if another process took it for a leftover before it was locked
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        write(str(folder / target.name))
        files = list(folder.iterdir())
        for file in files:
            old = target.with_name(file.name)
            if old.is_file():
                before = old.stat()
                with contextlib.suppress(PermissionError):  # only root may give files away
                    os.chown(file, before.st_uid, before.st_gid)
                file.chmod(stat.S_IMODE(before.st_mode))
        for written in (*sorted(folder.rglob("*"), reverse=True), folder):  # a folder after what is in it
            flush(written)
        if len(files) > 1:
            folder = folder.rename(folder.with_name(folder.name.replace(_BEGUN, _COMPLETE)))
            flush(target.parent)
        _move_all(folder)


def finish_writes(folder: Path) -> None:
    """Finishes or removes what killed processes have left in a folder."""
    for left in [*folder.glob(f"{_BEGUN}*"), *folder.glob(f"{_COMPLETE}*")]:
        with _locked(left) as is_ours:
            if is_ours and left.name.startswith(_COMPLETE):
                _move_all(left)
            if is_ours:
                with contextlib.suppress(OSError):  # all that it does is take up space
                    remove(left)


def remove_folder(folder: Path) -> None:
    """Removes a folder or a file, which at no time is there in part."""
    hidden = folder.with_name(f"{_BEGUN}{secrets.token_hex(4)}")
    folder.rename(hidden)
    with contextlib.suppress(FileNotFoundError):  # another thread, which writes here, has removed it as a leftover
        remove(hidden)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, waits: bool = False) -> Iterator[bool]:
    """Locks a folder. Yields False if a living process has it, or the file system has no locks."""
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


def is_at(path: Path, descriptor: int) -> bool:
    """True if an open file has this path, and nobody has removed or replaced it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


taking_turns = threading.Lock()  # between the threads of this process, which share its lock


class WriterLock:
    """The file by which one process at a time writes into a folder, which exists. `OSError` if it can't be made.

    The lock belongs to the process: all its objects share it, and a forked child, which may live longer, does not have
    it. The system drops it once the process closes any descriptor of the file, so each write takes it again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".writer"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self._descriptor)

    def is_there(self) -> bool:
        """False if somebody has removed the file or the whole folder."""
        return is_at(self._path, self._descriptor)

    def take(self) -> None:
        """Takes the lock. Raises `ConfigurationError`, which names it, if another living process has it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._descriptor, 1000, 0).decode(errors="replace") or "a process that has just begun"
            raise ConfigurationError(
                "Another process writes commits into this folder.",
                f"{other} has locked {self._path}",
                "End it first, or give each run a folder of its own.",
            ) from None
        except OSError as error:  # the file system has no locks
            logger().debug("%s can't be locked: %s", self._path, error)
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
