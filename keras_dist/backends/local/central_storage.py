"""Variables on the host, computation on every device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.local.backend import LocalBackend
from keras_dist.comm import devices as device_module
from keras_dist.comm.backend import Affinity
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError


class CentralStorage(LocalBackend):
    """Trains on several devices of this machine, with all variables in the memory of the host.

    For models whose tables are larger than the memory of one device: of an embedding only the rows that a batch needs
    travel. Other weights travel whole in every step.

    Args:
        compute_devices: Names of the devices that compute. Default: all GPUs. CPUs that don't exist yet are made, to
            try a script without a GPU.
        parameter_device: The device that holds weights, optimizer state and metrics, and updates them.

    Raises:
        ConfigurationError: If no such device exists.

    Example:

    ```python
    kd.init(kd.CentralStorage())
    ```
    """

    name = "central_storage"

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str = "CPU:0") -> None:
        self._options: dict[str, Any] = {
            "compute_devices": device_module.as_list(compute_devices),
            "parameter_device": parameter_device,
        }

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        return Affinity(0, "has to be asked for")

    def start(self, launch: Launch | None) -> None:
        device_module.refuse_launch(self.name, launch)
        parameter_device = self._options["parameter_device"]
        devices = device_module.find(self._options["compute_devices"], besides=[parameter_device])
        (holder,) = device_module.find([parameter_device])
        self._use(devices, holder, tf.distribute.ReductionToOneDevice())
        # From here on this thread makes variables on the host. It outlives `keras.backend.clear_session()`.
        tf.device(holder).__enter__()

    def check_variables(self, variables: Sequence[Any]) -> None:
        strangers = [v for v in variables if device_module.short(v.value.device) != self._holder]
        if strangers:
            raise ConfigurationError(
                f"The model has variables that are not on {self._holder}, where this backend keeps them.",
                f"{strangers[0].path} on {device_module.short(strangers[0].value.device)}, {len(strangers)} in all",
                "Move `kd.init()` above the code that builds or loads the model, and build it in the same thread.",
            )

    @property
    def _holder(self) -> str:
        return device_module.short(self._parameter_device)

    def describe_devices(self) -> str:
        computing = device_module.describe(self._strategy.extended.worker_devices)
        return f"{computing}, variables on {self._holder}"
