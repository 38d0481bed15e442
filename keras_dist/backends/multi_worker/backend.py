"""TensorFlow's own collectives: one process per device, plain local Keras in each. Needs no Horovod.

These are the operations of `tf.distribute.MultiWorkerMirroredStrategy`. The strategy itself, which would own variables
and data, is not used: Keras 3 is wrong under it in many ways.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_dist import environment, store
from keras_dist.backends.multi_worker.collectives import Collectives
from keras_dist.comm import gpus
from keras_dist.comm.backend import Affinity
from keras_dist.comm.connections import bypass_proxies, listens
from keras_dist.comm.failure_reports import FailureReports
from keras_dist.comm.liveness import Liveness
from keras_dist.comm.processes import ProcessBackend
from keras_dist.comm.rendezvous import Rendezvous, join_seconds
from keras_dist.comm.watchdog import Watchdog
from keras_dist.compat import tf_compat
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, PeerLostError, check_choice
from keras_dist.logging import logger
from keras_dist.training.model import LocalTraining

_COMMUNICATIONS = ("auto", "ring", "nccl")
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 600.0  # as that of Horovod's stall inspector
_PEER_LOSS = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip


class MultiWorker(LocalTraining, ProcessBackend):
    """Trains with TensorFlow's collective all-reduce over processes or machines.

    The processes come from `keras-dist run --backend multi_worker`, or from `TF_CONFIG`, which names the address of
    every rank: `{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}`.

    Args:
        communication: `"ring"` adds up on the hosts, `"nccl"` on the GPUs, where each rank has one. `"auto"` is the
            ring.

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
        check_choice("option", "communication", communication, _COMMUNICATIONS)
        self._options: dict[str, Any] = {"communication": communication}
        self._server: store.Server | None = None
        self._liveness: Liveness | None = None

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
        on_gpu = self._check_devices()
        rendezvous = Rendezvous(launch.rendezvous) if launch.rendezvous else None
        if rendezvous is not None:
            rendezvous.wait_for_all(launch.topology)
        _join(launch, seconds)
        self._collectives = Collectives(self.topology, on_gpu)
        _meet(self._collectives, launch, seconds)
        self._watch(launch, rendezvous or self._own_store(launch))

    def _check_devices(self) -> bool:
        """Returns whether gradients are added up on GPUs."""
        if tf_compat.tensorflow_has_started():
            raise ConfigurationError(
                "TensorFlow has started before this process could join the others.",
                "a tensor, variable or device that was used above `kd.init()`",
                "Move `kd.init()` above everything that uses TensorFlow.",
            )
        gpus.pin_gpu(self.topology)
        on_gpu = self._options["communication"] == "nccl"
        if on_gpu and not tf.config.get_visible_devices("GPU"):
            raise ConfigurationError(
                "NCCL works between GPUs only.", "communication='nccl' on a process without GPU", "Use 'ring'."
            )
        return on_gpu

    # --- Who is to blame ---

    def _own_store(self, launch: Launch) -> Rendezvous | None:
        """Without a launcher the chief serves the ranks' messages; `None` if not all can reach it."""
        host, address = launch.workers[0].rpartition(":")[0], None
        if self.topology.is_chief:
            self._server = _serve(host)
            address = (host, self._server.port)
        rendezvous = Rendezvous(self.all_gather_object("kd.init() (address of the store)", address)[0])
        rendezvous.put(f"reached_{self.topology.rank}", "1")
        reached = rendezvous.get(f"reached_{self.topology.rank}") == "1"
        unreached = [rank for rank, one in enumerate(self.all_gather_object("kd.init() (store)", reached)) if not one]
        if not unreached:
            return rendezvous
        if self.topology.is_chief:
            logger().warning(
                "ranks %s can't reach a second port of %s: ranks in different calls would wait for ever, untold.",
                unreached, host,
            )  # fmt: skip
        return None

    def _watch(self, launch: Launch, rendezvous: Rendezvous | None) -> None:
        if self.topology.size == 1:
            return
        abort = tf_compat.abort_collectives
        failure_reports = FailureReports(self.topology, rendezvous, self.translate, serves=self._server is not None)
        if rendezvous is not None:
            limit = environment.seconds(environment.WAIT_TIMEOUT, _WAIT_SECONDS)
            self._watchdog = Watchdog(self.topology, rendezvous, failure_reports, abort, limit)
        self._liveness = Liveness(self.topology, launch.workers, rendezvous, failure_reports, abort)

    def _is_peer_loss(self, error: BaseException) -> bool:
        return isinstance(error, tf.errors.OpError) and (
            isinstance(error, _PEER_LOSS) or "Collective ops is aborted" in str(error)
        )

    def translate(self, error: BaseException) -> BaseException:
        if not self._is_peer_loss(error):
            return error
        for watcher in (self._watchdog, self._liveness):
            if watcher is not None and (cause := watcher.cause()) is not None:
                return cause
        return super().translate(error)


# --- Joining ---


def _join(launch: Launch, seconds: float) -> None:
    """Listens for the others, and waits until all of them do.

    Raises:
        ConfigurationError: If this rank can't listen at its address.
        PeerLostError: If ranks don't listen in time; names them.
    """
    rank, workers = launch.topology.rank, launch.workers
    bypass_proxies(workers)
    try:
        tf_compat.start_collectives(workers, rank)
    except tf.errors.OpError as error:
        raise ConfigurationError(
            f"{str(launch.topology).capitalize()} can't listen at its address.",
            f"{workers[rank]} ({_first_line(error)})",
            "Look for a process of an earlier run that still has the port, or name another one in TF_CONFIG.",
        ) from error
    deadline = time.monotonic() + seconds
    missing = [other for other in range(len(workers)) if other != rank]
    while missing := [other for other in missing if not listens(workers[other])]:
        if time.monotonic() > deadline:
            raise _not_joined(seconds, [f"rank {other} at {workers[other]}" for other in missing])
        time.sleep(_POLL_SECONDS)


def _meet(collectives: Collectives, launch: Launch, seconds: float) -> None:
    try:
        collectives.join(seconds)
    except tf.errors.OpError as error:
        raise _not_joined(seconds, [_first_line(error)]) from error


def _not_joined(seconds: float, missing: Sequence[str]) -> PeerLostError:
    return PeerLostError(
        f"Not all ranks have joined within {seconds:g} s.",
        f"missing: {', '.join(missing)}",
        "Look at the output of the missing ranks, check the addresses in TF_CONFIG and the firewalls between the "
        f"hosts, or set {environment.JOIN_TIMEOUT} (seconds) if the ranks only need longer.",
    )


def _serve(host: str) -> store.Server:
    try:
        return store.serve(host)
    except OSError:  # a name that leads here, but is none of this machine's interfaces
        return store.serve("")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
