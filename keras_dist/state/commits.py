"""A folder of commits: what a training needs to go on at the next batch, complete or not there at all.

    checkpoints/
        commit-000000000100/    one commit, of step 100
            arrays.npz          weights, slots of the optimizer, ...
            manifest.json       the place, and the size and checksum of each file
        commit-000000000200/
        .writer                 locked by the process that writes

A commit is written under a hidden name, flushed to the disk, and moved. So whatever ends the process, each commit that
is there is complete, and the one that the last `write` returned is there. If a file is damaged later, its checksum
tells. Imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.logging import logger
from keras_dist.state.commit_content import stored
from keras_dist.state.commit_files import BadCommit, Commit, Entry, Found, Place, entry_of, read_commit, write_files
from keras_dist.state.files import flush, remove_folder, remove_parts, write_folder
from keras_dist.state.writer_lock import WriterLock, lock_for_writing

__all__ = ["Commit", "Commits", "Entry", "Place"]

_PREFIX = "commit-"
_NAME = re.compile(_PREFIX + r"([0-9]{12,})(?:\.([0-9]+))?")


class Commits:
    """A folder of commits on disk.

    One process at a time may write; any may read meanwhile. While a commit is written, the disk holds one more than
    `keep`.

    Args:
        directory: The folder. It is made by the first `write`.
        keep: Number of commits that stay; older ones are removed after a newer one is complete.

    Raises:
        ConfigurationError: If `keep` is no positive integer, or the folder is not on a file system.

    Example:

    >>> commits = Commits("checkpoints")
    >>> commits.write(Place(step=100, epoch=1, batch=36), {"kernel": np.ones((2, 3))})
    PosixPath('/home/me/checkpoints/commit-000000000100')
    >>> commits.newest().place
    Place(step=100, epoch=1, batch=36)
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigurationError("At least one commit must be kept.", f"keep={keep!r}", "Pass keep=1 or more.")
        if "://" in os.fspath(directory):
            raise ConfigurationError(
                "Commits need a folder of a file system.",
                f"directory={os.fspath(directory)!r}",
                "Pass a folder on a local or shared disk.",
            )
        self.directory = Path(os.path.abspath(directory))
        self._keep = keep
        self._lock: WriterLock | None = None
        self._last: Path | None = None  # that this object has written
        self._damaged: set[Path] = set()  # known to be

    def write(self, place: Place, arrays: Mapping[str, np.ndarray]) -> Path:
        """Writes a commit, and removes the ones that are too old. When it returns, the commit is on the disk.

        A commit of the same step is replaced. A good one of a later step must not be there. Not to be called by a
        handler of a signal, which may interrupt another write.

        Args:
            place: How far the training has come.
            arrays: Arrays by name, of any shape, and any dtype but objects.

        Returns:
            The folder of the commit.

        Raises:
            ConfigurationError: Another process writes here, there is a good commit of a later step, or an array can't
                be written.
            OSError: The disk is full, the folder is gone, a permission is missing. A note names the last good commit.
                All commits are as they were.
        """
        contents = [stored(name, array) for name, array in arrays.items()]
        try:
            with self._locked() as lock:
                if lock.is_exclusive:
                    remove_parts(self.directory, _PREFIX)
                found = self._found()
                self._refuse_if_behind(place, found)
                path = self._free(place.step, found)
                write_folder(path, lambda folder: write_files(folder, place, contents))
                self._last = path
                self._remove(_too_old(found, place.step, self._keep, self._damaged))
        except OSError as error:
            error.add_note(f"keras_dist could not write a commit into {self.directory}. {self._last_good()}")
            raise
        logger().debug("wrote %s", path)
        return path

    def newest(self) -> Commit | None:
        """Returns the newest good commit, and warns of each newer one that is not good.

        Returns:
            `None` if there is no commit at all.

        Raises:
            DistributionError: There are commits, and none is good.
            OSError: The folder can't be read.
        """
        bad: dict[Path, str] = {}
        for found in reversed(self._found()):
            try:
                commit = read_commit(found)
            except BadCommit as problem:
                if not found.path.exists():  # removed by the writer, which has written newer ones
                    return self.newest()
                bad[found.path] = str(problem)
                continue
            self._damaged |= bad.keys()
            for path, text in bad.items():
                logger().warning("%s can't be used: %s. %s is, the one before it.", path, text, found.path.name)
            return commit
        if bad:
            raise no_good_commit(self.directory, {path.name: text for path, text in bad.items()})
        return None

    def list(self) -> Sequence[Entry]:
        """Returns all commits, good or not, the oldest first. Reads every file, to check it.

        Raises:
            OSError: The folder can't be read.
        """
        return [entry for found in self._found() if (entry := entry_of(found)) is not None]

    def close(self) -> None:
        """Lets other processes write here. Without it, they may when this object is gone, or the process ends."""
        self._lock = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[WriterLock]:
        if self._last is None and not self.directory.is_dir():  # later a missing folder is an error
            self.directory.mkdir(parents=True, exist_ok=True)
            flush(self.directory.parent)
        self._lock = lock_for_writing(self.directory)
        with self._lock.threads:
            yield self._lock

    def _found(self) -> Sequence[Found]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted(Found(int(match[1]), int(match[2] or 1), self.directory / match[0]) for match in matches)

    def _free(self, step: int, found: Sequence[Found]) -> Path:
        """Returns a path for a commit. The one that it replaces stays until the new one is complete."""
        number = max((other.number for other in found if other.step == step), default=0) + 1
        return self.directory / (f"{_PREFIX}{step:012d}" + (f".{number}" if number > 1 else ""))

    def _refuse_if_behind(self, place: Place, found: Sequence[Found]) -> None:
        """A restart would take the commit of the later step, which is of another run."""
        for later in reversed(found):
            if later.step <= place.step or later.path in self._damaged:
                continue
            entry = entry_of(later)
            if entry is not None and entry.problem:
                self._damaged.add(later.path)
            else:
                raise ConfigurationError(
                    "The folder has a commit of a later step, which a restart would take instead.",
                    f"step {place.step:,}, and {later.path}",
                    "Go on from that commit, or pass an empty folder, or remove the later commits.",
                )

    def _remove(self, too_old: Sequence[Found]) -> None:
        for found in too_old:
            try:
                remove_folder(found.path)
            except OSError as error:
                logger().warning("%s is not needed any more, but can't be removed: %s", found.path, error)

    def _last_good(self) -> str:
        """Returns a sentence on the last good commit, also if little can be read."""
        path = None
        with contextlib.suppress(OSError):
            path = self._last if self._last is not None and self._last.is_dir() else None
            path = path or next((self.directory / e.name for e in reversed(self.list()) if not e.problem), None)
        return f"The last good commit is still there: {path}" if path else "There is no good commit in it."


def no_good_commit(directory: Path, bad: Mapping[str, str]) -> DistributionError:
    """Returns the error for a folder with commits of which none is good.

    Args:
        directory: The folder.
        bad: The problem of each commit by its name.
    """
    return DistributionError(
        f"No commit in {directory} is good.",
        "; ".join(f"{name}: {problem}" for name, problem in bad.items()),
        "Bring the files back from a copy. To begin anew, pass an empty folder.",
    )


def _too_old(before: Sequence[Found], step: int, keep: int, damaged: set[Path]) -> list[Found]:
    """Returns what to remove after a step was committed: what it replaces, and older ones, the oldest first.

    Damaged ones of later steps stay until the training has come there, since they are of no harm.
    """
    last = {found.step: found for found in before if found.step < step and found.path not in damaged}
    kept = sorted(last.values(), reverse=True)[: keep - 1]
    return [found for found in before if found.step <= step and found not in kept]
