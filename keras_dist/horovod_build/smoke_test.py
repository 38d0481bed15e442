"""Tests the installed Horovod: two processes add up numbers that neither of them has alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping

from keras_dist.horovod_build import HorovodBuildError
from keras_dist.launcher.processes import start_process

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


def smoke_test(environ: Mapping[str, str], time_limit_s: float = 180.0) -> float:
    """All-reduces on two processes with the installed Horovod, and compares the result.

    The processes are new interpreters, which see what pip has just installed. Returns the seconds that it took.
    """
    start = time.monotonic()
    launcher = [sys.executable, "-m", "keras_dist", "run", "--backend", "horovod", "-np", str(SIZE), "--output", "all"]
    process = start_process(
        [*launcher, "--", sys.executable, "-c", RANK_PROGRAM],
        {"TF_CPP_MIN_LOG_LEVEL": "2", **environ},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=time_limit_s)
        failure = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        output, failure = b"", f"no result after {time_limit_s:.0f} s"
    finally:
        process.terminate()  # the launcher ends its ranks
        process.wait()
    if failure:
        raise HorovodBuildError(
            f"Horovod is installed, but its test failed: {SIZE} processes could not all-reduce.",
            "\n  ".join([failure, *output.decode(errors="replace").strip().splitlines()[-20:]]),
            "Build it again with `keras-dist install-horovod --force`; if that fails too, please report it.",
        )
    return time.monotonic() - start
