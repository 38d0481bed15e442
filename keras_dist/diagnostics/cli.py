"""`keras-dist dry-run`: compiles a script's training step with the real TPU compiler, without a TPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from keras_dist.diagnostics.process import SEARCH_SECONDS, dry_run
from keras_dist.diagnostics.report import Report
from keras_dist.errors import ConfigurationError, DistributionError, Stopped
from keras_dist.launcher.processes import interrupted_by_stop_signals

DESCRIPTION = """\
Runs a script up to its first `fit`, and compiles the model's training step for a TPU with the real TPU compiler.
Needs no TPU and no cloud account. The first run installs the compiler (1 to 2 GB, some minutes); later runs need no
network.

Reports whether the step compiles, each operation that a TPU can't run, the memory that the step needs, the work per
step, and the largest batch that fits: each as soon as it is known. If you stop it, or the search takes too long, it
keeps what was found, and says what is missing. The exit code is 0 if the step compiles and fits, 1 if not."""
EXAMPLES = """\
examples:
  keras-dist dry-run train.py --target v5e-8
  keras-dist dry-run train.py --target v4-16 --batch 1024 --no-search
  keras-dist dry-run train.py --target v5e-8 --json -- --epochs 1     arguments after `--` go to the script"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("script", help="the script, with or without the two lines of keras_dist")
    parser.add_argument("arguments", nargs="*", help="its arguments, after `--`")
    parser.add_argument("--target", required=True, metavar="TPU", help="the TPU: v2-8, v3-8, v4-8, v5e-8, v6e-1, ...")
    parser.add_argument("--batch", type=int, metavar="N", help="global batch size (default: that of the script)")
    parser.add_argument(
        "--trials", type=int, default=6, metavar="N",
        help="compile at most N times to find the largest batch that fits (default: 6)",
    )  # fmt: skip
    parser.add_argument(
        "--search-seconds", type=float, default=SEARCH_SECONDS, metavar="S",
        help=f"stop this search after S seconds (default: {SEARCH_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--no-search", dest="trials", action="store_const", const=0, help="skip the search")
    parser.add_argument("--no-cache", action="store_true", help="compile again what was compiled before")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Runs `keras-dist dry-run`. Returns 0 if the step compiles and fits, 1 if not."""
    if not Path(args.script).is_file():
        raise ConfigurationError("The script was not found.", args.script, "Give the path of a Python file.")
    for name, least in (("batch", 1), ("trials", 0), ("search_seconds", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} must be at least {least}.", f"{option} {value:g}", "Leave it out.")
    reports = dry_run(
        args.target, sys.stderr, script=args.script, arguments=tuple(args.arguments), batch=args.batch,
        trials=args.trials, search_seconds=args.search_seconds, cached=not args.no_cache,
    )  # fmt: skip
    with interrupted_by_stop_signals(), contextlib.closing(reports):
        return 0 if _show(reports, args.json).ok else 1


def _show(reports: Iterator[Report], as_json: bool) -> Report:
    """Prints each line of the report as soon as it is known, JSON at the end. Returns the last report."""
    shown = 0

    def show() -> None:
        nonlocal shown
        lines = [] if as_json else str(report).splitlines()[shown:]
        shown += len(lines)
        for line in lines:
            print(line, flush=True)

    report = next(reports)
    try:
        show()
        for report in reports:  # noqa: B007 - `show` does
            show()
    except (Stopped, DistributionError) as error:
        report = dataclasses.replace(report, stopped=str(error) if isinstance(error, Stopped) else "an error")
        raise
    finally:
        show()
        if as_json:
            print(json.dumps(report.as_json(), indent=1), flush=True)
    return report
