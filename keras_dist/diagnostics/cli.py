"""`keras-dist dry-run`: compiles a script's training step with the real TPU compiler, without a TPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from keras_dist.errors import ConfigurationError

DESCRIPTION = """\
Runs a script up to its first `fit`, and compiles the model's training step for a TPU with the real TPU compiler.
Needs no TPU and no cloud account. The first run installs the compiler (1 to 2 GB, some minutes); later runs need no
network.

Reports whether the step compiles, each operation that a TPU can't run, the memory that the step needs, the largest
batch that fits, and the work per step. The exit code is 0 if the step compiles and fits, 1 if not."""
EXAMPLES = """\
examples:
  keras-dist dry-run train.py --target v5e-8
  keras-dist dry-run train.py --target v4-16 --batch 1024 --no-search
  keras-dist dry-run train.py --target v5e-8 --json -- --epochs 1     arguments after `--` go to the script"""
_TRIALS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `keras-dist dry-run`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("script", help="the script, with or without the two lines of keras_dist")
    parser.add_argument("arguments", nargs="*", help="its arguments, after `--`")
    parser.add_argument("--target", required=True, metavar="TPU", help="the TPU: v2-8, v3-8, v4-8, v5e-8, v6e-1, ...")
    parser.add_argument("--batch", type=int, metavar="N", help="global batch size (default: that of the script)")
    parser.add_argument(
        "--trials", type=int, default=_TRIALS, metavar="N",
        help=f"compile at most N times to find the largest batch that fits (default: {_TRIALS})",
    )  # fmt: skip
    parser.add_argument("--no-search", dest="trials", action="store_const", const=0, help="skip the search")
    parser.add_argument("--no-cache", action="store_true", help="compile again what was compiled before")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Runs `keras-dist dry-run`.

    Args:
        args: The parsed options.

    Returns:
        0 if the step compiles and fits, 1 if not.
    """
    from keras_dist.diagnostics.process import dry_run

    if not Path(args.script).is_file():
        raise ConfigurationError("The script was not found.", args.script, "Give the path of a Python file.")
    for name, least in (("batch", 1), ("trials", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigurationError(f"--{name} must be at least {least}.", f"--{name} {value}", "Leave it out.")
    report = dry_run(
        args.target, sys.stderr, script=args.script, arguments=tuple(args.arguments), batch=args.batch,
        trials=args.trials, cached=not args.no_cache,
    )  # fmt: skip
    print(json.dumps(report.as_json(), indent=1) if args.json else report)
    return 0 if report.ok else 1
