"""Our corrections to Horovod 0.28.1: what is replaced, where, and why."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from keras_dist.horovod_build.errors import HorovodBuildError


@dataclasses.dataclass(frozen=True)
class Correction:
    """One replacement in one file of the source.

    Args:
        path: The file, relative to the root of the source.
        before: The text to replace, which must be there exactly once.
        after: The text that takes its place.
        why: What goes wrong without it.
    """

    path: str
    before: str
    after: str
    why: str


CORRECTIONS: tuple[Correction, ...] = (
    Correction(
        path="horovod/tensorflow/xla_mpi_ops.cc",
        before="#if TENSORFLOW_VERSION >= 2006000000\n",
        after="#if TENSORFLOW_VERSION >= 2006000000 && HAVE_GPU\n",
        why="It includes XLA headers that TensorFlow 2.19 and later moved or no longer ship; "
        "all that needs them is for GPUs.",
    ),
    Correction(
        path="horovod/common/gloo/gloo_controller.cc",
        before="  global_ranks_.reserve(size_);\n",
        after="  global_ranks_.resize(size_);\n",
        why="The list of ranks stays empty, so under Gloo the stall inspector finds nobody missing: "
        "a job that waits for a lost rank hangs for ever.",
    ),
)


def apply_corrections(root: Path, corrections: tuple[Correction, ...] = CORRECTIONS) -> None:
    """Corrects an unpacked source, in place.

    Args:
        root: Directory of the unpacked source.
        corrections: What to correct.

    Raises:
        HorovodBuildError: If a text to replace is not there exactly once. No file is changed then.
    """
    corrected = {correction.path: _corrected(root, correction) for correction in corrections}
    for path, text in corrected.items():
        (root / path).write_text(text, encoding="utf-8")


def _corrected(root: Path, correction: Correction) -> str:
    file = root / correction.path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    count = text.count(correction.before)
    if count != 1:
        raise HorovodBuildError(
            f"A correction does not fit this Horovod source: {correction.path} must hold the line "
            f"{correction.before.strip()!r} exactly once.",
            f"{count} times" if file.is_file() else "no such file",
            "This is a bug of keras_dist, or not the source of Horovod 0.28.1. Please report it.",
        )
    return text.replace(correction.before, correction.after)


def corrections_version(corrections: tuple[Correction, ...] = CORRECTIONS) -> str:
    """Returns a short text that changes with what is corrected, so that older wheels are built anew."""
    changes = [(correction.path, correction.before, correction.after) for correction in corrections]
    return hashlib.sha256(repr(changes).encode()).hexdigest()[:8]
