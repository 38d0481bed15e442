"""`keras-dist commits`: lists the commits of a folder. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keras_dist.errors import ConfigurationError, DistributionError

if TYPE_CHECKING:
    from keras_dist.state.commits import Entry

DESCRIPTION = """\
Lists what a training can resume from: the commits that it has left in a folder, oldest first. Reads every file of them
and compares its checksum, so it tells which ones a disk or a transfer has damaged. It changes nothing, and may be used
while the training runs.

  step    batches done since the beginning of the training
  epoch   the epoch that it was in; the first is 0
  batch   batches done in this epoch
  time    when the commit was written, UTC

The last line names the commit that a restart takes. The exit code is 0 if there is one, and 1 if not."""
EXAMPLES = """\
examples:
  keras-dist commits checkpoints
  keras-dist commits checkpoints && python train.py    start only if there is something to resume from"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("directory", metavar="DIRECTORY", help="the folder of the commits")


def main(args: argparse.Namespace) -> int:
    """Runs `keras-dist commits`. Returns 0 if there is a good commit, else 1."""
    try:
        _show(Path(args.directory))
    except DistributionError as error:
        sys.stdout.flush()
        print(f"keras-dist commits: {error}", file=sys.stderr)
        return 1
    return 0


def _show(directory: Path) -> None:
    from keras_dist.state.commits import Commits, no_good_commit  # takes NumPy's time, which `--help` does not need

    try:
        entries = Commits(directory).list() if directory.is_dir() else None
    except OSError as error:
        raise ConfigurationError(
            "The folder of the commits can't be read.", f"{directory}: {error.strerror}", "Check its permissions."
        ) from error
    if not entries:
        raise ConfigurationError(
            "The folder of the commits was not found." if entries is None else "There is no commit in this folder.",
            str(directory),
            "Give the folder that the script passes as `directory`, relative to this one.",
        )
    rows = [("step", "epoch", "batch", "time", "size", ""), *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # all columns to the right but the last one
        cells = [f"{cell:>{width}}" for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        print("  ".join([*cells, row[-1]]).rstrip())
    good = [entry for entry in entries if not entry.problem]
    if not good:
        raise no_good_commit(directory, {entry.name: entry.problem for entry in entries})
    print(f"A restart resumes after step {good[-1].step:,}, from {directory / good[-1].name}")


def _row(entry: Entry) -> tuple[str, ...]:
    epoch, batch = (f"{entry.place.epoch:,}", f"{entry.place.batch:,}") if entry.place else ("?", "?")
    time = f"{entry.time:%Y-%m-%d %H:%M:%S}" if entry.time else "?"
    return f"{entry.step:,}", epoch, batch, time, _readable(entry.size), entry.problem or "good"


def _readable(size: float) -> str:
    index = 0
    while size >= 999.5 and index < 4:
        size, index = size / 1000, index + 1
    return f"{size:.{1 if index else 0}f} {['B', 'kB', 'MB', 'GB', 'TB'][index]}"
