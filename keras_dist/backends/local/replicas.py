"""Several devices of this machine in one process: with a copy of each variable, or with one on the host."""

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_dist.comm.backend import Priority
from keras_dist.comm.devices import find_devices, list_names, short_name, warn_of_unused_gpus
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, check_choice
from keras_dist.training.model import LocalTraining


class CentralStorage(LocalTraining, ReplicaBackend):
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
    def priority(cls, launch: Launch | None) -> Priority:
        return Priority(0, "only used if named")

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
        return f"{super().describe_devices()}, variables on {self._holder}"


_ALL_REDUCES = {
    "auto": tf.distribute.ReductionToOneDevice,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one": tf.distribute.ReductionToOneDevice,
}


class Mirrored(LocalTraining, ReplicaBackend):
    """Trains on several devices of this machine in one process, also in a notebook.

    Each device has a copy of every weight and of the optimizer's state. It computes the step on its share of every
    batch; the gradients are summed over the devices, and each device updates its copy. Only gradients, values that
    layers assign, and metrics go between devices. What the script assigns to a variable reaches all copies.

    Args:
        devices: Names of devices, such as `["GPU:0", "GPU:1"]`. Default: all GPUs. Missing CPUs
            (`["CPU:0", "CPU:1"]`) are created, so that you can try a script without GPUs.
        all_reduce: How gradients are summed: `"reduce_to_one"` on the first device, which sends the sums to the others;
            `"nccl"` between GPUs by NVIDIA's library; `"hierarchical_copy"` between the two halves of eight GPUs.
            `"auto"` is `"reduce_to_one"`.

    Raises:
        ConfigurationError: If an option is unknown, or a device doesn't exist.

    Example:

    ```python
    kd.init(kd.Mirrored(devices=["GPU:0", "GPU:1"]))
    ```
    """

    name = "mirrored"

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        all_reduce: Literal["auto", "nccl", "hierarchical_copy", "reduce_to_one"] = "auto",
    ) -> None:
        check_choice("option", "all_reduce", all_reduce, _ALL_REDUCES)
        self._options: dict[str, Any] = {"devices": list_names(devices), "all_reduce": all_reduce}

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        gpus = len(tf.config.list_physical_devices("GPU"))
        if launch is not None or gpus < 2:
            return Priority(0, "needs several GPUs in one process")
        return Priority(5, f"{gpus} GPUs on this machine, and no launcher found")

    def start(self, launch: Launch | None) -> None:
        self.refuse_launch(launch)
        devices = find_devices(self._options["devices"])
        all_reduce = self._options["all_reduce"]
        if all_reduce in ("nccl", "hierarchical_copy") and not all("GPU" in device for device in devices):
            raise ConfigurationError(
                f"The option all_reduce={all_reduce!r} works between GPUs only.",
                f"devices={[short_name(device) for device in devices]}",
                "Use all_reduce='reduce_to_one'.",
            )
        self._mirror(devices, _ALL_REDUCES[all_reduce]())
        warn_of_unused_gpus(devices)
