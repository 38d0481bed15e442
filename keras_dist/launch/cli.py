"""`keras-dist run`: the launcher's command line."""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launch.cluster import Cluster, ParameterServerCluster
from keras_dist.launch.job import COMMIT_SECONDS
from keras_dist.launch.local import LAUNCHABLE, launch, make_cluster
from keras_dist.launch.output import CHIEF, MODES
from keras_dist.launch.serve import CLUSTER_FILE, serve_all

EXAMPLES = """\
examples:
  keras-dist run -np 4 train.py --epochs 10      4 processes of a script, with its own arguments
  keras-dist run -np 4 -m project.train          a module
  keras-dist run -np 2 -- python -X dev train.py any other program
  keras-dist run --workers 4 --ps 2 train.py     parameter servers: one coordinator, 4 workers, 2 servers
  keras-dist run --workers 2 --ps 1 --serve      a cluster for notebooks, with its addresses in cluster.json
  keras-dist run -np 2 --output all train.py     shows the output of all ranks, each line with its rank
  keras-dist run -np 2 --log-dir logs train.py   writes the whole output of each rank to logs/rank-0.log, ...
  keras-dist run -np 4 --max-restarts 3 train.py goes on from the last commit after a crash, at most three times

Options come before the script; everything after it goes to the script. The exit code is 0 if all ranks succeeded,
else that of the rank that failed first (128 + the signal, if a signal killed it). It is 75 if SIGTERM asked the ranks
to stop and they have committed: the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `keras-dist run`."""
    parser.usage = "keras-dist run -np N [options] (script.py | -m module | -- program) [arguments]"
    parser.epilog = EXAMPLES
    parser.add_argument("-np", "--num-processes", metavar="N", help="number of processes (ranks)")
    parser.add_argument("--workers", metavar="N", help="parameter servers: number of workers, instead of -np")
    parser.add_argument("--ps", metavar="N", help="parameter servers: number of servers (default: 1)")
    parser.add_argument(
        "--serve", action="store_true", help="parameter servers: keep them running, for notebooks; without a script"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="{" + ",".join(["auto", *LAUNCHABLE]) + "}",
        help="how the ranks communicate (default: auto)",
    )
    parser.add_argument(
        "--output",
        default=CHIEF,
        choices=MODES,
        help="whose output is shown: that of rank 0 (default), or of all ranks, each line with its rank",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write the whole output of each rank to DIR/rank-N.log; rank 0 then does not write to the terminal "
        "itself, so Keras does not update its progress bar in place",
    )
    parser.add_argument(
        "--max-restarts",
        default="0",
        metavar="N",
        help="start all ranks again after a crash, at most N times (default: 0); a script with kd.callbacks.Commit "
        "goes on from its last commit. Stops if there is no new commit between two crashes. The logs of a restart are "
        "rank-0.restart-1.log, ...",
    )
    parser.add_argument(
        "--grace",
        default=f"{COMMIT_SECONDS:g}",
        metavar="SECONDS",
        help=f"how long ranks that handle SIGTERM may take to commit and end after it (default: {COMMIT_SECONDS:g}); "
        "less than the scheduler waits before it kills",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does; comes last")
    # Takes everything that follows, even if it looks like an option.
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Runs `keras-dist run` and returns the exit code.

    Raises:
        ConfigurationError: If there is nothing to run, or an option is invalid.
    """
    environ = environment.current()
    if args.serve:
        workers, servers = _check_parameter_servers(args)
        return serve_all(workers, servers, args.target[0] if args.target else CLUSTER_FILE, environ)
    command = _command(args.module, args.target, environ)
    return launch(
        command,
        functools.partial(_cluster, args, command, environ),
        output=args.output,
        log_dir=args.log_dir,
        max_restarts=_restarts(args.max_restarts),
        commit_seconds=_grace(args.grace),
    )


def _cluster(args: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> Cluster:
    if args.workers is not None or args.ps is not None:
        workers, servers = _check_parameter_servers(args)
        return ParameterServerCluster(workers, environ, servers)
    if args.num_processes is None:
        misplaced = any(word in ("-np", "--num-processes") for word in command)
        raise ConfigurationError(
            "The number of processes is missing.",
            f"-np after the script, as an argument of the script: {' '.join(command)}" if misplaced else "no -np",
            "Give it before the script: `keras-dist run -np 2 train.py`.",
        )
    return make_cluster(args.backend, _count(args.num_processes, "-np"), environ)


def _check_parameter_servers(args: argparse.Namespace) -> tuple[int, int]:
    """Returns the number of workers and of servers."""
    if args.workers is None or args.num_processes is not None or args.backend not in ("auto", "parameter_server"):
        raise ConfigurationError(
            "Parameter servers need --workers, and optionally --ps, instead of -np.",
            f"--workers {args.workers}, --ps {args.ps}, -np {args.num_processes}, --backend {args.backend}",
            "For example `keras-dist run --workers 4 --ps 2 train.py`.",
        )
    return _count(args.workers, "--workers"), _count(args.ps or "1", "--ps")


def _count(text: str, option: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise ConfigurationError(
            f"The number after {option} must be a positive integer.", f"{option} {text}", f"Use `{option} 1` or more."
        )
    return count


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(
            "The number after --max-restarts must be an integer from 0 on.",
            f"--max-restarts {text}",
            "Use for example `--max-restarts 3`.",
        )
    return int(text)


def _grace(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            "The number after --grace must be seconds, from 0 on.", f"--grace {text}", "Use for example `--grace 60`."
        )
    return seconds


def _command(module: bool, target: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command that each rank runs."""
    target = target[1:] if target[:1] == ["--"] else target
    if not target or not target[0]:
        raise ConfigurationError("There is nothing to run.", "no script", "Name one: `keras-dist run -np 2 train.py`.")
    program = target[0]
    if module:
        return [sys.executable, "-m", *target]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise ConfigurationError(
                "The script was not found.", f"{program} in {Path.cwd()}", "Check its name and the folder."
            )
        return [sys.executable, *target]
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigurationError(
            "The program was not found.",
            program,
            "Name a script that ends in .py, a module with `-m`, or a program on the PATH.",
        )
    return [*target]
