"""All GPUs of this machine in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_dist.backends.local.backend import LocalBackend
from keras_dist.comm import devices as device_module
from keras_dist.comm.backend import Affinity
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, check_choice

_ALL_REDUCES = {
    "auto": tf.distribute.ReductionToOneDevice,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one": tf.distribute.ReductionToOneDevice,
}


class Mirrored(LocalBackend):
    """Trains on several devices of this machine in one process, also in a notebook.

    Each device computes the step on its share of every batch. The weights live on the first device, which adds the
    gradients up and updates them; the others read them in each step.

    Args:
        devices: Their names, such as `["GPU:0", "GPU:1"]`. Default: all GPUs. CPUs that don't exist yet
            (`["CPU:0", "CPU:1"]`) are made, to try a script without a GPU.
        all_reduce: How gradients are added up: `"reduce_to_one"` on the first device, `"nccl"` by NVIDIA's library
            between GPUs, `"hierarchical"` between the two halves of eight GPUs. `"auto"` is `"reduce_to_one"`.

    Raises:
        ConfigurationError: If an option is unknown, or no such device exists.

    Example:

    ```python
    kd.init(kd.Mirrored(devices=["GPU:0", "GPU:1"]))
    ```
    """

    name = "mirrored"

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        all_reduce: Literal["auto", "nccl", "hierarchical", "reduce_to_one"] = "auto",
    ) -> None:
        check_choice("option", "all_reduce", all_reduce, _ALL_REDUCES)
        self._options: dict[str, Any] = {"devices": device_module.as_list(devices), "all_reduce": all_reduce}

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        gpus = len(tf.config.list_physical_devices("GPU"))
        if launch is not None or gpus < 2:
            return Affinity(0, "needs several GPUs in one process")
        return Affinity(5, f"{gpus} GPUs on this machine, and no launcher found")

    def start(self, launch: Launch | None) -> None:
        device_module.refuse_launch(self.name, launch)
        devices = device_module.find(self._options["devices"])
        all_reduce = self._options["all_reduce"]
        if all_reduce in ("nccl", "hierarchical") and not all("GPU" in device for device in devices):
            raise ConfigurationError(
                f"The option all_reduce={all_reduce!r} works between GPUs only.",
                f"devices={[device_module.short(device) for device in devices]}",
                "Use all_reduce='reduce_to_one'.",
            )
        self._use(devices, devices[0], _ALL_REDUCES[all_reduce]())

    def describe_devices(self) -> str:
        return device_module.describe(self._strategy.extended.worker_devices)
