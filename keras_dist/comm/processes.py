"""The common part of backends with one process per device: collectives of Python objects, and errors with causes.

Objects are sent as JSON, followed by the bytes of their arrays. Unlike a pickle, a received object can't run code.
"""

import abc
import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend, Rendezvous, check_same_call
from keras_dist.comm.watchdog import Watchdog, call_of, rank_has_gone
from keras_dist.environment import Topology
from keras_dist.errors import ConfigurationError, DistributionError


class Collectives(abc.ABC):
    """The collectives of one library. `Backend` documents each."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        size, results = self._topology.size, list(gradients)
        # Each rank writes its row into a table of zeros, so the sum of the tables contains all rows.
        table = tf.reshape(tf.one_hot(self._topology.rank, size)[:, None] * row[None, :], [-1])
        dense = []
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                # The rows of all ranks, as in one process with the whole batch.
                values = self.all_gather(gradient.values, f"{name}_sparse_{index}_values")
                indices = self.all_gather(gradient.indices, f"{name}_sparse_{index}_indices")
                results[index] = tf.IndexedSlices(values, indices, gradient.dense_shape)
            else:
                dense.append(index)
        *sums, rows = self._all_reduce_dense([*(gradients[index] for index in dense), table], name)
        for index, total in zip(dense, sums, strict=True):
            results[index] = total
        return results, tf.reshape(rows, [size, -1])

    @abc.abstractmethod
    def _all_reduce_dense(self, tensors: list[Any], name: str) -> list[Any]:
        """Sums dense tensors over the ranks, in their shapes and dtypes; the last one without compression."""

    @abc.abstractmethod
    def all_reduce_exact(self, numbers: Any, name: str) -> Any: ...
    @abc.abstractmethod
    def all_gather(self, tensor: Any, name: str) -> Any: ...
    @abc.abstractmethod
    def scatter(self, payload: Any, lengths: Any, name: str) -> Any: ...
    @abc.abstractmethod
    def broadcast(self, words: Any) -> Any:
        """Returns the chief's int32 tensor of one axis, of the same length on all ranks. Called eagerly."""


_BUFFER_BYTES = 2**24  # arrays are sent together up to this size
_LENGTH_BYTES = 8
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)}
_FROM_ARRAY: dict[str, Callable[[np.ndarray], Any]] = {
    "array": np.copy, "scalar": lambda array: array[()], "tensor": tf.constant, "bytes": np.ndarray.tobytes,
}  # fmt: skip


def encode(value: Any) -> bytes:
    """Returns an object as bytes.

    It may be `None`, a number, text, bytes, a NumPy array or scalar, a tensor; or lists, tuples, sets and dicts of
    them. A subclass of these containers arrives as the plain container.
    """
    bodies: list[bytes] = []
    header = json.dumps(_tagged(value, bodies)).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *bodies])


def decode(payload: bytes) -> Any:
    stream = io.BytesIO(payload)
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    return _untagged(json.loads(stream.read(length)), stream)


def _tagged(value: Any, bodies: list[bytes]) -> Any:
    if type(value) in (type(None), bool, int, float, str):
        return value
    for name, kind in _CONTAINERS.items():
        if isinstance(value, Mapping if kind is dict else kind):
            items = value.items() if kind is dict else value
            return [name, [_tagged(item, bodies) for item in items]]
    name, array = "array" if isinstance(value, np.ndarray) else "scalar", value
    if isinstance(value, bytes | bytearray):
        name, array = "bytes", np.frombuffer(value, np.uint8)
    elif isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype != tf.string:
        name, array = "tensor", np.asarray(value.numpy())
    if isinstance(array, np.ndarray | np.generic) and not array.dtype.hasobject and array.dtype.names is None:
        bodies.append(array.tobytes())
        # NumPy has no text for the types of other packages, such as bfloat16.
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        return [name, dtype, array.shape, array.nbytes]
    raise ConfigurationError(
        "Only numbers, texts, bytes, arrays and tensors can be sent to other ranks, and lists, tuples, sets and dicts "
        "of them: a pickle could run code.",
        f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"{type(value).__qualname__} object",
        "Send what it is made of, such as `vars(it)` or its config, and make it again on each rank.",
    )


def _untagged(tagged: Any, bodies: io.BytesIO) -> Any:
    if not isinstance(tagged, list):
        return tagged
    kind, *content = tagged
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_untagged(item, bodies) for item in content[0])
    name, shape, length = content
    dtype = np.dtype(name) if name[0] in "<>|=" else tf.as_dtype(name).as_numpy_dtype
    return _FROM_ARRAY[kind](np.frombuffer(bodies.read(length), dtype).reshape(shape))


class ProcessBackend(Backend):
    """A backend with one process per device and plain local Keras in each. `start` sets `_collectives`."""

    _collectives: Collectives
    _watchdog: Watchdog | None = None
    _call = "kd.init()"
    _sign_of_peer_loss: str

    def _is_peer_loss(self, error: BaseException) -> bool:
        """True if this error means that another rank is gone."""
        raise NotImplementedError

    def describe_devices(self) -> str:
        return "one GPU each" if tf.config.get_visible_devices("GPU") else "CPU"

    # --- On the host ---

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        payload = encode((call, value))
        framed = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
        with self.in_call(call), tf.device("CPU:0"):
            try:
                gathered = self._collectives.all_gather(tf.constant(framed), "keras_dist_object").numpy()
            except Exception as error:
                raise self.translate(error) from error
        stream = io.BytesIO(gathered.tobytes())  # all payloads, the length in front of each
        ranks = range(self.topology.size)
        received = [decode(stream.read(int.from_bytes(stream.read(8), "little"))) for _ in ranks]
        check_same_call(dict(enumerate(call for call, _ in received)))
        return [value for _, value in received]

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        groups, size = [list[np.ndarray]()], 0
        for array in map(np.asarray, arrays):
            size += array.nbytes
            if size > _BUFFER_BYTES:
                groups.append([])
                size = array.nbytes
            groups[-1].append(array)
        received = []
        for group in filter(None, groups):
            parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in group]
            ends = np.cumsum([len(part) for part in parts])
            words = np.concatenate([*parts, np.zeros(-ends[-1] % 4, np.uint8)]).view(np.int32)
            try:
                with tf.device("CPU:0"):
                    raw = self._collectives.broadcast(tf.constant(words)).numpy().view(np.uint8)
            except Exception as error:
                raise self.translate(error) from error
            *parts, _ = np.split(raw, ends)
            received += [part.view(old.dtype).reshape(old.shape) for part, old in zip(parts, group, strict=True)]
        return received

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
        with self.in_call(call):
            try:
                return collective(tensors)
            except Exception as error:
                raise self.translate(error) from error

    # --- Life ---

    @property
    def rendezvous(self) -> Rendezvous | None:
        return None if self._watchdog is None else self._watchdog.rendezvous

    def in_call(self, call: str) -> contextlib.AbstractContextManager[None]:
        self._call = call
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.in_call(call)

    def translate(self, error: BaseException) -> BaseException:
        if isinstance(error, DistributionError) or not self._is_peer_loss(error):
            return error
        missing = ""
        if self._watchdog is not None:
            if (cause := self._watchdog.cause()) is not None:
                return cause
            missing = self._watchdog.missing()
        return rank_has_gone(f"{self._sign_of_peer_loss} while this rank was in {self._call}{missing}", self.topology)
