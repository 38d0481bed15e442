"""Proves the installed Horovod: two processes add up numbers that neither of them has alone.

    python -m keras_dist.horovod_build.proof

It runs in an interpreter of its own, which sees what pip has just installed as every later one will.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from keras_dist import environment
from keras_dist.errors import DistributionError
from keras_dist.horovod_build.errors import HorovodBuildError
from keras_dist.launch.cluster import HorovodCluster

SIZE = 2
TIME_LIMIT_S = 180.0
POLL_INTERVAL_S = 0.1

# Rank r sends [r + 1, 10 r + 1, 100 r + 1]; no rank's own numbers, nor their double, are the sum.
EXPECTED = [3.0, 12.0, 102.0]

RANK_PROGRAM = """
import json
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
sent = tf.constant([1.0, 10.0, 100.0]) * hvd.rank() + 1.0
received = hvd.allreduce(sent, op=hvd.Sum, name="keras_dist_proof")
print("RESULT", json.dumps(received.numpy().tolist()))
hvd.shutdown()
"""


def prove(environ: Mapping[str, str], time_limit_s: float = TIME_LIMIT_S) -> float:
    """All-reduces on two processes with the installed Horovod, and compares the result.

    Args:
        environ: The environment to run in.
        time_limit_s: How long it may take, including two starts of TensorFlow.

    Returns:
        The seconds that it took.

    Raises:
        ConfigurationError: If this host has no address of its own.
        HorovodBuildError: If the result is another, a process fails, or the time is up.
    """
    environment.check_host_name()
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_dist.horovod_build.proof"],
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        raise _failure(f"no result after {time_limit_s:.0f} s", "") from None
    finally:
        # The two ranks are in its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        raise _failure(f"exit code {process.returncode}", output)
    return time.monotonic() - start


def _failure(received: str, output: str) -> HorovodBuildError:
    return HorovodBuildError(
        f"Horovod is installed, but its proof failed: {SIZE} processes could not all-reduce.",
        "\n  ".join([received, *output.strip().splitlines()[-20:]]),
        "Build it again with `keras-dist install-horovod --force`; if that fails too, please report it.",
    )


def main() -> int:
    """Starts the ranks, and compares what each of them received. Returns the exit code."""
    try:
        outputs = _run_ranks()
    except DistributionError as error:
        print(error)
        return 1
    for rank, output in outputs.items():
        results = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        if results != [json.dumps(EXPECTED)]:
            print(f"{output}\nRank {rank} received {results}, expected {EXPECTED}.")
            return 1
    return 0


def _run_ranks() -> dict[int, str]:
    """Returns what each rank printed; only the failed ones', if there are."""
    with HorovodCluster(SIZE, environment.current()) as cluster, contextlib.ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK_PROGRAM],
                env=cluster.environment(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(SIZE)
        ]
        for process in ranks:
            stack.callback(process.kill)
        # A rank that fails to load Horovod would leave the other one waiting for it.
        while all(process.poll() is None for process in ranks):
            time.sleep(POLL_INTERVAL_S)
        failed = {rank: process.poll() for rank, process in enumerate(ranks) if process.poll() not in (None, 0)}
        if failed:
            stack.close()
        # They print less than a pipe holds, so none of them waits for a reader.
        outputs = {rank: process.communicate()[0] for rank, process in enumerate(ranks)}
        return {rank: f"{outputs[rank]}\nRank {rank} ended with code {failed[rank]}." for rank in failed} or outputs


if __name__ == "__main__":
    sys.exit(main())
