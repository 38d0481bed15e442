"""What the caller of `keras-dist install-horovod` asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

# Each job takes up to 0.6 GB; Horovod itself never starts more than 8.
MOST_JOBS = 8


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """The options of a build.

    Args:
        mpi: Build the MPI controller and operations too. Gloo is always built.
        gpu: Build the NCCL operations for NVIDIA GPUs. Untested.
        jobs: Number of compilers that run at once.
        wheel_dir: Where wheels are kept.
        force: Build even if there is such a wheel already.
    """

    mpi: bool = False
    gpu: bool = False
    jobs: int = 1
    wheel_dir: Path = Path()
    force: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of what is built in: part of a wheel's identity."""
        return ("gloo", *(("mpi",) if self.mpi else ()), *(("gpu",) if self.gpu else ()))


def default_wheel_dir(environ: Mapping[str, str]) -> Path:
    """Returns the directory of wheels in the user's cache.

    Args:
        environ: The environment, where `XDG_CACHE_HOME` may name the cache.
    """
    home = environ.get("XDG_CACHE_HOME")
    # The specification: a relative path in XDG_CACHE_HOME is invalid and is to be ignored.
    cache = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return cache / "keras_dist" / "horovod"


def default_jobs() -> int:
    """Returns how many compilers to run at once: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS)
