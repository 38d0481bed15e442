"""The cores of the host that each rank computes on: its part of them, so that ranks don't take each other's time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from keras_dist import environment
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger

_THREADS_OF_TENSORFLOW = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_CGROUPS, _CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_PLACES = "/sys/devices/system/cpu/cpu{}/topology/{}"


def bind(launch: Launch) -> int:
    """Gives each rank of a host its part of the cores. Call it before TensorFlow counts them.

    TensorFlow makes a thread for each core that a process may use; so do its data pipelines and oneDNN. Two ranks that
    may use all of them have twice as many threads as there are cores. What a container's limit leaves counts, too.
    With one rank on the host nothing changes, nor if the user or the launcher has said where to run.

    Returns:
        How many cores this rank has for itself, at least 1.

    Raises:
        ConfigurationError: If KERAS_DIST_BIND is neither 0 nor 1.
    """
    rank, ranks = launch.topology.local_rank, launch.topology.local_size
    is_asked = _is_asked()
    if not hasattr(os, "sched_setaffinity"):  # no Linux
        return max(1, (os.cpu_count() or 1) // ranks)
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if launch.binds and len(cores) < (os.cpu_count() or 0):
        logger().debug("cores: %s, as %s has bound this rank", _listed(cores), launch.launcher)
        return len(cores)
    limit = cpu_limit()
    share = max(1, math.floor(min(len(cores), limit or len(cores)) / ranks))
    if ranks == 1 or not is_asked:
        logger().debug("cores: all %d of them for %d rank(s)", len(cores), ranks)
        return share
    own = part_of(cores, rank, ranks)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)
    is_limited = share < len(own) and _set_threads(share)
    logger().debug(
        "cores: %s of %d%s", _listed(own), len(cores), f", and {share} threads within the limit" if is_limited else ""
    )
    return share


def part_of(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Returns the cores of one rank of a host. Ranks share a core only if there are more ranks than cores.

    Args:
        cores: All cores, in the order of `_place`.
        rank: Index among the ranks of the host.
        ranks: Number of ranks of the host.

    Example:

    >>> part_of([0, 1, 2, 3, 4], 0, 2), part_of([0, 1, 2, 3, 4], 1, 2), part_of([0, 1], 2, 3)
    ([0, 1], [2, 3, 4], [1])
    """
    begin, end = rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks
    return list(cores[begin : max(end, begin + 1)])


def cpu_limit(cgroups: Path = _CGROUPS, of_process: Path = _CGROUP) -> float | None:
    """Returns how many cores the control groups of this process may use together, `None` if nothing limits them.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu and
    https://docs.kernel.org/scheduler/sched-bwc.html (version 1).
    """
    try:
        lines = [line.split(":", 2) for line in of_process.read_text().splitlines()]
    except OSError:
        return None
    limits = []
    for _, controllers, path in lines:
        if controllers == "":
            limits += [_quota_of_version_2(group) for group in _with_parents(cgroups, path)]
        elif "cpu" in controllers.split(","):
            limits += [_quota_of_version_1(group) for group in _with_parents(cgroups / "cpu", path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _quota_of_version_2(group: Path) -> float | None:
    quota, period = (_read(group / "cpu.max") or "max 1").split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_of_version_1(group: Path) -> float | None:
    quota, period = int(_read(group / "cpu.cfs_quota_us") or -1), int(_read(group / "cpu.cfs_period_us") or 1)
    return quota / period if quota > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _is_asked() -> bool:
    text = environment.get(environment.BIND, "1")
    if text not in ("0", "1"):
        raise ConfigurationError(
            "KERAS_DIST_BIND says whether each rank gets its part of the cores.",
            f"KERAS_DIST_BIND={text!r}",
            "Set it to 0 or 1, or unset it for 1.",
        )
    return text == "1"


def _place(core: int) -> tuple[int, int, int]:
    """Returns a key by which hyperthreads of one core, and cores of one socket, are neighbours."""
    socket, number = (int(_read(Path(_PLACES.format(core, name))) or 0) for name in ("physical_package_id", "core_id"))
    return socket, number, core


def _set_threads(threads: int) -> bool:
    """Sets TensorFlow's threads, unless the user has, or TensorFlow has started. Returns whether it did."""
    threading = tf.config.threading
    is_set = threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads()
    if is_set or any(environment.get(name) for name in _THREADS_OF_TENSORFLOW):
        return False
    try:
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(max(threads, 2))  # a collective that waits takes one
    except RuntimeError:
        return False
    return True


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, sorted(cores)))
