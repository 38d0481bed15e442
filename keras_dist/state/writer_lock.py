"""Lets one process at a time write into a folder. The lock ends with the process, whatever ends it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import threading
import weakref
from pathlib import Path

from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger

_NAME = ".writer"
# The locks that this process has, by folder: its objects share them.
_locks: weakref.WeakValueDictionary[str, WriterLock] = weakref.WeakValueDictionary()


class WriterLock:
    """The lock of one folder, held until `release`, or until nobody has this object any more.

    Args:
        folder: The folder, which exists.

    Raises:
        ConfigurationError: Another process that lives has the lock. Names it.
        OSError: The file of the lock can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, self._descriptor)
        self.threads = threading.Lock()
        try:
            self.is_exclusive = self._lock()
        except BaseException:
            self.release()
            raise

    def is_held(self) -> bool:
        """False if it was released, or somebody has removed the file or the whole folder."""
        if not self.release.alive:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _lock(self) -> bool:
        """Returns False if the file system has no locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal() from None
        except OSError as error:
            logger().debug("%s can't be locked: %s", self._path, error)
            return False
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    def _refusal(self) -> ConfigurationError:
        other = os.pread(self._descriptor, 1000, 0).decode(errors="replace") or "a process that has just begun"
        return ConfigurationError(
            "Another process writes commits into this folder.",
            f"{other} has locked {self._path}",
            "End it first, or give each run a folder of its own.",
        )


def lock_for_writing(folder: Path) -> WriterLock:
    """Returns this process's lock of a folder.

    Args:
        folder: The folder, which exists.

    Raises:
        ConfigurationError: Another process that lives has it.
        OSError: The file of the lock can't be made.
    """
    _let_children_go()
    key = os.path.realpath(folder)
    lock = _locks.get(key)
    if lock is None or not lock.is_held():
        lock = _locks[key] = WriterLock(folder)
    return lock


@functools.cache
def _let_children_go() -> None:
    """A forked child inherits the lock, and would hold it for as long as it lives, also after its parent."""
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for lock in list(_locks.values()):
        with contextlib.suppress(OSError):
            lock.release()
    _locks.clear()
