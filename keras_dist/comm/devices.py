"""The devices of this machine: those that exist, those that a script names, and the GPU of each rank."""

import functools
import math
import os
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_dist import environment
from keras_dist.compat import tf_compat
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger

_NAME = re.compile(r"(?:.*device:|/)?(CPU|GPU):(\d+)", re.IGNORECASE)


# --- One device per process ---


def pin_gpu(topology: Topology, place: tuple[int, int] | None = None) -> None:
    """Gives each rank of a host one GPU, before TensorFlow takes all of them. `place` is as in `Launch`."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    index, ranks = topology.local_rank, topology.local_size  # of those that see the same GPUs
    if len(gpus) == 1 and ranks > 1 and visible is not None and "," not in visible:
        index, ranks = 0, 1
    elif place is not None and _are_of_task(len(gpus), ranks):
        index, ranks = place
    if index >= len(gpus):
        raise ConfigurationError(
            "There are more ranks than GPUs on this host.",
            f"{ranks} ranks, {len(gpus)} GPU(s)",
            "Start one rank per GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )
    if index == 0:
        warn_of_unused_gpus([f"GPU:{used}" for used in range(ranks)], _UNUSED_BY_RANKS)
    _take([gpus[index]])


def _are_of_task(visible: int, ranks: int) -> bool:
    """True if Slurm shows each task, of which a host has several, GPUs of its own."""
    return visible < (environment.slurm_gpus() or ranks)


def _take(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            if not tf.config.get_logical_device_configuration(gpu):  # those have the memory that the script gave them
                tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise ConfigurationError(
            "TensorFlow took all GPUs before keras_dist could give each rank its own.",
            str(error),
            "Move `kd.init()` above everything that uses TensorFlow.",
        ) from error


def prepare_devices(names: Sequence[str] | None, topology: Topology, launch: Launch) -> bool:
    """Chooses the devices of a rank, before TensorFlow starts. True if it computes on several, or on named ones.

    A rank that is alone on its host, or in a Slurm task that sees GPUs of its own only, has all GPUs that it sees. Any
    other rank has one, and so has `-np 1`.
    """
    gpus = tf.config.list_physical_devices("GPU")
    has_one = topology.size == 1 and launch.launcher != environment.TF_CONFIG
    if topology.local_size > 1:
        has_one = launch.place != (0, 1) or not _are_of_task(len(gpus), topology.local_size)
    if names is None and (len(gpus) < 2 or has_one):
        pin_gpu(topology, launch.place)
        return False
    divide_cpu(names or ())
    _take(gpus)
    return True


_UNUSED = (
    "this process sees %s and does not use %s, of which TensorFlow takes the memory all the same. To use all: "
    "kd.init('mirrored'). To hide some: CUDA_VISIBLE_DEVICES"
)
_UNUSED_BY_RANKS = "this process sees %s and no rank uses %s, since each uses one. Start a rank for each GPU"


def warn_of_unused_gpus(used: Sequence[str], text: str = _UNUSED) -> None:
    """Names the GPUs that this process sees and that are not used."""
    visible = [short_name(gpu.name.removeprefix("/physical_device:")) for gpu in tf.config.get_visible_devices("GPU")]
    unused = [name for name in visible if name not in {short_name(name) for name in used}]
    if unused:
        logger().warning(text, ", ".join(visible), ", ".join(unused))


# --- Several devices in one process, by name ---


def list_names(names: Sequence[str] | None) -> list[str] | None:
    """Returns device names as a list. Refuses a text and an empty list."""
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise ConfigurationError("Devices must be a list of names.", f"{names!r}", "For example ['GPU:0', 'GPU:1'].")
    return list(names)


def find_devices(names: Sequence[str] | None, besides: Sequence[str] = ()) -> list[str]:
    """Returns the full names of devices: by default all GPUs, or all CPUs if there is no GPU.

    CPUs that don't exist are created, until TensorFlow has started: as many as `names` and `besides` name.
    """
    divide_cpu([*(names or ()), *besides])
    existing = {short_name(device.name): device.name for device in tf.config.list_logical_devices()}
    if names is None:
        gpus = [name for name in existing if name.startswith("GPU")]
        return [existing[name] for name in gpus or existing]
    for name in names:
        if short_name(name) not in existing:
            raise ConfigurationError(
                "There is no such device.", f"{name!r} (there are {', '.join(existing)})",
                "Name devices that exist. kd.init() creates CPUs if it is above everything that uses TensorFlow.",
            )  # fmt: skip
    if len({short_name(name) for name in names}) < len(names):
        raise ConfigurationError("A device is named twice.", f"devices={list(names)}", "Name each once.")
    return [existing[short_name(name)] for name in names]


def divide_cpu(names: Sequence[str]) -> None:
    """Divides the CPU into as many logical ones as are named, which TensorFlow allows until it has started."""
    matches = [_NAME.fullmatch(name) for name in names]
    last_cpu = max((int(match[2]) for match in matches if match and match[1].upper() == "CPU"), default=0)
    if last_cpu > 0 and not tf_compat.tensorflow_has_started():
        (cpu, *_) = tf.config.list_physical_devices("CPU")
        if len(tf.config.get_logical_device_configuration(cpu) or []) <= last_cpu:
            logical = [tf.config.LogicalDeviceConfiguration() for _ in range(last_cpu + 1)]
            tf.config.set_logical_device_configuration(cpu, logical)


def short_name(name: str) -> str:
    """Returns the short form (`"GPU:0"`) of any spelling of a device name; any other text as it is."""
    match = _NAME.fullmatch(name)
    return f"{match[1].upper()}:{match[2]}" if match else name


def describe_devices(devices: Sequence[str]) -> str:
    """Returns devices as a short text: `"2 GPUs"`."""
    kind = short_name(devices[0]).partition(":")[0]
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"


# --- Settings of TensorFlow that a script makes ---


def explain_late_settings() -> None:
    """From now on TensorFlow's errors name a line that comes too late, since `kd.init()` has started TensorFlow."""
    for owner, names in (
        (tf.config, ("set_visible_devices", "set_logical_device_configuration")),
        (tf.config.threading, ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads")),
        (tf.config.experimental, ("set_memory_growth", "set_visible_devices", "set_virtual_device_configuration")),
    ):
        for name in names:
            setattr(owner, name, _explained(getattr(owner, name)))


def _explained(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def setting(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except RuntimeError as error:  # which scripts catch, as in TensorFlow's guides
            caller = traceback.extract_stack(limit=2)[0]
            raise RuntimeError(
                f"{plain.__name__} comes after kd.init(), which has started TensorFlow.\n"
                f"Received: {caller.filename}:{caller.lineno}: {error}\n"
                "Remedy: Move this line above kd.init()."
            ) from error

    return setting


def bind(launch: Launch) -> int:
    """Gives each rank of a host its part of the cores. Call it before TensorFlow counts them.

    TensorFlow makes a thread for each core that a process may use; so do its data pipelines and oneDNN. Two ranks that
    may use all cores have twice as many threads as there are cores. The limit of a container counts too, as does the
    number of cores that a Slurm task asked for. If Slurm has bound each task, its ranks share the cores of the task.
    Nothing changes for one rank without a limit, nor if the user, `mpirun` or a command around each rank (`numactl`)
    has bound it.

    Returns how many cores this rank has for itself, at least 1.
    """
    rank, ranks = local = launch.topology.local_rank, launch.topology.local_size
    place, environ = launch.place or local, environment.current()
    if environment.slurm_binds(environ):
        rank, ranks = place
    setting = environment.get(environment.BIND, "1")
    if setting not in ("0", "1"):
        raise ConfigurationError(
            "KERAS_DIST_BIND says whether each rank gets its part of the cores.",
            f"KERAS_DIST_BIND={setting!r}",
            "Set it to 0 or 1, or unset it for 1.",
        )
    cores = sorted(os.sched_getaffinity(0), key=_place)
    is_bound = not environment.slurm_binds(environ) and _are_fewer_than_parents(cores)
    if is_bound or (launch.is_mpi and len(cores) < (os.cpu_count() or 0)):
        logger().debug("cores: %s, to which this rank is bound already", ",".join(map(str, sorted(cores))))
        return len(cores)
    share = max(1, math.floor(min(len(cores), cpu_limit() or len(cores)) / ranks))
    if (of_task := environment.slurm_cores(environ)) is not None:
        share = min(share, max(1, of_task // place[1]))
    if setting == "0" or (ranks == 1 and of_task is None):
        logger().debug("cores: all %d of them for %d rank(s)", len(cores), ranks)
        return share
    own = part_of(cores, rank, ranks)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)
    is_limited = share < len(own) and _set_threads(share)
    threads = f", and {share} threads within the limit" if is_limited else ""
    logger().debug("cores: %s of %d%s", ",".join(map(str, sorted(own))), len(cores), threads)
    return share


def _are_fewer_than_parents(cores: Sequence[int]) -> bool:
    """True if this process may use only a part of its parent's cores: the command that started it has bound it."""
    try:
        return {*cores} < os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended, or belongs to another user
        return False


def part_of(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Returns the cores of one rank of a host. Ranks share a core only if there are more ranks than cores.

    >>> part_of([0, 1, 2, 3, 4], 0, 2), part_of([0, 1, 2, 3, 4], 1, 2), part_of([0, 1], 2, 3)
    ([0, 1], [2, 3, 4], [1])
    """
    begin, end = rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks
    return list(cores[begin : max(end, begin + 1)])


def cpu_limit(cgroups: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns how many cores the control groups of this process may use together, `None` if nothing limits them.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu.
    """
    own = cgroups / (_read(of_process) or "").rpartition("0::/")[2]
    limits = [(_read(group / "cpu.max") or "max 1").split() for group in (own, *own.parents)]
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _place(core: int) -> tuple[int, int, int]:
    """Returns a sort key that puts hyperthreads of one core, and cores of one socket, next to each other."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    return int(_read(folder / "physical_package_id") or 0), int(_read(folder / "core_id") or 0), core


def _set_threads(threads: int) -> bool:
    """Sets TensorFlow's threads, unless the user has, or TensorFlow has started. Returns whether it did."""
    threading = tf.config.threading
    is_set = threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads()
    if is_set or environment.get("TF_NUM_INTRAOP_THREADS") or environment.get("TF_NUM_INTEROP_THREADS"):
        return False
    try:
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(max(threads, 2))  # a collective that waits takes one
    except RuntimeError:
        return False
    return True
