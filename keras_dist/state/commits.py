"""A folder of commits. Each is complete, and has what a training needs to resume at the next batch.

    checkpoints/
        commit-000000000100/    one commit, of step 100
            arrays.npz          weights, slots of the optimizer, ...
            manifest.json       the place, and the size and checksum of each file
        commit-000000000200/
        .writer                 locked by the process that writes

A commit is written under a hidden name, flushed to the disk, and moved. So whatever ends the process, every commit in
the folder is complete, and the last one that `write` returned is there. A checksum shows if a file was damaged later.
Nothing is pickled, so reading a commit runs no code from it. Imports neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.logging import logger
from keras_dist.state.files import WriterLock, flush, remove_folder, taking_turns, write_atomically

_OF_ML_DTYPES = 2  # what `dtype.isbuiltin` is for dtypes that are not NumPy's own


def stored(name: str, array: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns an array in a dtype that NumPy's files have, and what the manifest says of it: name, dtype, shape.

    Raises `ConfigurationError` if it can't be written without pickle, or its name is no string.
    """
    if not isinstance(name, str):
        raise ConfigurationError("The name of an array has to be a string.", repr(name), "Name it by a string.")
    array = np.asarray(array)
    entry = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
    if array.dtype.isbuiltin == _OF_ML_DTYPES and array.dtype == _dtype_of_ml_dtypes(array.dtype.name):
        unsigned = f"uint{8 * array.dtype.itemsize}"
        return array.view(unsigned), {**entry, "stored_as": unsigned}
    if array.dtype.hasobject or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype)) != array.dtype:
        raise ConfigurationError(
            f"The array {name!r} can't be written without pickle.",
            f"dtype {array.dtype}",
            "Pass an array of numbers, booleans, bytes, strings of fixed length, or dates.",
        )
    return array, entry


def restored(array: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    """Returns the array that `stored` was passed, or raises `ValueError` if dtype or shape is not that of the entry."""
    if "stored_as" in entry and (dtype := _dtype_of_ml_dtypes(entry["dtype"])) is not None:
        array = array.view(dtype)
    if (str(array.dtype), list(array.shape)) != (entry["dtype"], entry["shape"]):
        raise ValueError(f"{entry['name']} is {array.dtype} {array.shape}, not {entry['dtype']} {entry['shape']}")
    return array


def _dtype_of_ml_dtypes(name: str) -> np.dtype | None:
    """Returns a dtype of ml_dtypes (bfloat16, float8_e4m3fn, int4), which comes with TensorFlow."""
    import ml_dtypes

    found = getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)


FORMAT = 1
MANIFEST, ARRAYS = "manifest.json", "arrays.npz"


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of a training."""

    step: int  # batches done since the beginning of the training
    epoch: int  # the epoch that it is in; the first is 0
    batch: int  # batches done in this epoch

    def __post_init__(self) -> None:
        if any(type(value) is not int or value < 0 for value in dataclasses.astuple(self)):
            raise ConfigurationError("A place is three integers, none negative.", repr(self), "Count from 0.")


@dataclasses.dataclass(frozen=True)
class Commit:
    place: Position
    arrays: Mapping[str, np.ndarray]  # with the bits and dtypes that were written
    path: Path


@dataclasses.dataclass(frozen=True)
class Entry:
    """A commit in a list."""

    name: str  # of its folder
    step: int  # which the name tells also if nothing else can be read
    place: Position | None  # `None` if its manifest can't be read
    time: datetime | None  # when it was written, UTC; `None` if its manifest can't be read
    size: int  # bytes of its files
    problem: str  # what is wrong with it; empty if it is good


@dataclasses.dataclass(frozen=True, order=True)
class Found:
    """A folder with the name of a commit. The newest sorts last."""

    step: int  # that its name tells
    number: int  # 1, and one more each time that the step is committed again
    path: Path


class BadCommit(Exception):
    """A commit can't be used. The text says what is wrong with it."""


def write_files(folder: Path, place: Position, contents: Sequence[tuple[np.ndarray, dict[str, Any]]]) -> None:
    """Writes the folder of a commit. `contents` is what `stored` returned for each array."""
    from keras_dist import __version__

    folder.mkdir()
    with open(folder / ARRAYS, "xb") as file:
        # By position, as names like "file" are arguments of `savez`: the manifest has the names, in this order.
        np.savez(file, *(array for array, _ in contents))
    size, digest = _measured(folder / ARRAYS)
    fields = {
        "format": FORMAT,
        **dataclasses.asdict(place),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "keras_dist": __version__,
        "files": {ARRAYS: {"bytes": size, "sha256": digest}},
        "arrays": [entry for _, entry in contents],
    }
    lines = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in fields.items())
    (folder / MANIFEST).write_bytes(_sealed(f"{{\n{lines}".encode()))


def read_commit(found: Found) -> Commit:
    """Reads a commit, and checks every byte of it. Raises `BadCommit`, which names what is wrong with it."""
    manifest = _manifest(found)
    _check_files(found.path, manifest)
    place = _place(manifest)
    try:
        with np.load(found.path / ARRAYS, allow_pickle=False) as npz:
            arrays = {entry["name"]: restored(npz[f"arr_{i}"], entry) for i, entry in enumerate(manifest["arrays"])}
    except (OSError, ValueError, KeyError, EOFError, ImportError, zipfile.BadZipFile) as error:
        raise BadCommit(f"{ARRAYS} can't be read: {type(error).__name__}: {error}") from error
    return Commit(place, arrays, found.path)


def entry_of(found: Found) -> Entry | None:
    """Checks every byte of a commit. Returns what a list shows of it, `None` if it has just been removed."""
    place = time = None
    problem = ""
    try:
        manifest = _manifest(found)
        place, time = _place(manifest), datetime.fromisoformat(manifest["time"])
        _check_files(found.path, manifest)
    except BadCommit as bad:
        problem = str(bad)
    size = 0
    with contextlib.suppress(OSError):  # removed meanwhile
        for file in [found.path, *found.path.glob("*")]:
            size += file.stat().st_size if file.is_file() else 0
    if not found.path.exists():
        return None
    return Entry(found.path.name, found.step, place, time, size, problem)


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    for name, expected in manifest["files"].items():
        size, digest = _measured(folder / name)
        if size != expected["bytes"]:
            raise BadCommit(f"{name} is {size:,} bytes long, and {expected['bytes']:,} were written")
        if digest != expected["sha256"]:
            raise BadCommit(f"the checksum of {name} does not fit")


def _manifest(found: Found) -> dict[str, Any]:
    if found.path.exists() and not found.path.is_dir():
        raise BadCommit("it is not a folder")
    file = found.path / MANIFEST
    try:
        sealed = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    if sealed != _sealed(sealed[: -len(_sealed(b""))]):
        raise BadCommit(f"the checksum of {MANIFEST} does not fit, so it was cut off or changed")
    manifest: dict[str, Any] = json.loads(sealed)
    if manifest["format"] != FORMAT:  # other versions are sealed in the same way
        raise BadCommit(f"its format is version {manifest['format']}, and this keras_dist reads version {FORMAT}")
    if manifest["step"] != found.step:
        raise BadCommit(f"it holds step {manifest['step']:,}, so its folder was renamed")
    return manifest


def _place(manifest: Mapping[str, Any]) -> Position:
    return Position(manifest["step"], manifest["epoch"], manifest["batch"])


def _sealed(body: bytes) -> bytes:
    """Closes a JSON object with the checksum of all that comes before."""
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def _measured(file: Path) -> tuple[int, str]:
    try:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return opened.tell(), digest
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> BadCommit:
    if isinstance(error, FileNotFoundError):
        return BadCommit(f"{file.name} is missing")
    return BadCommit(f"{file.name} can't be read: {error.strerror}")


_PREFIX = "commit-"
_NAME = re.compile(_PREFIX + r"([0-9]{12,})(?:\.([0-9]+))?")


class Commits:
    """A folder of commits on disk, which the first `write` makes.

    One process at a time may write; any may read meanwhile. While a commit is written, the disk holds one more than
    `keep`: older ones are removed after a newer one is complete.
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

    def write(self, place: Position, arrays: Mapping[str, np.ndarray]) -> Path:
        """Writes a commit, and removes the ones that are too old. When it returns, the commit is on the disk.

        A commit of the same step is replaced. There must be no good commit of a later step. Don't call it in a signal
        handler, which may interrupt another write. After an `OSError` (disk full, folder gone, permission missing) all
        commits are as they were, and a note names the last good one.
        """
        contents = [stored(name, array) for name, array in arrays.items()]
        try:
            if self._last is None and not self.directory.is_dir():  # later a missing folder is an error
                self.directory.mkdir(parents=True, exist_ok=True)
                flush(self.directory.parent)
            with taking_turns:
                if self._lock is None or not self._lock.is_there():
                    self._lock = WriterLock(self.directory)
                self._lock.take()
                found = self._found()
                self._refuse_if_behind(place, found)
                # The commit that it replaces stays until the new one is complete.
                number = max((other.number for other in found if other.step == place.step), default=0) + 1
                path = self.directory / (f"{_PREFIX}{place.step:012d}" + (f".{number}" if number > 1 else ""))
                write_atomically(path, lambda folder: write_files(Path(folder), place, contents))
                self._last = path
                # What it replaces, and older ones, the oldest first. Damaged ones of later steps do no harm, and
                # stay until the training gets there.
                good = {each.step: each for each in found if each.step < place.step and each.path not in self._damaged}
                kept = sorted(good.values(), reverse=True)[: self._keep - 1]
                for old in [each for each in found if each.step <= place.step and each not in kept]:
                    try:
                        remove_folder(old.path)
                    except OSError as error:
                        logger().warning("%s is not needed any more, but can't be removed: %s", old.path, error)
        except OSError as error:
            error.add_note(f"keras_dist could not write a commit into {self.directory}. {self._last_good()}")
            raise
        logger().debug("wrote %s", path)
        return path

    def newest(self) -> Commit | None:
        """Returns the newest good commit, `None` if there is no commit. Warns of each newer one that is not good.

        Raises `DistributionError` if there are commits, and none is good.
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
        """Returns all commits, good or not, the oldest first. Reads every file, to check it."""
        return [entry for found in self._found() if (entry := entry_of(found)) is not None]

    def close(self) -> None:
        """Lets other processes write here, as the end of this object or of the process does."""
        self._lock = None

    def _found(self) -> Sequence[Found]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted(Found(int(match[1]), int(match[2] or 1), self.directory / match[0]) for match in matches)

    def _refuse_if_behind(self, place: Position, found: Sequence[Found]) -> None:
        """A restart would take the commit of the later step, which is of another run."""
        for later in reversed(found):
            if later.step <= place.step or later.path in self._damaged:
                continue
            entry = entry_of(later)
            if entry is None or not entry.problem:
                raise ConfigurationError(
                    "The folder has a commit of a later step, which a restart would take instead.",
                    f"step {place.step:,}, and {later.path}",
                    "Resume from that commit, or pass an empty folder, or remove the later commits.",
                )
            self._damaged.add(later.path)

    def _last_good(self) -> str:
        """Returns a sentence about the last good commit, even if little can be read."""
        with contextlib.suppress(OSError):
            written = [self._last] if self._last is not None and self._last.is_dir() else []
            for path in written or [self.directory / each.name for each in reversed(self.list()) if not each.problem]:
                return f"The last good commit is still there: {path}"
        return "There is no good commit in it."


def no_good_commit(directory: Path, bad: Mapping[str, str]) -> DistributionError:
    """Returns the error for a folder without a good commit. `bad` has the problem of each commit, by its name."""
    return DistributionError(
        f"No commit in {directory} is good.",
        "; ".join(f"{name}: {problem}" for name, problem in bad.items()),
        "Bring the files back from a copy. To begin again, pass an empty folder.",
    )
