"""What backends with one process per device have in common: Python values over collectives, and who is to blame."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend, check_same_call, rank_has_gone
from keras_dist.comm.loop_waits import call_of
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.comm.watchdog import Watchdog
from keras_dist.errors import DistributionError


class Collectives(Protocol):
    """The operations of such a backend; see `Backend` for those of the step."""

    def all_gather_bytes(self, payload: Any) -> Any:
        """Concatenates bytes of any length, in the order of rank."""

    def broadcast(self, arrays: list[Any]) -> list[Any]:
        """Returns the chief's values of uint8 tensors whose shapes are the same on all ranks."""

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]: ...
    def all_reduce_exact(self, numbers: Any, name: str) -> Any: ...
    def scatter(self, payload: Any, lengths: Any, name: str) -> Any: ...
    def all_gather(self, tensor: Any, name: str) -> Any: ...


class ProcessBackend(Backend):
    """A backend with one process per device and plain local Keras in each. `start` sets `_collectives`."""

    _collectives: Collectives
    _watchdog: Watchdog | None = None
    _call = "kd.init()"
    _sign_of_peer_loss = "A connection was closed"

    def _is_peer_loss(self, error: BaseException) -> bool:
        """True if this error means that another rank has gone."""
        raise NotImplementedError

    def describe_devices(self) -> str:
        gpus = len(tf.config.get_visible_devices("GPU"))
        return "one GPU each" if gpus else "CPU"

    # --- On the host ---

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
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
        gathered = self._collectives.all_gather_bytes(tf.constant(framed)).numpy().tobytes()
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

    # --- In the step ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        return self._noted(
            name, (list(gradients), row), lambda given: self._collectives.all_reduce(given[0], given[1], name)
        )

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return self._noted(name, numbers, lambda given: self._collectives.all_reduce_exact(given, name))

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        return self._collectives.scatter(payload, lengths, name)

    def all_gather(self, tensor: Any, name: str) -> Any:
        return self._collectives.all_gather(tensor, name)

    def _noted(self, name: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Runs a collective; that of a loop of the user's own so that the watchdog knows of it."""
        call = call_of(name)
        if call is None or self._watchdog is None or self._watchdog.is_entered:
            return collective(tensors)
        if not tf.executing_eagerly():
            return self._watchdog.around(call, tensors, collective)
        self.enter(call)
        try:
            return collective(tensors)
        except Exception as error:
            raise self.translate(error) from error
        finally:
            self.leave()

    # --- Life ---

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
        if isinstance(error, DistributionError) or not self._is_peer_loss(error):
            return error
        if self._watchdog is not None and (cause := self._watchdog.cause()) is not None:
            return cause
        return rank_has_gone(f"{self._sign_of_peer_loss} while this rank was in {self._call}", self.topology)
