"""The devices of this machine: which exist, which a script names, and which GPU each rank uses."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist import environment
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger
from keras_dist.topology import Topology

_NAME = re.compile(r"(?:.*device:|/)?(CPU|GPU):(\d+)", re.IGNORECASE)


# --- One device per process ---


def pin_gpu(topology: Topology) -> None:
    """Gives each rank of a host one GPU, before TensorFlow takes all of them.

    Raises:
        ConfigurationError: If there are fewer GPUs than ranks on this host, or TensorFlow has taken them.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # Launchers such as Slurm may show each rank only its own GPU.
    index = 0 if len(gpus) == 1 and topology.local_size > 1 and _sees_one_of_many() else topology.local_rank
    if index >= len(gpus):
        raise ConfigurationError(
            "There are more ranks than GPUs on this host.",
            f"{topology.local_size} ranks, {len(gpus)} GPU(s)",
            "Start one rank per GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )
    try:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    except RuntimeError as error:
        raise ConfigurationError(
            "TensorFlow took all GPUs before keras_dist could give each rank one.",
            str(error),
            "Move `kd.init()` above everything that uses TensorFlow.",
        ) from error


def _sees_one_of_many() -> bool:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and "," not in visible


def warn_of_unused_gpus(used: Sequence[str]) -> None:
    """Names the GPUs that this process sees and does not use: TensorFlow takes their memory all the same.

    Args:
        used: Names of the devices that the backend uses, in any spelling.
    """
    visible = [short_name(gpu.name.removeprefix("/physical_device:")) for gpu in tf.config.get_visible_devices("GPU")]
    unused = [name for name in visible if name not in {short_name(name) for name in used}]
    if unused:
        logger().warning(
            "this process sees %s and does not use %s, of which TensorFlow takes the memory all the same. To use all: "
            "kd.init('mirrored'). To hide some: CUDA_VISIBLE_DEVICES", _listed(visible), _listed(unused),
        )  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


# --- Several devices in one process, by name ---


def list_names(names: Sequence[str] | None) -> list[str] | None:
    """Returns device names as a list.

    Raises:
        ConfigurationError: If `names` is a text or empty.
    """
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise ConfigurationError("Devices must be a list of names.", f"{names!r}", "For example ['GPU:0', 'GPU:1'].")
    return list(names)


def find_devices(names: Sequence[str] | None, besides: Sequence[str] = ()) -> list[str]:
    """Returns the full names of devices. Creates missing CPUs if TensorFlow hasn't started.

    Args:
        names: Such as `"GPU:0"`; `None` for all GPUs, or all CPUs if there is no GPU.
        besides: Names of CPUs to create too.

    Raises:
        ConfigurationError: If a device doesn't exist or is named twice.
    """
    _create_cpus([*(names or ()), *besides])
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


def _create_cpus(names: Sequence[str]) -> None:
    """Divides the CPU into as many logical ones as a script names. TensorFlow allows this until it has started."""
    numbers = [int(match[2]) for name in names if (match := _NAME.fullmatch(name)) and match[1].upper() == "CPU"]
    if not numbers or max(numbers) == 0 or tf_compat.tensorflow_has_started():
        return
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) <= max(numbers):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(max(numbers) + 1)]
        )


def short_name(name: str) -> str:
    """Returns the short form (`"GPU:0"`) of any spelling of a device name; any other text as it is."""
    match = _NAME.fullmatch(name)
    return f"{match[1].upper()}:{match[2]}" if match else name


def describe_devices(devices: Sequence[str]) -> str:
    """Returns devices as a short text: `"2 GPUs"`."""
    kind = short_name(devices[0]).partition(":")[0]
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"


# --- Settings of TensorFlow that a script makes ---

_EARLY = (
    (tf.config, ("set_visible_devices", "set_logical_device_configuration")),
    (tf.config.threading, ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads")),
    (tf.config.experimental, ("set_memory_growth", "set_visible_devices", "set_virtual_device_configuration")),
)


def explain_late_settings() -> None:
    """Lets TensorFlow say, from now on, which line of the script comes too late: `kd.init()` has started TensorFlow."""
    for owner, names in _EARLY:
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
