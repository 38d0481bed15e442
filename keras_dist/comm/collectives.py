"""What ranks send each other: the names of collectives, and Python objects as bytes.

Objects are JSON with the bodies of their arrays behind it. What is received can't run code, as a pickle can.
"""

from __future__ import annotations

import abc
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.errors import ConfigurationError
from keras_dist.topology import Topology


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
                # The rows of all ranks, as one process would have them for the whole batch.
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
    def broadcast(self, arrays: list[Any]) -> list[Any]:
        """Returns the chief's values of uint8 tensors of one axis, of the same lengths on all ranks."""


_LENGTH_BYTES = 8


def encode(value: Any) -> bytes:
    """Returns an object as bytes.

    It may be `None`, a number, text, bytes, a NumPy array or scalar, a tensor; or lists, tuples, sets and dicts of
    them. Of a subclass of these containers the plain one arrives.
    """
    bodies: list[bytes] = []
    header = json.dumps(_tagged(value, bodies)).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *bodies])


def decode(payload: bytes) -> Any:
    """Returns the object that `encode` has returned as bytes."""
    stream = io.BytesIO(payload)
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    return _untagged(json.loads(stream.read(length)), stream)


def _tagged(value: Any, bodies: list[bytes]) -> Any:
    if type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_tagged(item, bodies) for item in value]
    if isinstance(value, tuple | set | frozenset):
        container = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {"kind": container.__name__, "items": [_tagged(item, bodies) for item in value]}
    if isinstance(value, Mapping):
        return {"kind": "dict", "items": [[_tagged(part, bodies) for part in item] for item in value.items()]}
    if isinstance(value, bytes | bytearray):
        bodies.append(bytes(value))
        return {"kind": "bytes", "length": len(value)}
    is_tensor = isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype != tf.string
    if is_tensor or isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        if is_tensor:
            kind, value = "tensor", value.numpy()
        value = np.asarray(value)
        if not value.dtype.hasobject and value.dtype.names is None:
            bodies.append(value.tobytes())
            # NumPy has no text for the types of other packages, such as bfloat16.
            dtype = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
            return {"dtype": dtype, "shape": value.shape, "length": value.nbytes, "kind": kind}
    raise ConfigurationError(
        "Only numbers, texts, bytes, arrays and tensors can be sent to other ranks, and lists, tuples, sets and dicts "
        "of them: a pickle could run code.",
        f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"{type(value).__qualname__} object",
        "Send what it is made of, such as `vars(it)` or its config, and make it anew on each rank.",
    )


def _untagged(tagged: Any, bodies: io.BytesIO) -> Any:
    if isinstance(tagged, list):
        return [_untagged(item, bodies) for item in tagged]
    if not isinstance(tagged, dict):
        return tagged
    kind = tagged["kind"]
    if kind == "dict":
        return {_untagged(key, bodies): _untagged(item, bodies) for key, item in tagged["items"]}
    if kind in ("tuple", "set", "frozenset"):
        make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(_untagged(item, bodies) for item in tagged["items"])
    body = bodies.read(tagged["length"])
    if kind == "bytes":
        return body
    name = tagged["dtype"]
    dtype = np.dtype(name) if name[0] in "<>|=" else tf.as_dtype(name).as_numpy_dtype
    array = np.frombuffer(body, dtype).reshape(tagged["shape"]).copy()
    return {"array": lambda: array, "scalar": lambda: array[()], "tensor": lambda: tf.constant(array)}[kind]()
