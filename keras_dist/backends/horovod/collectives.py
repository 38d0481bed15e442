"""Horovod's operations as the rest of the library needs them: named, safe to mix, exact in every dtype.

Facts that shape this file (Horovod 0.28.1):

- Eager operations ignore their `name`, so different ones can pair silently. Therefore each is traced.
- TensorFlow's inlining changes the name scope, so names ignore it.
- There is no bfloat16.
- A grouped sum of `IndexedSlices` gets a wrong `dense_shape`. Therefore their rows are gathered.
- Tensors that are sent together are copied into a buffer and back. Therefore large ones are sent by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from keras_dist.comm.processes import Collectives
from keras_dist.compat import tf_compat
from keras_dist.environment import Topology

_Method = TypeVar("_Method", bound=Callable[..., Any])
# What Horovod can't send is sent as the bits of another type.
_SEND_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}
# The types of the adder. With bf16 the wire has bfloat16.
_ADD_AS = {"sum_fp16": tf.float16, "sum_bf16": tf.float32}
# A tensor is large if each of the messages of its ring has at least so many bytes. Copying it would take longer than
# the latency that it saves: 25 MB take 18 ms by themselves and 26 ms through the buffer, on 2 ranks of one machine.
_BYTES_OF_A_LARGE_MESSAGE = 2**19


def _traced(method: _Method) -> _Method:
    """Makes an eager call of a collective run in a `tf.function`, also where a script runs functions eagerly."""
    function = tf_compat.often_traced(method)

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        if not tf.executing_eagerly():
            return method(*args)
        with tf_compat.functions_run_eagerly(False):
            return function(*args)

    return call  # type: ignore[return-value]


class HorovodCollectives(Collectives):
    """The collectives of `hvd`, the initialized module `horovod.tensorflow`."""

    def __init__(self, hvd: Any, topology: Topology, compression: str | None, adasum: bool) -> None:
        super().__init__(topology)
        self._hvd = hvd
        self._compression = compression
        self._adasum = adasum

    @_traced
    def broadcast(self, words: Any) -> Any:
        return self._hvd.broadcast(words, 0, name="keras_dist_broadcast", ignore_name_scope=True)

    @_traced
    def all_gather(self, tensor: Any, name: str) -> Any:
        sent_as = _SEND_AS.get(tensor.dtype)
        sent = tensor if sent_as is None else tf.bitcast(tensor, sent_as)
        gathered = self._hvd.allgather(sent, name=name, ignore_name_scope=True)
        gathered.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))  # whose rank may be unknown
        return gathered if sent_as is None else tf.bitcast(gathered, tensor.dtype)

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        with tf.device("CPU:0"):
            received, _ = self._hvd.alltoall(payload, splits=lengths, name=name, ignore_name_scope=True)
        return received

    @_traced
    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        total = self._hvd.allreduce(numbers, op=self._hvd.Sum, name=name, ignore_name_scope=True)
        total.set_shape(numbers.shape)
        return total

    all_reduce = _traced(Collectives.all_reduce)

    # --- Dense gradients, by option ---

    def _all_reduce_dense(self, tensors: list[Any], name: str) -> list[Any]:
        groups: dict[tuple[str, tf.DType], list[int]] = {}
        for index, tensor in enumerate(tensors):
            way = "sum" if index == len(tensors) - 1 else self._way_of(tensor.dtype)
            added_as = _ADD_AS.get(way, tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype)
            groups.setdefault((way, added_as), []).append(index)
        results: list[Any] = list(tensors)
        for (way, dtype), members in groups.items():
            sent, label = [tf.cast(tensors[index], dtype) for index in members], f"{name}_{way}_{dtype.name}"
            sums = self._sum_bf16(sent, label) if way == "sum_bf16" else self._reduce(sent, label, way == "adasum")
            for index, total in zip(members, sums, strict=True):
                total.set_shape(tensors[index].shape)
                results[index] = tf.cast(total, tensors[index].dtype)
        return results

    def _way_of(self, dtype: tf.DType) -> str:
        if self._adasum:
            return "adasum"
        return f"sum_{self._compression}" if self._compression and dtype.is_floating else "sum"

    def _reduce(self, tensors: list[Any], name: str, adasum: bool) -> list[Any]:
        """Sends large tensors, and all for Adasum, one by one as soon as computed, and the other ones together."""
        options = {"op": self._hvd.Adasum if adasum else self._hvd.Sum, "ignore_name_scope": True}
        alone = [index for index, tensor in enumerate(tensors) if adasum or self._is_large(tensor)]
        results = {index: self._hvd.allreduce(tensors[index], name=f"{name}_{index}", **options) for index in alone}
        if small := [index for index in range(len(tensors)) if index not in results]:
            together = self._hvd.grouped_allreduce([tensors[index] for index in small], name=name, **options)
            results.update(zip(small, together, strict=True))
        return [results[index] for index in range(len(tensors))]

    def _is_large(self, tensor: Any) -> bool:
        numbers = tensor.shape.num_elements()
        return numbers is not None and numbers * tensor.dtype.size >= _BYTES_OF_A_LARGE_MESSAGE * self._topology.size

    def _sum_bf16(self, tensors: list[Any], name: str) -> list[Any]:
        """Sums with bfloat16 on the wire and float32 in the adder, by an all-to-all and an all-gather.

        Horovod has no bfloat16, so the bits travel as uint16: every rank gets its slice of all ranks' gradients, sums
        it, and sends the sum to all. This takes half the bytes of a float32 ring, for any number of ranks.
        """
        size = self._topology.size
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        length = tf.size(flat)
        slice_length = (length + size - 1) // size
        padded = tf.pad(flat, [[0, slice_length * size - length]])
        sent = tf.bitcast(tf.cast(padded, tf.bfloat16), tf.uint16)
        slices, _ = self._hvd.alltoall(
            sent, splits=tf.fill([size], slice_length), name=f"{name}_scatter", ignore_name_scope=True
        )
        slices = tf.cast(tf.bitcast(tf.reshape(slices, [size, -1]), tf.bfloat16), flat.dtype)
        total = tf.bitcast(tf.cast(tf.reduce_sum(slices, 0), tf.bfloat16), tf.uint16)
        gathered = self._hvd.allgather(total, name=f"{name}_gather", ignore_name_scope=True)
        flat = tf.cast(tf.bitcast(gathered, tf.bfloat16), flat.dtype)[:length]
        parts = tf.split(flat, [tf.size(tensor) for tensor in tensors])
        return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]
