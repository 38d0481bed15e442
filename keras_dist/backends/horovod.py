"""Horovod ring all-reduce: one process per device, plain local Keras in each, collectives between them.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
https://arxiv.org/abs/1802.05799. Only Horovod's operations are used; its Keras layer reduces nothing on
Keras 3 (https://github.com/horovod/horovod/issues/4290).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_dist import environment
from keras_dist.backends import horovod_runtime as runtime
from keras_dist.backends.base import Affinity, Backend, check_same_call
from keras_dist.backends.horovod_collectives import Collectives
from keras_dist.backends.rendezvous import Rendezvous
from keras_dist.backends.watchdog import Watchdog
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, DistributionError, PeerLostError

_COMPRESSIONS = (None, "fp16", "bf16")
_OPERATIONS = ("average", "adasum")


class Horovod(Backend):
    """Trains with Horovod's ring all-reduce: gradients are averaged over all processes in every step.

    Args:
        compression: `None`, `"fp16"` or `"bf16"`: the format of gradients on the wire. Half the bytes, and
            rounding: compare with one process that averages the same shares' gradients.
        op: `"average"`, or `"adasum"` (Maleki et al. 2020, https://arxiv.org/abs/2006.02924), which is another
            algorithm, so its numbers are not those of one process; the number of ranks must be a power of two.
        hierarchical_allreduce: Reduce inside each host first. Needs a Horovod built with NCCL or MPI.
        fusion_threshold_mb: Small gradients are sent together up to this many MB (Horovod's default: 128).
        cycle_time_ms: Milliseconds between two looks for gradients to send (Horovod's default: 1).

    Raises:
        ConfigurationError: If an option is unknown, or the installed Horovod can't serve it.

    Example:

    ```python
    kd.init(kd.Horovod(compression="fp16"))
    ```
    """

    name = "horovod"

    def __init__(
        self,
        compression: Literal["fp16", "bf16"] | None = None,
        op: Literal["average", "adasum"] = "average",
        hierarchical_allreduce: bool = False,
        fusion_threshold_mb: float | None = None,
        cycle_time_ms: float | None = None,
    ) -> None:
        _check_choice("compression", compression, _COMPRESSIONS)
        _check_choice("op", op, _OPERATIONS)
        _check_positive("fusion_threshold_mb", fusion_threshold_mb)
        _check_positive("cycle_time_ms", cycle_time_ms)
        self._options: dict[str, Any] = {
            "compression": compression,
            "op": op,
            "hierarchical_allreduce": hierarchical_allreduce,
            "fusion_threshold_mb": fusion_threshold_mb,
            "cycle_time_ms": cycle_time_ms,
        }
        self._watchdog: Watchdog | None = None
        self._call = "kd.init()"

    @classmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        if launch is None:
            return Affinity(0, "no launcher found")
        return Affinity(10, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        if launch is None:
            raise ConfigurationError(
                "The backend 'horovod' needs a launcher, which tells each process its rank.",
                "a process started by plain `python`",
                "Start the script with `keras-dist run -np N script.py` or `horovodrun -np N python script.py`, "
                "or use backend='auto', which is serial under plain `python`.",
            )
        hvd = runtime.load()
        runtime.check_options(hvd, self._options, launch.topology.size)
        environment.set_values(runtime.settings(self._options))
        environment.set_defaults(runtime.DEFAULTS)
        rendezvous = Rendezvous(launch.rendezvous) if launch.rendezvous else None
        if rendezvous is not None:
            rendezvous.wait_for_all(launch.topology)
        self.topology = runtime.join(hvd, launch)
        runtime.pin_gpu(self.topology)
        self._collectives = Collectives(hvd, self.topology, self._options["compression"], self.combines_means)
        if rendezvous is not None:  # MPI has none: there Horovod's stall inspector is all
            self._watchdog = Watchdog(self.topology, rendezvous, hvd.shutdown)

    def describe_devices(self) -> str:
        gpus = len(tf.config.get_visible_devices("GPU"))
        return "one GPU each" if gpus else "CPU"

    def exchange(self, call: str, value: Any = None) -> list[Any]:
        self.enter(call)
        try:
            payloads = self._gather_bytes(pickle.dumps((call, value)))
        except Exception as error:
            raise self.translate(error) from error
        finally:
            self.leave()
        received = [pickle.loads(payload) for payload in payloads]
        check_same_call(dict(enumerate(call for call, _ in received)))
        return [value for _, value in received]

    def _gather_bytes(self, payload: bytes) -> list[bytes]:
        """One ragged all-gather; each payload carries its length in front, so that it can be cut out again."""
        framed = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
        gathered = self._collectives.gather_bytes(tf.constant(framed)).numpy().tobytes()
        payloads, position = [], 0
        for _ in range(self.topology.size):
            length = int.from_bytes(gathered[position : position + 8], "little")
            payloads.append(gathered[position + 8 : position + 8 + length])
            position += 8 + length
        return payloads

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        try:
            chiefs = self._collectives.broadcast([tf.constant(array) for array in raw])
        except Exception as error:
            raise self.translate(error) from error
        return [
            chief.numpy().view(np.asarray(array).dtype).reshape(np.shape(array))
            for chief, array in zip(chiefs, arrays, strict=True)
        ]

    @property
    def combines_means(self) -> bool:
        return bool(self._options["op"] == "adasum")

    def sum_gradients(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        return self._collectives.sum_gradients(gradients, row, name)

    def sum_numbers(self, numbers: Any, name: str) -> Any:
        return self._collectives.sum_numbers(numbers, name)

    def scatter_bytes(self, payload: Any, lengths: Any, name: str) -> Any:
        return self._collectives.scatter_bytes(payload, lengths, name)

    def gather_rows(self, tensor: Any, name: str) -> Any:
        return self._collectives.gather_rows(tensor, name)

    @property
    def rendezvous(self) -> Rendezvous | None:
        return None if self._watchdog is None else self._watchdog.rendezvous

    def enter(self, call: str) -> None:
        self._call = call
        if self._watchdog is not None:
            self._watchdog.enter(call)

    def leave(self, was_made: bool = True) -> None:
        if self._watchdog is not None:
            self._watchdog.leave(was_made)

    def translate(self, error: BaseException) -> BaseException:
        if isinstance(error, DistributionError) or not runtime.is_peer_loss(error):
            return error
        if self._watchdog is not None and (cause := self._watchdog.cause()) is not None:
            return cause
        return PeerLostError(
            f"Another rank has gone, so {self.topology} can't go on.",
            f"Horovod's connection was closed while this rank was in {self._call}",
            "Look for the rank that failed first: its error is the cause. `keras-dist run` prints it last, "
            "`--log-dir DIR` keeps the output of every rank. If a rank has ended without an error, this rank made a "
            "call that all have to make: take it out of `if kd.is_chief():`.",
        )


def _check_choice(option: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(
            f"Unknown value for the Horovod option `{option}`.", f"{option}={value!r}", f"Use one of {known}."
        )


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ConfigurationError(
            f"The Horovod option `{option}` must be positive.",
            f"{option}={value!r}",
            "Leave it out (None) for Horovod's default.",
        )
