"""Starts Horovod: imports it, checks and sets its options, and connects the ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_dist import environment
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError, PeerLostError
from keras_dist.logging import logger

DEFAULTS = {
    # Milliseconds between two checks for gradients to send. The gradients of a step wait for it: Horovod's own 1 ms is
    # half a step of a small model. But each check takes time of a core, also where nothing is sent: .55 of one at
    # 0.1 ms, .24 at 0.5 ms, .13 at 1 ms. Steps were no shorter at 0.1 than at 0.5.
    "HOROVOD_CYCLE_TIME": "0.5",
    # Horovod's stall inspector warns about a rank that has waited for so long, then ends it. The watchdog finds ranks
    # in different calls within seconds; this is for all other reasons.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
}


def load() -> Any:
    """Imports `horovod.tensorflow`. Raises `ConfigurationError` if it isn't installed or is for another TensorFlow."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ConfigurationError(
            "Horovod for TensorFlow is not installed.",
            f"{type(error).__name__}: {error}",
            "Build and install it for your TensorFlow with `keras-dist install-horovod`.",
        ) from error
    except tf.errors.NotFoundError as error:
        raise ConfigurationError(
            f"The installed Horovod was built for another TensorFlow than {tf.__version__}.",
            str(error).splitlines()[0],
            "Build it for this one with `keras-dist install-horovod`.",
        ) from error
    return hvd


def check_options(hvd: Any, options: Mapping[str, Any], size: int) -> None:
    """Raises `ConfigurationError` if the installed Horovod doesn't support the options for this number of ranks."""
    # Horovod ignores the option silently without either of them (operations.cc of 0.28.1).
    if options["hierarchical_allreduce"] and not (hvd.nccl_built() and hvd.mpi_built()):
        raise ConfigurationError(
            "The option `hierarchical_allreduce` needs a Horovod built with NCCL and MPI.",
            "hierarchical_allreduce=True and a Horovod without NCCL or without MPI",
            "Leave it out, or build Horovod with `keras-dist install-horovod --gpu --mpi` on a GPU machine.",
        )
    if options["op"] == "adasum":
        if size & (size - 1):
            raise ConfigurationError(
                "Adasum needs a number of ranks that is a power of two.",
                f"op='adasum' with {size} ranks",
                "Start 2, 4, 8, … ranks, or use op='average'.",
            )
        if not (hvd.mpi_built() or hvd.nccl_built()):
            raise ConfigurationError(
                "Adasum needs a Horovod built with MPI.",
                "op='adasum' and a Horovod with Gloo only",
                "Build it with `keras-dist install-horovod --mpi`, or use op='average'.",
            )
        if options["compression"] is not None:
            raise ConfigurationError(
                "Adasum and compression can't be combined.",
                f"op='adasum', compression={options['compression']!r}",
                "Leave one of them out.",
            )


def settings(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options as the environment variables that Horovod reads when it starts."""
    values = {}
    if options["fusion_threshold_mb"] is not None:
        values["HOROVOD_FUSION_THRESHOLD"] = str(int(options["fusion_threshold_mb"] * 2**20))
    if options["cycle_time_ms"] is not None:
        values["HOROVOD_CYCLE_TIME"] = str(options["cycle_time_ms"])
    if options["hierarchical_allreduce"]:
        values["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    return values


def connect(hvd: Any, launch: Launch, cores: int) -> Topology:
    """Connects to the other ranks. This one has `cores` for itself."""
    if not launch.is_mpi:
        # Without our patch the rings of Horovod 0.28.1 forget HOROVOD_GLOO_IFACE, and use the host's name.
        is_patched = hasattr(importlib.import_module("horovod"), "patched_by_keras_dist")
        if not (is_patched and environment.get("HOROVOD_GLOO_IFACE")):
            environment.check_host_name(several_hosts=launch.topology.local_size < launch.topology.size)
    elif not hvd.mpi_built():
        raise ConfigurationError(
            f"The installed Horovod was built without MPI, so it can't join ranks that {launch.launcher} has started.",
            f"{launch.topology} and a Horovod with Gloo only",
            "Build it with `keras-dist install-horovod --mpi`, or start the script with `keras-dist run -np N`.",
        )
    threads = _threads()
    try:
        hvd.init()
    except Exception as error:
        raise PeerLostError(
            "Horovod could not connect the ranks.",
            f"{type(error).__name__}: {error} (on {launch.topology}, started by {launch.launcher})",
            "Look for the rank that failed first, and whether the hosts can reach each other.",
        ) from error
    if hvd.size() != launch.topology.size:
        raise ConfigurationError(
            "Horovod has found another number of ranks than the launcher has started.",
            f"{hvd.size()} instead of {launch.topology.size}, started by {launch.launcher}",
            "Start the script with the `mpirun` of the MPI that Horovod was built with.",
        )
    if hvd.gloo_enabled() and cores < 2:
        # Gloo waits for the network by spinning. The scheduling class SCHED_IDLE lets such a thread run only when the
        # core has nothing else to do: in our measurement a small step took 2.4 ms instead of 5.7 ms. The first new
        # thread is Horovod's main loop, which must not be delayed; the others are Gloo's.
        new_threads = _threads() - threads
        logger().debug("Gloo's %d threads run only when the core is idle", len(new_threads) - 1)
        for thread in sorted(new_threads)[1:]:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task"))) if os.path.isdir("/proc/self/task") else set()
