"""The options of `keras-dist install-horovod`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from keras_dist import environment

# Each job needs up to 0.6 GB; Horovod itself never starts more than 8.
MOST_JOBS = 8


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """The options of a build.

    Args:
        mpi: Build the MPI controller and operations too. Gloo is always built.
        gpu: Build the NCCL operations for NVIDIA GPUs. Untested.
        jobs: Number of compilers that run at once.
        wheel_dir: Where wheels are kept.
        force: Build even if such a wheel exists.
    """

    mpi: bool = False
    gpu: bool = False
    jobs: int = 1
    wheel_dir: Path = Path()
    force: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the operations that are built: part of a wheel's key."""
        return ("gloo", *(("mpi",) if self.mpi else ()), *(("gpu",) if self.gpu else ()))


def default_wheel_dir(environ: Mapping[str, str]) -> Path:
    """Returns the directory of wheels in the user's cache."""
    return environment.cache_folder(environ) / "horovod"


def default_checksum_dir(environ: Mapping[str, str]) -> Path:
    """Returns where the checksums of wheels are kept: not beside the wheels."""
    return environment.state_folder(environ) / "horovod"


def default_jobs() -> int:
    """Returns the number of compilers to run at once: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)
