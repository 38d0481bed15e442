"""`keras-dist selftest`: starts ranks that run `selftest_ranks`, unless another launcher has started this command."""

import argparse

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher import cli as launcher
from keras_dist.launcher import nodes
from keras_dist.launcher.job import LAUNCHABLE, WITH_RANKS

DESCRIPTION = """\
Tests your machines as `keras-dist run` would use them; needs no script and no data, and writes nothing. Each line
passes or says what to do: whether all ranks start, whether sums over the ranks are right in every dtype, how long they
take beside the network alone, whether a small training has the weights of one process, whether all ranks end.

Takes the options of `keras-dist run` and starts ranks in the same way. Started by horovodrun, mpirun or TF_CONFIG, each
process is a rank. The exit code is 0 if all is well, 1 if a test failed. What it prints is what a report needs."""
EXAMPLES = """\
examples:
  keras-dist selftest                      2 ranks on this machine
  keras-dist selftest -np 8 --backend multi_worker
  keras-dist selftest -H a:4,b:4           4 ranks on each of the hosts a and b, over ssh
  keras-dist selftest --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 -np 4
                                           the same line on the other machine, with --node-rank 1
  srun --ntasks=8 keras-dist selftest      under Slurm
  horovodrun -np 2 keras-dist selftest     under another launcher
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launcher.add_arguments(parser)
    parser.usage = "keras-dist selftest [-np N] [options of `keras-dist run`]"
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES


def main(args: argparse.Namespace) -> int:
    if args.target or args.module:
        raise ConfigurationError(
            "keras-dist selftest runs no script.", " ".join(args.target) or "-m",
            "Leave it out. To try a script, run it with KERAS_DIST_VERIFY=1.",
        )
    given = [f"--{name}" for name in ("workers", "ps", "serve") if getattr(args, name)]
    if args.backend in set(LAUNCHABLE).difference(WITH_RANKS):
        given.append(f"--backend {args.backend}")
    if given:
        raise ConfigurationError(
            "keras-dist selftest tests ranks, and parameter servers have none.", ", ".join(given),
            "Use -np; `keras-dist run --workers 2 --ps 1 train.py` with KERAS_DIST_VERIFY=1 tests a script with them.",
        )
    launch = environment.detect_launch()
    if launch is not None and not launch.is_srun:  # which starts our launchers, the others ranks
        from keras_dist.diagnostics import selftest_ranks

        return selftest_ranks.main()
    told = nodes.told_by(environment.current())
    if args.num_processes is None and args.hosts is None and "num_processes" not in told:
        args.num_processes = "2"
    args.module, args.target = True, ["keras_dist.diagnostics.selftest_ranks"]
    code = launcher.main(args)
    if code == 0 and (args.node_rank or "0") == "0":
        print("ok      end: all ranks have ended with exit code 0")
    return code
