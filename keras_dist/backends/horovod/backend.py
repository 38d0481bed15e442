"""Horovod's ring all-reduce: one process per device, with plain local Keras in each.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
https://arxiv.org/abs/1802.05799. Only Horovod's operations are used, because its Keras layer reduces nothing on
Keras 3 (https://github.com/horovod/horovod/issues/4290).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from keras_dist import environment
from keras_dist.backends.horovod import runtime
from keras_dist.backends.horovod.collectives import HorovodCollectives
from keras_dist.comm.backend import Priority, join
from keras_dist.comm.devices import bind, find_devices, list_names, prepare_devices
from keras_dist.comm.processes import ProcessBackend
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.comm.watchdog import Watchdog
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, check_choice
from keras_dist.training.model import LocalTraining

_PEER_LOSS = ("Horovod has been shut down", "HorovodInternalError", "Connection closed by peer")


class Horovod(LocalTraining, ReplicaBackend, ProcessBackend):
    """Trains with Horovod's ring all-reduce: gradients are averaged over all processes in every step.

    Args:
        compression: `None`, `"fp16"` or `"bf16"`: the format of gradients on the wire. Halves the bytes, and rounds
            the gradients.
        op: `"average"`, or `"adasum"` (Maleki et al. 2020, https://arxiv.org/abs/2006.02924). Adasum is another
            algorithm, so its results differ from those of one process. The number of ranks must be a power of two.
        hierarchical_allreduce: Reduce inside each host first. Needs a Horovod built with NCCL and MPI.
        fusion_threshold_mb: The number of MB up to which small gradients are sent together (Horovod's default: 128).
        cycle_time_ms: Milliseconds between two checks for gradients to send (default: 0.5; Horovod's own is 1).
        devices: Names of the devices of each rank, see `kd.MultiWorker`.

    Raises:
        ConfigurationError: If an option is invalid, or the installed Horovod doesn't support it.

    Example:

    ```python
    kd.init(kd.Horovod(compression="fp16"))
    ```
    """

    name = "horovod"
    _sign_of_peer_loss = "Horovod's connection was closed"

    def __init__(
        self,
        compression: Literal["fp16", "bf16"] | None = None,
        op: Literal["average", "adasum"] = "average",
        hierarchical_allreduce: bool = False,
        fusion_threshold_mb: float | None = None,
        cycle_time_ms: float | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        check_choice("Horovod option", "compression", compression, (None, "fp16", "bf16"))
        check_choice("Horovod option", "op", op, ("average", "adasum"))
        for option, value in (("fusion_threshold_mb", fusion_threshold_mb), ("cycle_time_ms", cycle_time_ms)):
            if value is not None and value <= 0:
                raise ConfigurationError(
                    f"The Horovod option `{option}` must be positive.",
                    f"{option}={value!r}",
                    "Leave it out (None) for Horovod's default.",
                )
        self._options: dict[str, Any] = {
            "compression": compression,
            "op": op,
            "hierarchical_allreduce": hierarchical_allreduce,
            "fusion_threshold_mb": fusion_threshold_mb,
            "cycle_time_ms": cycle_time_ms,
            "devices": list_names(devices),
        }

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        if launch is None or launch.workers:
            return Priority(0, "no Horovod launcher found")
        return Priority(10, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        if launch is None or launch.workers:
            raise ConfigurationError(
                "The backend 'horovod' needs a launcher, which tells each process its rank.",
                "a process started by "
                + ("plain `python`" if launch is None else f"{launch.launcher} for the backend 'multi_worker'"),
                "Start the script with `keras-dist run -np N script.py` or `horovodrun -np N python script.py`, "
                "or use backend='auto', which is serial under plain `python`.",
            )
        hvd = runtime.load()
        runtime.check_options(hvd, self._options, launch.topology.size)
        environment.set_values(runtime.settings(self._options))
        environment.set_defaults(runtime.DEFAULTS)
        cores = bind(launch)
        rendezvous = join(launch)
        self.topology = runtime.connect(hvd, launch, cores)
        if prepare_devices(self._options["devices"], self.topology, launch):
            self._mirror(find_devices(self._options["devices"]))
        if self.combines_means and self.replicas > 1:
            raise ConfigurationError(
                "Adasum combines the gradients of ranks, each of which has one device.",
                f"op='adasum' on {self.replicas} devices of each rank",
                "Start a rank for each device, or name one of each rank: devices=['GPU:0'].",
            )
        self._collectives = HorovodCollectives(hvd, self.topology, self._options["compression"], self.combines_means)
        if rendezvous is not None:  # under MPI there is none, only Horovod's stall inspector
            self._watchdog = Watchdog(self.topology, rendezvous, self.translate, lambda reason: hvd.shutdown())

    @property
    def not_of_one_process(self) -> str | None:
        return "Adasum combines gradients by its own rule" if self.combines_means else None

    @property
    def combines_means(self) -> bool:
        return bool(self._options["op"] == "adasum")

    def _is_peer_loss(self, error: BaseException) -> bool:
        text = f"{type(error).__name__}: {error}"
        return any(sign in text for sign in _PEER_LOSS)
