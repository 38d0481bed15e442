"""The devices of this machine, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from keras_dist.compat import tf_compat
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError

_NAME = re.compile(r"(?:.*device:|/)?(CPU|GPU):(\d+)", re.IGNORECASE)


def refuse_launch(backend: str, launch: Launch | None) -> None:
    """Raises `ConfigurationError` if this process is one of several: each would train by itself on all devices."""
    if launch is not None and launch.topology.size > 1:
        raise ConfigurationError(
            f"The backend {backend!r} is one process with all devices, but this one was started as one of several.",
            f"{launch.topology}, started by {launch.launcher}",
            "Start the script by plain `python`, or use backend='auto'.",
        )


def as_list(names: Sequence[str] | None) -> list[str] | None:
    """Returns names of devices as a list.

    Raises:
        ConfigurationError: If they are no list, or there are none.
    """
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise ConfigurationError("Devices must be a list of names.", f"{names!r}", "For example ['GPU:0', 'GPU:1'].")
    return list(names)


def find(names: Sequence[str] | None, besides: Sequence[str] = ()) -> list[str]:
    """Returns the full names of devices; makes CPUs that don't exist yet, if TensorFlow hasn't started.

    Args:
        names: Such as `"GPU:0"`; `None` for all GPUs, or all CPUs where there is no GPU.
        besides: Names of devices that have to exist too.

    Raises:
        ConfigurationError: If a name is none of a device, or its device doesn't exist.
    """
    _make_cpus([*(names or ()), *besides])
    existing = {short(device.name): device.name for device in tf.config.list_logical_devices()}
    if names is None:
        gpus = [name for name in existing if name.startswith("GPU")]
        return [existing[name] for name in gpus or existing]
    for name in names:
        if short(name) not in existing:
            raise ConfigurationError(
                "There is no such device.", f"{name!r} (there are {', '.join(existing)})",
                "Name devices that exist; CPUs are made by kd.init(), if it is above everything that uses TensorFlow.",
            )  # fmt: skip
    if len({short(name) for name in names}) < len(names):
        raise ConfigurationError("A device is named twice.", f"devices={list(names)}", "Name each once.")
    return [existing[short(name)] for name in names]


def _make_cpus(names: Sequence[str]) -> None:
    """A CPU can be divided into as many logical ones as a script asks for, as long as TensorFlow hasn't started."""
    numbers = [int(match[2]) for name in names if (match := _NAME.fullmatch(name)) and match[1].upper() == "CPU"]
    if not numbers or max(numbers) == 0 or tf_compat.tensorflow_has_started():
        return
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    made = tf.config.get_logical_device_configuration(cpu) or []
    if len(made) <= max(numbers):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(max(numbers) + 1)]
        )


def short(name: str) -> str:
    """Returns `"GPU:0"` for any spelling of the name of a device; the name itself if it is none."""
    match = _NAME.fullmatch(name)
    return f"{match[1].upper()}:{match[2]}" if match else name


def describe(devices: Sequence[str]) -> str:
    """Returns devices in a few words: `"2 GPUs"`."""
    kind = short(devices[0]).partition(":")[0]
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"
