"""Cloud TPU: one process, `tf.distribute.TPUStrategy` over all cores of a TPU or of a pod slice."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist import environment
from keras_dist.backends import libtpu, tpu_connect, tpu_place
from keras_dist.backends.base import Affinity
from keras_dist.backends.one_process import OneProcess
from keras_dist.backends.rendezvous import join_seconds
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError
from keras_dist.topology import Topology


class TPU(OneProcess):
    """Trains on a Cloud TPU. One process leads it, also a pod slice, so this process is the chief.

    Args:
        name: `"local"` for the chips of this machine, addresses of workers (`"grpc://10.0.0.2:8470"`, with commas
            between several), or the name of a TPU. If not given, the environment is asked
            (KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS on GKE, TPU_NAME, TPU_CONFIG), then this machine is searched for chips.

    Raises:
        ConfigurationError: If the name can't be read.

    Example:

    ```python
    kd.init(kd.TPU("grpc://10.0.0.2:8470"))
    ```
    """

    name = "tpu"

    def __init__(self, name: str | None = None) -> None:
        if name:
            tpu_place.find(name, {})  # so that what can't be read is told here
        self._options: dict[str, Any] = {"name": name}

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        if launch is not None:
            return Affinity(0, f"started by {launch.launcher}")
        try:
            place = tpu_place.find(None, environment.current())
        except ConfigurationError as error:
            return Affinity(0, error.problem)
        return Affinity(5, place.reason)

    def start(self, launch: Launch | None) -> None:
        if launch is not None and launch.topology.size > 1:
            raise ConfigurationError(
                "One process leads a TPU, and several were started.",
                f"{launch.topology.size} processes, started by {launch.launcher}",
                "Start the script with plain `python`.",
            )
        libtpu.check()
        environ = environment.current()
        self._place = tpu_place.find(self._options["name"], environ)
        tpu_place.check_worker(self._place, environ)
        resolver = tpu_connect.connect(self._place, join_seconds())
        self.strategy = tf.distribute.TPUStrategy(resolver)
        self.topology = Topology()
        tf.distribute.experimental_set_strategy(self.strategy)  # what is made from now on is on the TPU

    def describe_devices(self) -> str:
        cores = self.strategy.num_replicas_in_sync if self.strategy is not None else 0
        return f"{cores} TPU cores, {self._place.target}"
