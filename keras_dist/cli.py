"""The command `keras-dist`. Imports only the module of the subcommand, never TensorFlow."""

import argparse
import importlib
import importlib.metadata
import shlex
import sys
from collections.abc import Sequence

from keras_dist.errors import ConfigurationError, DistributionError, Stopped

# The one place to add a command: its summary, and its module with `add_arguments(parser)` and `main(args) -> int`.
COMMANDS = {
    "run": ("run a script as several processes, on one machine or many", "keras_dist.launcher.cli"),
    "kube": ("print the manifests of a job for Kubernetes", "keras_dist.launcher.kube"),
    "serve": ("keep a worker or a parameter server running", "keras_dist.launcher.serve"),
    "install-horovod": ("build Horovod for the installed TensorFlow", "keras_dist.horovod_build.build"),
    "dry-run": ("compile a script's training step for a TPU, without a TPU", "keras_dist.diagnostics.process"),
    "commits": ("list what a killed training can resume from", "keras_dist.state.cli"),
    "selftest": ("test that ranks on your machines sum and train right", "keras_dist.diagnostics.selftest"),
    "env": ("show versions, hardware and the chosen backend for a bug report", "keras_dist.diagnostics.env"),
}

EPILOG = """\
Two lines make a Keras 3 script distributed:

  import keras_dist as kd
  kd.init()                        # first, before data and model
  ...
  model = kd.distribute(model)     # before compile and fit, which do not change

examples:
  keras-dist install-horovod       needed once, takes a few minutes
  keras-dist run -np 2 train.py    train on 2 processes on this machine
  keras-dist env                   what to put into a bug report

`keras-dist COMMAND --help` shows the options of a command.
"""

_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `keras-dist` with these arguments, by default those of this process, and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        return _answer(argv)
    summary, name = COMMANDS[argv[0]]
    try:
        module = importlib.import_module(name)
        parser = argparse.ArgumentParser(
            prog=f"keras-dist {argv[0]}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(parser)
        return int(module.main(parser.parse_args(argv[1:])))
    except DistributionError as error:
        print(f"keras-dist {argv[0]}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except Stopped as stopped:
        print(f"keras-dist {argv[0]}: stopped by {stopped}", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        return 130


def _answer(argv: Sequence[str]) -> int:
    """Answers `--help`, `--version`, no argument, an unknown command, and the arguments of `keras-dist run` alone."""
    if argv and (argv[0] in ("-np", "--num-processes", "--workers", "--backend") or argv[0].endswith(".py")):
        line = shlex.join(argv)
        error = ConfigurationError("The command is missing.", f"keras-dist {line}", f"Type `keras-dist run {line}`.")
        print(f"keras-dist: {error}", file=sys.stderr)
        return _EXIT_USAGE
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, (summary, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="keras-dist",
        usage="keras-dist COMMAND [options]",
        description=f"Distributed training for Keras 3.\n\ncommands:\n{commands}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"keras-dist {importlib.metadata.version('keras_dist')}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", nargs="?", choices=[*COMMANDS], metavar="COMMAND", help=argparse.SUPPRESS)
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
