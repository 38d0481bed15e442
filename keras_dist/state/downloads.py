"""Downloads: one process of each host makes a file or folder, the others wait for it.

A rank that waits needs no other rank to make the same call, so a script may download on the chief only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_dist.compat import keras_files
from keras_dist.errors import DistributionError
from keras_dist.logging import logger
from keras_dist.state import snapshot as random_state
from keras_dist.state.files import is_at, remove

_ERROR_CHARACTERS = 4000
_OUTCOME_BYTES = 100_000  # of JSON, which is at most 6 bytes for a character


def share_on_host() -> None:
    """Makes the processes of this host share what Keras and TensorFlow Datasets download."""
    keras_files.write_through(_write)
    keras_files.prepare_through(_prepare)


def once_on_host(target: str, work: Callable[[], object]) -> bool:
    """Does some work, unless another process of this host and user does it now: then waits for that one.

    A process that comes after the end of the work does it again; that is for the caller to find out. If the process
    that works is killed, the first one that waits does the work.

    Returns whether this process did the work, which is for the file or folder `target`. If it failed in the other
    process, raises `DistributionError`. Here, `work` raises its own error.
    """
    # Where processes of this host meet. Not beside the target: file systems of a network may have no locks.
    key = hashlib.sha256(os.path.realpath(target).encode()).hexdigest()[:32]
    lock = Path(tempfile.gettempdir(), f"keras_dist-{os.geteuid()}-{key}.lock")
    while True:
        with _locked(lock, target) as descriptor:
            if is_at(lock, descriptor):
                _work(work, lock, descriptor)
                return True
            # The one that we have waited for removed the file when it had ended.
            if outcome := os.pread(descriptor, _OUTCOME_BYTES, 0):
                if (error := json.loads(outcome)["error"]) is None:
                    return False
                raise DistributionError(
                    "Another process of this host failed to write a file or folder, for which this one has waited.",
                    f"{target}: {error}",
                    "See the error of the other rank.",
                )


@contextlib.contextmanager
def _locked(lock: Path, target: str) -> Iterator[int]:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger().info("another process of this host writes %s: waiting for it", target)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(descriptor)


def _work(work: Callable[[], object], lock: Path, descriptor: int) -> None:
    """Does the work, and leaves those that wait how it ended, and nothing on the disk."""
    outcome = ""  # if this process is interrupted: one of those that wait does the work
    try:
        work()
        outcome = json.dumps({"error": None})
    except Exception as raised:
        outcome = json.dumps({"error": f"{type(raised).__name__}: {raised}"[:_ERROR_CHARACTERS]})
        raise
    finally:
        if is_at(lock, descriptor):
            lock.unlink()
        os.pwrite(descriptor, outcome.encode(), 0)


def _prepare(folder: str, prepare: Callable[[], object]) -> None:
    """Prepares a dataset. TFDS draws names from Python's generator, but only where it works: ranks would differ."""
    states = random_state.states()
    once_on_host(folder, prepare)
    random_state.set_states(states)


def _write(target: str, write: keras_files.Write) -> None:
    """Writes a file or a folder, so that under its name there is never a part of it, not even after a kill."""
    place = Path(os.path.realpath(target))  # a link may lead to another file system
    # One name for each host, which may share the folder: a part that was left is removed by the next one.
    key = hashlib.sha256(f"{socket.gethostname()} {place.name}".encode()).hexdigest()[:16]
    part = place.with_name(f".{key}.part")

    def write_whole() -> None:
        remove(part)
        try:
            write(str(part))
            if part.exists():
                _move(part, place)
        finally:
            remove(part)

    once_on_host(target, write_whole)


def _move(source: Path, target: Path) -> None:
    """Moves a file or folder. In a folder that exists, each file is replaced: another process may be reading."""
    if source.is_dir() and not source.is_symlink() and target.is_dir():
        for entry in source.iterdir():
            _move(entry, target / entry.name)
    else:
        os.replace(source, target)
