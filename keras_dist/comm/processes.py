"""What backends with one process per device have in common: collectives of Python objects, and errors with causes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend, check_same_call
from keras_dist.comm.collectives import Collectives, decode, encode
from keras_dist.comm.liveness import Liveness
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.comm.watchdog import Watchdog, call_of, rank_has_gone
from keras_dist.errors import DistributionError


class ProcessBackend(Backend):
    """A backend with one process per device and plain local Keras in each. `start` sets `_collectives`."""

    _collectives: Collectives
    _watchdog: Watchdog | None = None
    _liveness: Liveness | None = None
    _call = "kd.init()"
    _sign_of_peer_loss = "A connection was closed"

    def _is_peer_loss(self, error: BaseException) -> bool:
        """True if this error means that another rank is gone."""
        raise NotImplementedError

    def describe_devices(self) -> str:
        return "one GPU each" if tf.config.get_visible_devices("GPU") else "CPU"

    # --- On the host ---

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        self.enter(call)
        try:
            payload = encode((call, value))
            framed = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
            with tf.device("CPU:0"):
                gathered = self._collectives.all_gather(tf.constant(framed), "keras_dist_object").numpy()
        except Exception as error:
            raise self.translate(error) from error
        finally:
            self.leave()
        stream = io.BytesIO(gathered.tobytes())  # all payloads, the length in front of each
        ranks = range(self.topology.size)
        received = [decode(stream.read(int.from_bytes(stream.read(8), "little"))) for _ in ranks]
        check_same_call(dict(enumerate(call for call, _ in received)))
        return [value for _, value in received]

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        try:
            with tf.device("CPU:0"):
                received = self._collectives.broadcast([tf.constant(array) for array in raw])
        except Exception as error:
            raise self.translate(error) from error
        return [
            tensor.numpy().view(np.asarray(array).dtype).reshape(np.shape(array))
            for tensor, array in zip(received, arrays, strict=True)
        ]

    # --- In the step ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        inputs = list(gradients), row
        return self._tracked(name, inputs, lambda both: self._collectives.all_reduce(both[0], both[1], name))

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return self._tracked(name, numbers, lambda inputs: self._collectives.all_reduce_exact(inputs, name))

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        return self._collectives.scatter(payload, lengths, name)

    def all_gather(self, tensor: Any, name: str) -> Any:
        return self._collectives.all_gather(tensor, name)

    def _tracked(self, name: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Runs a collective. In a custom loop, the watchdog tracks it."""
        call = call_of(name)
        if call is None or self._watchdog is None or self._watchdog.is_in_call:
            return collective(tensors)
        if not tf.executing_eagerly():
            return self._watchdog.track(call, tensors, collective)
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
        for watcher in (self._watchdog, self._liveness):
            if watcher is not None and (cause := watcher.cause()) is not None:
                return cause
        missing = "" if self._watchdog is None else self._watchdog.failure_reports.missing()
        return rank_has_gone(f"{self._sign_of_peer_loss} while this rank was in {self._call}{missing}", self.topology)
