"""Files that one process writes for the others: models, logs, downloads.

The chief writes models, atomically. A resumed run cuts off what `CSVLogger` and `TensorBoard` wrote after the commit,
so a curve has no gap and no point twice. One process of each host downloads a file or folder, while the others wait.
"""

import contextlib
import fcntl
import hashlib
import inspect
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit
from keras_dist.errors import DistributionError
from keras_dist.logging import logger
from keras_dist.state import snapshot as random_state
from keras_dist.state.files import finish_writes, is_at, remove, write_atomically

# Its name tells when it was made (seconds since 1970), on which host and by which process.
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.(.+\.\d+)\.\d+\.v2")
_WRITERS = ".event-writers"  # the common part of the names of a process's event files


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
    """Cuts the files to their sizes at a commit. Removes event files that runs made after it.

    The callbacks have not opened the files yet. `before` is what `sizes` returned, at `time`, in seconds since 1970. In
    `directory` these runs have called `note_writer`.
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
        keras_fit.replace_atomically(callback, write_atomically, finish_writes)


def write_on_chief(backend: Backend, call: str, write: Callable[[], Any]) -> Any:
    """Lets the chief write a file. Every rank must call it; all return when the file is complete.

    If the chief raises an error, the other ranks raise `DistributionError` with its text. Returns what `write` returned
    on the chief, `None` elsewhere.
    """
    result = error = None
    try:
        result = write() if backend.topology.is_chief else None
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


_DONE, _LONGEST_ERROR = "done", 4000  # what the process that has worked writes into the lock's file, in bytes


def share_on_host() -> None:
    """Makes the processes of this host share what Keras and TensorFlow Datasets download."""
    keras_fit.write_through(_write)
    keras_fit.prepare_through(_prepare)


def once_on_host(target: str, work: Callable[[], object]) -> bool:
    """Does some work, or waits for another process of this host and user that is doing it.

    A process that arrives after the end does the work again: the caller must check first whether it is needed. If the
    process that works is killed, the first one that waits does the work.

    Returns whether this process did the work, which is for the file or folder `target`. Raises `DistributionError` if
    the work failed in another process. In this process `work` raises its own error.
    """
    # Where processes of this host meet. Not beside the target: file systems of a network may have no locks.
    key = hashlib.sha256(os.path.realpath(target).encode()).hexdigest()[:32]
    lock = Path(tempfile.gettempdir(), f"keras_dist-{os.geteuid()}-{key}.lock")
    while True:
        with _locked(lock, target) as descriptor:
            if is_at(lock, descriptor):
                outcome = ""  # if this process is interrupted: one of those that wait does the work
                try:
                    work()
                    outcome = _DONE
                    return True
                except Exception as raised:
                    outcome = f"{type(raised).__name__}: {raised}"
                    raise
                finally:  # leaves those that wait how it ended, and nothing on the disk
                    if is_at(lock, descriptor):
                        lock.unlink()
                    os.pwrite(descriptor, outcome.encode(errors="replace"), 0)
            # The process that we waited for has ended, and removed the file.
            if left := os.pread(descriptor, _LONGEST_ERROR, 0).decode(errors="replace"):
                if left == _DONE:
                    return False
                raise DistributionError(
                    "Another process of this host failed to write a file or folder, for which this one has waited.",
                    f"{target}: {left}",
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


def _prepare(folder: str, prepare: Callable[[], object]) -> None:
    """Prepares a dataset. TFDS draws names from Python's generator, but only where it works: ranks would differ."""
    states = random_state.states()
    once_on_host(folder, prepare)
    random_state.set_states(states)


def _write(target: str, write: keras_fit.Write) -> None:
    """Writes a file or a folder that appears under its name only when it is complete, even after a kill."""
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
