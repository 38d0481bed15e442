"""TensorFlow's collectives: one process per device, with plain local Keras in each. Needs no Horovod.

`tf.distribute.MultiWorkerMirroredStrategy` uses the same operations. The strategy itself, which owns variables and
data, is not used, because Keras 3 computes wrong results under it.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import tensorflow as tf

from keras_dist import environment, store
from keras_dist.backends.multi_worker.collectives import TensorFlowCollectives
from keras_dist.comm.backend import Affinity
from keras_dist.comm.devices import bind, pin_gpu
from keras_dist.comm.liveness import Liveness, bypass_proxies, listens, only_for_its_network
from keras_dist.comm.processes import ProcessBackend
from keras_dist.comm.rendezvous import Rendezvous, join, join_seconds, not_joined, wait_for_ranks
from keras_dist.comm.watchdog import FailureReports, Watchdog
from keras_dist.compat import tf_compat
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, check_choice
from keras_dist.logging import logger
from keras_dist.training.model import LocalTraining

_WAIT_SECONDS = 600.0  # the same as for Horovod's stall inspector
_ANSWER_SECONDS = 30.0  # as long as Gloo waits for data that a rank does not send
_PEER_LOSS = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip
_HINT = "Check the addresses in TF_CONFIG and the firewalls between the hosts. "


class MultiWorker(LocalTraining, ProcessBackend):
    """Trains with TensorFlow's collective all-reduce over processes or machines.

    Start the processes with `keras-dist run --backend multi_worker`, or set `TF_CONFIG` for each, with the address of
    every rank: `{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}`.

    Args:
        communication: `"ring"` sums gradients on the hosts, `"nccl"` on the GPUs, if each rank has one. `"auto"` is
            the ring.

    Raises:
        ConfigurationError: If the option is unknown.

    Example:

    ```python
    kd.init(kd.MultiWorker(communication="nccl"))
    ```
    """

    name = "multi_worker"
    _sign_of_peer_loss = "a connection of TensorFlow's collectives was closed"

    def __init__(self, communication: Literal["auto", "ring", "nccl"] = "auto") -> None:
        check_choice("option", "communication", communication, ("auto", "ring", "nccl"))
        self._options: dict[str, Any] = {"communication": communication}
        self._server: store.Server | None = None

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        if launch is None or not launch.workers:
            return Affinity(0, "no TF_CONFIG found")
        return Affinity(10, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        if launch is None or not launch.workers:
            raise ConfigurationError(
                "The backend 'multi_worker' needs a cluster, which tells each process its rank.",
                "no TF_CONFIG" + (f", in a process started by {launch.launcher}" if launch is not None else ""),
                "Start the script with `keras-dist run -np N --backend multi_worker script.py`, or set TF_CONFIG "
                "for each process, or use backend='auto', which is serial under plain `python`.",
            )
        seconds = join_seconds()
        self.topology = launch.topology
        if tf_compat.tensorflow_has_started():
            raise ConfigurationError(
                "TensorFlow has started before this process could join the others.",
                "a tensor, variable or device that was used above `kd.init()`",
                "Move `kd.init()` above everything that uses TensorFlow.",
            )
        pin_gpu(self.topology)
        on_gpu = self._options["communication"] == "nccl"
        if on_gpu and not tf.config.get_visible_devices("GPU"):
            raise ConfigurationError(
                "NCCL works between GPUs only.", "communication='nccl' on a process without GPU", "Use 'ring'."
            )
        bind(launch)
        rendezvous = join(launch)
        self._collectives = _connect(launch, seconds, on_gpu)
        rendezvous = rendezvous or self._serve_store(launch)
        if self.topology.size == 1:
            return
        abort = tf_compat.abort_collectives
        failure_reports = FailureReports(self.topology, rendezvous, self.translate, serves=self._server is not None)
        if rendezvous is not None:
            limit = environment.seconds(environment.WAIT_TIMEOUT, _WAIT_SECONDS)
            self._watchdog = Watchdog(self.topology, rendezvous, failure_reports, abort, limit)
        limit = environment.seconds(environment.ANSWER_TIMEOUT, _ANSWER_SECONDS)
        self._liveness = Liveness(self.topology, launch.workers, failure_reports, abort, limit)

    def _serve_store(self, launch: Launch) -> Rendezvous | None:
        """Lets the chief serve the store where no launcher does. Returns `None` if not all ranks can reach it."""
        host, place = launch.workers[0].rpartition(":")[0], None
        if self.topology.is_chief:
            secret = secrets.token_hex()
            try:
                self._server = store.serve(host, secret)
            except OSError:  # the name leads to this machine, but belongs to none of its interfaces
                self._server = store.serve("", secret)
            place = (host, self._server.port), secret
        rendezvous = Rendezvous(*self.all_gather_object("kd.init() (address of the store)", place)[0])
        key = f"reached_{self.topology.rank}"
        rendezvous.put(key, "1")
        is_reached = self.all_gather_object("kd.init() (store)", rendezvous.get(key) == "1")
        unreached = [rank for rank, reached in enumerate(is_reached) if not reached]
        if not unreached:
            return rendezvous
        if self.topology.is_chief:
            logger().warning(
                "ranks %s can't connect to a second port of %s, so ranks in different calls would wait forever, "
                "without an error.", unreached, host,
            )  # fmt: skip
        return None

    def _is_peer_loss(self, error: BaseException) -> bool:
        return isinstance(error, tf.errors.OpError) and (
            isinstance(error, _PEER_LOSS) or "Collective ops is aborted" in str(error)
        )


def _connect(launch: Launch, seconds: float, on_gpu: bool) -> TensorFlowCollectives:
    """Listens for the other ranks, and waits until all of them do."""
    rank, workers = launch.topology.rank, launch.workers
    bypass_proxies(workers)
    try:
        with only_for_its_network(workers[rank]):
            tf_compat.start_collectives(workers, rank)
    except tf.errors.OpError as error:
        raise ConfigurationError(
            f"{str(launch.topology).capitalize()} can't listen at its address.",
            f"{workers[rank]} ({str(error).splitlines()[0]})",
            "Look for a process of an earlier run that still uses the port, or set another one in TF_CONFIG.",
        ) from error
    names = {other: f"rank {other} at {address}" for other, address in enumerate(workers) if other != rank}
    wait_for_ranks(names, lambda other: listens(workers[other]), _HINT)
    collectives = TensorFlowCollectives(launch.topology, on_gpu)
    try:
        collectives.connect(seconds)
    except tf.errors.OpError as error:
        raise not_joined(seconds, str(error).splitlines()[0], _HINT) from error
    return collectives
