"""Tests the installed Horovod: two processes add up numbers that neither of them has alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping

from keras_dist.horovod_build import HorovodBuildError
from keras_dist.launcher.processes import start_process

SIZE = 2
TIME_LIMIT_S = 180.0

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


def smoke_test(environ: Mapping[str, str], time_limit_s: float = TIME_LIMIT_S) -> float:
    """All-reduces on two processes with the installed Horovod, and compares the result.

    The processes are new interpreters, which see what pip has just installed.

    Args:
        environ: The environment to run in.
        time_limit_s: How long it may take, including two starts of TensorFlow.

    Returns:
        The seconds that it took.

    Raises:
        HorovodBuildError: If the result is wrong, a process fails, or the time is up.
    """
    start = time.monotonic()
    launcher = [sys.executable, "-m", "keras_dist", "run", "--backend", "horovod", "-np", str(SIZE), "--output", "all"]
    process = start_process(
        [*launcher, "--", sys.executable, "-c", RANK_PROGRAM],
        {"TF_CPP_MIN_LOG_LEVEL": "2", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        raise _failure(f"no result after {time_limit_s:.0f} s", "") from None
    finally:
        process.terminate()  # the launcher ends its ranks
        process.wait()
    if process.returncode != 0:
        raise _failure(f"exit code {process.returncode}", output.decode(errors="replace"))
    return time.monotonic() - start


def _failure(received: str, output: str) -> HorovodBuildError:
    return HorovodBuildError(
        f"Horovod is installed, but its test failed: {SIZE} processes could not all-reduce.",
        "\n  ".join([received, *output.strip().splitlines()[-20:]]),
        "Build it again with `keras-dist install-horovod --force`; if that fails too, please report it.",
    )
