"""Horovod's operations as the rest of the library needs them: named, safe to mix, exact in every dtype.

Facts that shape this file (Horovod 0.28.1): eager operations ignore their `name`, so different ones can pair
silently, which is why each is traced; the name scope is ignored, because TensorFlow's inlining changes it;
there is no bfloat16; a grouped sum of `IndexedSlices` gets a wrong `dense_shape`, so their rows are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.topology import Topology

# What Horovod can't send is sent as the bits of another type.
_SEND_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}


class Collectives:
    """The collectives of one cluster.

    Args:
        hvd: The module `horovod.tensorflow`, initialized.
        topology: The place of this process.
        compression: `None`, `"fp16"` or `"bf16"`: the format of floating gradients on the wire.
        adasum: Combine gradients by Adasum instead of by their sum.
    """

    def __init__(self, hvd: Any, topology: Topology, compression: str | None, adasum: bool) -> None:
        self._hvd = hvd
        self._topology = topology
        self._compression = compression
        self._adasum = adasum

    # --- For the host ---

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
    def all_gather_bytes(self, payload: Any) -> Any:
        """Concatenates bytes of any length, in the order of rank."""
        with tf.device("CPU:0"):
            return self._hvd.allgather(payload, name="keras_dist_exchange", ignore_name_scope=True)

    @tf.function(autograph=False)
    def broadcast(self, arrays: list[Any]) -> list[Any]:
        """Returns the chief's values of tensors whose shapes and dtypes are the same on all ranks."""
        with tf.device("CPU:0"):
            return [
                self._hvd.broadcast(array, 0, name=f"keras_dist_broadcast_{index}", ignore_name_scope=True)
                for index, array in enumerate(arrays)
            ]

    # --- For the step ---

    def all_gather(self, tensor: Any, name: str) -> Any:
        """Concatenates along the first axis, in the order of rank."""
        if tf.executing_eagerly():
            return self._gather_rows_traced(tensor, name)
        wire = _SEND_AS.get(tensor.dtype)
        sent = tensor if wire is None else tf.bitcast(tensor, wire)
        gathered = self._hvd.allgather(sent, name=name, ignore_name_scope=True)
        gathered.set_shape([None, *tensor.shape[1:]])
        return gathered if wire is None else tf.bitcast(gathered, tensor.dtype)

    @tf.function(autograph=False, reduce_retracing=True)
    def _gather_rows_traced(self, tensor: Any, name: str) -> Any:
        return self.all_gather(tensor, name)

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        """Adds a small tensor up over the ranks."""
        if tf.executing_eagerly():
            return self._sum_numbers_traced(numbers, name)
        total = self._hvd.allreduce(numbers, op=self._hvd.Sum, name=name, ignore_name_scope=True)
        total.set_shape(numbers.shape)
        return total

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum_numbers_traced(self, numbers: Any, name: str) -> Any:
        return self.all_reduce_exact(numbers, name)

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        """Gives each rank its part of the chief's bytes."""
        with tf.device("CPU:0"):
            received, _ = self._hvd.alltoall(payload, splits=lengths, name=name, ignore_name_scope=True)
        return received

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        """See `Backend.all_reduce`."""
        if tf.executing_eagerly():
            summed, rows = self._sum_gradients_traced(tuple(gradients), row, name)
            return list(summed), rows
        return self._sum_gradients(gradients, row, name)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum_gradients_traced(self, gradients: Any, row: Any, name: str) -> Any:
        return self._sum_gradients(gradients, row, name)

    def _sum_gradients(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        size = self._topology.size
        rows = tf.reshape(tf.one_hot(self._topology.rank, size)[:, None] * row[None, :], [-1])
        summed: list[Any] = [*gradients, rows]
        rows_index = len(gradients)
        groups: dict[tuple[str, tf.DType], list[int]] = {}
        for index, tensor in enumerate(summed):
            if isinstance(tensor, tf.IndexedSlices):
                summed[index] = self._gather_slices(tensor, f"{name}_sparse_{index}")
            else:
                # The rows are exact, whatever happens to gradients; they travel with those that are too.
                way = "sum" if index == rows_index else self._way_of(tensor.dtype)
                groups.setdefault((way, _wire_dtype(tensor.dtype, way)), []).append(index)
        for (way, wire), members in groups.items():
            operation = getattr(self, f"_{way}")
            sums = operation([tf.cast(summed[index], wire) for index in members], f"{name}_{way}_{wire.name}")
            for index, total in zip(members, sums, strict=True):
                total.set_shape(summed[index].shape)
                summed[index] = tf.cast(total, summed[index].dtype)
        rows = tf.reshape(summed.pop(), [size, -1])
        return summed, rows

    def _way_of(self, dtype: tf.DType) -> str:
        if self._adasum:
            return "reduce_by_adasum"
        return f"sum_{self._compression}" if self._compression and dtype.is_floating else "sum"

    def _sum(self, tensors: list[Any], name: str) -> list[Any]:
        return list(self._hvd.grouped_allreduce(tensors, op=self._hvd.Sum, name=name, ignore_name_scope=True))

    # The cast to float16 is done by the caller, by the wire's dtype.
    _sum_fp16 = _sum

    def _reduce_by_adasum(self, tensors: list[Any], name: str) -> list[Any]:
        return [
            self._hvd.allreduce(tensor, op=self._hvd.Adasum, name=f"{name}_{index}", ignore_name_scope=True)
            for index, tensor in enumerate(tensors)
        ]

    def _sum_bf16(self, tensors: list[Any], name: str) -> list[Any]:
        """A sum with bfloat16 on the wire and float32 in the adder, made of an all-to-all and an all-gather.

        Horovod has no bfloat16, so the bits travel as uint16: every rank gets its slice of everyone's
        gradients, adds, and gives the result to all. The bytes are half of a float32 ring's, for any size.
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

    def _gather_slices(self, slices: Any, name: str) -> Any:
        """The rows of all ranks behind one another, as one process on the whole batch would have them."""
        return tf.IndexedSlices(
            self.all_gather(slices.values, name + "_values"),
            self.all_gather(slices.indices, name + "_indices"),
            slices.dense_shape,
        )


def _wire_dtype(dtype: tf.DType, way: str) -> tf.DType:
    if way == "sum_fp16":
        return tf.float16
    if way == "sum_bf16":
        return tf.float32  # where it adds; it is rounded to bfloat16 for the wire
    return tf.float32 if dtype == tf.bfloat16 else dtype
