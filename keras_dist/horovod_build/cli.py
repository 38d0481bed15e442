"""`keras-dist install-horovod`: builds, installs and tests Horovod for the installed TensorFlow."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build.build import (
    HOROVOD_VERSION,
    BuildOptions,
    HorovodBuildError,
    WheelCache,
    built_wheel,
    check_requirements,
    install_wheel,
    installed_tensorflow,
    wheel_name,
)
from keras_dist.launcher import descendants
from keras_dist.launcher.nodes import LOOPBACK
from keras_dist.launcher.processes import on_stop_signals, output_of

SIZE = 2

# Rank r sends [r + 1, 10 r + 1, 100 r + 1]; the sum is neither a rank's own numbers nor their double.
RANK_PROGRAM = """
import sys
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
sent = tf.constant([1.0, 10.0, 100.0]) * hvd.rank() + 1.0
received = hvd.allreduce(sent, op=hvd.Sum, name="keras_dist_smoke_test").numpy().tolist()
if received != [3.0, 12.0, 102.0]:
    sys.exit(f"Rank {hvd.rank()} received {received}, expected [3.0, 12.0, 102.0].")
hvd.shutdown()
"""


def smoke_test(environ: Mapping[str, str], time_limit_s: float = 180.0, *, mpi: bool = False) -> float:
    """All-reduces on two processes with the installed Horovod, and compares the result.

    The processes are new interpreters, which see what pip has just installed. Returns the seconds that it took.
    """
    start, job = time.monotonic(), secrets.token_hex(8)
    launcher = [sys.executable, "-m", "keras_dist", "run", "--backend", "horovod", "-np", str(SIZE), "--output", "all"]
    if mpi:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        launcher = ["mpirun", *as_root, "--host", f"{LOOPBACK}:{SIZE}", "-np", str(SIZE)]
    command = [*launcher, "--", sys.executable, "-c", RANK_PROGRAM]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **environ, descendants.JOB: job}
    with descendants.ended(job):  # also of a launcher that takes too long
        output, failure = output_of(command, environ, time_limit_s, start_new_session=True)
    if failure:
        raise HorovodBuildError(
            f"Horovod is installed, but its test failed: {SIZE} processes could not all-reduce.",
            "\n  ".join([failure, *output.strip().splitlines()[-20:]]),
            "Build it again with `keras-dist install-horovod --force`; if that fails too, please report it.",
        )
    return time.monotonic() - start


DESCRIPTION = f"""\
Builds Horovod {HOROVOD_VERSION} for the installed TensorFlow (about 2 minutes on two cores), installs it into
this Python's environment, and tests it with an all-reduce of 2 processes. It keeps the wheel, so the next run
takes seconds. You need a C++ compiler and make; for --mpi also MPI's compiler."""
GPU_WARNING = (
    "--gpu is untested: it builds Horovod's NCCL operations, which do not compile with TensorFlow 2.19 and later "
    "without further changes. Without --gpu, GPUs work too, but Horovod reduces on the CPU."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--mpi", action="store_true", help="build the MPI operations too (needs Open MPI)")
    parser.add_argument("--gpu", action="store_true", help="build the NCCL operations (UNTESTED; needs CUDA and NCCL)")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="keep wheels in DIR instead of the user's cache")
    parser.add_argument("--force", action="store_true", help="build even if such a wheel exists")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers that run at once (default: one per core)")


def main(args: argparse.Namespace) -> int:
    try:
        with on_stop_signals():
            _install_horovod(args)
    except KeyboardInterrupt:
        _print("Interrupted. Partial builds were removed.")
        raise
    except HorovodBuildError as error:
        _print(str(error))
        return 1
    return 0


def _install_horovod(args: argparse.Namespace) -> None:
    environ = environment.current()
    # Each compiler needs up to 0.6 GB; Horovod itself never starts more than 8.
    jobs = min(environment.cores(), 8) if args.jobs is None else args.jobs
    if jobs < 1:
        raise ConfigurationError("A build needs at least one job.", f"--jobs {jobs}", "Use --jobs 1 or more.")
    options = BuildOptions(args.mpi, args.gpu, jobs)
    if options.gpu:
        _print(f"WARNING: {GPU_WARNING}")
    tensorflow = installed_tensorflow() or check_requirements(options, environ)
    wheel_dir = args.wheel_dir.expanduser().absolute() if args.wheel_dir else environment.cache_folder() / "horovod"
    checksum_dir = environment.state_folder() / "horovod"  # not beside the wheels
    cache = WheelCache(wheel_dir, wheel_name(tensorflow, options, environ), checksum_dir)
    wheel, built = None if args.force else cache.find(), False
    if wheel is None:  # else no compiler is needed
        check_requirements(options, environ)
        _print(f"For {tensorflow}, Python {sys.version.split()[0]}, with {', '.join(options.flags)}")
        wheel, built = cache.find_or_build(
            build=lambda: built_wheel(options, environ, cache.log, sys.stderr),
            force=args.force,
            waiting=lambda: _print(f"Waiting for another process that builds the same wheel ({cache.log})"),
        )
    _print(f"Horovod {HOROVOD_VERSION}: {'built' if built else 'taken from the cache'}, {wheel}")
    installed = install_wheel(wheel, environ)
    _print(f"{'Installed' if installed else 'Already installed'}: {sys.prefix}")
    # Whatever the user has set: what was built is tested.
    seconds = smoke_test({**environ, environment.HOROVOD_CONTROLLER: "mpi" if options.mpi else "gloo"}, mpi=options.mpi)
    over = " over MPI" if options.mpi else ""
    _print(f"Tested: an all-reduce of 2 processes{over} gave the right sum ({seconds:.0f} s)")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
