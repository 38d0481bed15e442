"""The files of one commit: `arrays.npz`, and `manifest.json` with all else and the checksums of both.

Imports neither TensorFlow nor Keras. Nothing here is pickled, so reading a commit runs no code of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist.errors import ConfigurationError
from keras_dist.state.commit_content import Stored, restored

FORMAT = 1
MANIFEST, ARRAYS = "manifest.json", "arrays.npz"


@dataclasses.dataclass(frozen=True)
class Place:
    """How far a training has come.

    Args:
        step: Batches done since the beginning of the training.
        epoch: The epoch that it is in; the first is 0.
        batch: Batches done in this epoch.
    """

    step: int
    epoch: int
    batch: int

    def __post_init__(self) -> None:
        if any(type(value) is not int or value < 0 for value in dataclasses.astuple(self)):
            raise ConfigurationError("A place is three integers, none negative.", repr(self), "Count from 0.")


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit that was read.

    Args:
        place: How far the training had come.
        arrays: The arrays by name, with the bits and dtypes that were written.
        path: Its folder.
    """

    place: Place
    arrays: Mapping[str, np.ndarray]
    path: Path


@dataclasses.dataclass(frozen=True)
class Entry:
    """A commit in a list.

    Args:
        name: Name of its folder.
        step: Its step, which the name tells also if nothing else can be read.
        place: How far the training had come; `None` if its manifest can't be read.
        time: When it was written, UTC; `None` if its manifest can't be read.
        size: Bytes of its files.
        problem: What is wrong with it; empty if it is good.
    """

    name: str
    step: int
    place: Place | None
    time: datetime | None
    size: int
    problem: str


@dataclasses.dataclass(frozen=True, order=True)
class Found:
    """A folder that has the name of a commit. Sorted, the newest is last.

    Args:
        step: The step that its name tells.
        number: 1, and one more each time that the step is committed again.
        path: Its path.
    """

    step: int
    number: int
    path: Path


class BadCommit(Exception):
    """A commit can't be used. The text says what is wrong with it."""


def write_files(folder: Path, place: Place, arrays: Sequence[Stored]) -> None:
    """Writes the files of a commit.

    Args:
        folder: An empty folder.
        place: How far the training has come.
        arrays: What `stored` returned for each array.
    """
    with open(folder / ARRAYS, "xb") as file:
        # By position, as names like "file" are arguments of `savez`: the manifest has the names, in this order.
        np.savez(file, *(stored.array for stored in arrays))
    size, digest = _measured(folder / ARRAYS)
    fields = {
        "format": FORMAT,
        **dataclasses.asdict(place),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "keras_dist": _version(),
        "files": {ARRAYS: {"bytes": size, "sha256": digest}},
        "arrays": [stored.entry for stored in arrays],
    }
    lines = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in fields.items())
    (folder / MANIFEST).write_bytes(_sealed(f"{{\n{lines}".encode()))


def read_commit(found: Found) -> Commit:
    """Reads a commit, and checks every byte of it.

    Raises:
        BadCommit: Names what is wrong with it.
    """
    manifest = _manifest(found)
    _check_files(found.path, manifest)
    return Commit(_place(manifest), _read_arrays(found.path, manifest), found.path)


def entry_of(found: Found) -> Entry | None:
    """Checks every byte of a commit.

    Returns:
        What a list shows of it, `None` if it has just been removed.
    """
    place = time = None
    problem = ""
    try:
        manifest = _manifest(found)
        place, time = _place(manifest), datetime.fromisoformat(manifest["time"])
        _check_files(found.path, manifest)
    except BadCommit as bad:
        problem = str(bad)
    size = _size(found.path)
    if not found.path.exists():
        return None
    return Entry(found.path.name, found.step, place, time, size, problem)


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises `BadCommit` if the files of a commit are not those that were written."""
    for name, expected in manifest["files"].items():
        size, digest = _measured(folder / name)
        if size != expected["bytes"]:
            raise BadCommit(f"{name} is {size:,} bytes long, and {expected['bytes']:,} were written")
        if digest != expected["sha256"]:
            raise BadCommit(f"the checksum of {name} does not fit")


def _manifest(found: Found) -> dict[str, Any]:
    if found.path.exists() and not found.path.is_dir():
        raise BadCommit("it is not a folder")
    sealed = _bytes_of(found.path / MANIFEST)
    if sealed != _sealed(sealed[: -len(_sealed(b""))]):
        raise BadCommit(f"the checksum of {MANIFEST} does not fit, so it was cut off or changed")
    manifest: dict[str, Any] = json.loads(sealed)
    if manifest["format"] != FORMAT:  # other versions are sealed in the same way
        raise BadCommit(f"its format is version {manifest['format']}, and this keras_dist reads version {FORMAT}")
    if manifest["step"] != found.step:
        raise BadCommit(f"it holds step {manifest['step']:,}, so its folder was renamed")
    return manifest


def _place(manifest: Mapping[str, Any]) -> Place:
    return Place(manifest["step"], manifest["epoch"], manifest["batch"])


def _read_arrays(folder: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    try:
        with np.load(folder / ARRAYS, allow_pickle=False) as npz:
            return {entry["name"]: restored(npz[f"arr_{i}"], entry) for i, entry in enumerate(manifest["arrays"])}
    except (OSError, ValueError, KeyError, EOFError, ImportError, zipfile.BadZipFile) as error:
        raise BadCommit(f"{ARRAYS} can't be read: {type(error).__name__}: {error}") from error


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # removed meanwhile
        for file in [folder, *folder.glob("*")]:
            total += file.stat().st_size if file.is_file() else 0
    return total


def _sealed(body: bytes) -> bytes:
    """Closes a JSON object with the checksum of all that comes before."""
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def _measured(file: Path) -> tuple[int, str]:
    """Returns the size in bytes and the SHA-256 of a file."""
    try:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return opened.tell(), digest
    except OSError as error:
        raise _unreadable(file, error) from error


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> BadCommit:
    if isinstance(error, FileNotFoundError):
        return BadCommit(f"{file.name} is missing")
    return BadCommit(f"{file.name} can't be read: {error.strerror}")


def _version() -> str:
    from keras_dist import __version__

    return __version__
