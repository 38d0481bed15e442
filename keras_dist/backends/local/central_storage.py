"""The backend with variables on the host and computation on every device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.local.backend import LocalBackend
from keras_dist.comm.backend import Affinity
from keras_dist.comm.devices import describe_devices, find_devices, list_names, short_name, warn_of_unused_gpus
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError


class CentralStorage(LocalBackend):
    """Trains on several devices of this machine, with all variables in the memory of the host.

    Use it for models whose embedding tables are larger than the memory of one device: only the rows that a batch needs
    are copied. Other weights are copied as a whole in every step.

    Args:
        compute_devices: Names of the devices that compute. Default: all GPUs. Missing CPUs are created, so that you
            can try a script without GPUs.
        parameter_device: The device that stores and updates weights, optimizer state and metrics.

    Raises:
        ConfigurationError: If a device doesn't exist.

    Example:

    ```python
    kd.init(kd.CentralStorage())
    ```
    """

    name = "central_storage"

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str = "CPU:0") -> None:
        self._options: dict[str, Any] = {
            "compute_devices": list_names(compute_devices),
            "parameter_device": parameter_device,
        }

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        return Affinity(0, "only used if named")

    def start(self, launch: Launch | None) -> None:
        self.refuse_launch(launch)
        parameter_device = self._options["parameter_device"]
        devices = find_devices(self._options["compute_devices"], besides=[parameter_device])
        (holder,) = find_devices([parameter_device])
        self._holder = short_name(holder)
        self._use(devices, holder, tf.distribute.ReductionToOneDevice())
        warn_of_unused_gpus([*devices, holder])
        # From now on this thread creates variables on the host, also after `keras.backend.clear_session()`.
        tf.device(holder).__enter__()

    def check_variables(self, variables: Sequence[Any]) -> None:
        elsewhere = [v for v in variables if short_name(v.value.device) != self._holder]
        if elsewhere:
            raise ConfigurationError(
                f"The model has variables that are not on {self._holder}, where this backend keeps them.",
                f"{elsewhere[0].path} on {short_name(elsewhere[0].value.device)}, {len(elsewhere)} in all",
                "Move `kd.init()` above the code that builds or loads the model, and build it in the same thread.",
            )

    def describe_devices(self) -> str:
        return f"{describe_devices(self._strategy.extended.worker_devices)}, variables on {self._holder}"
