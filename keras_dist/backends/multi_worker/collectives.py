"""TensorFlow's collective operations as the rest of the library needs them: named, safe to mix, exact in every dtype.

Facts that shape this file (TensorFlow 2.21): an operation finds those of the other ranks by a number, its instance
key, and not by a name; a key belongs to one shape for ever, and may be used again after all ranks are done with it;
what is gathered must have the same shape everywhere; only 16 to 64 bit floats and signed integers can be sent.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.topology import Topology

_GROUP, _GPU_GROUP = 1, 2
# What is at least so large is sent by itself; the rest is copied into one buffer.
_LARGE_BYTES = 1 << 20
# The type in which TensorFlow can add up what it can't send, without overflow.
_ADD_AS = {
    tf.bfloat16: tf.float32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
    tf.uint32: tf.int64, tf.uint64: tf.int64,
}  # fmt: skip
_WORD = 4  # bytes of an int32, as which everything is sent that isn't added
_NAMES_IN_TURN = 1024


class Collectives:
    """The collectives of one cluster.

    Args:
        topology: The place of this process.
        on_gpu: Add gradients up on the GPU, by NCCL, instead of in a ring of the hosts.
    """

    def __init__(self, topology: Topology, on_gpu: bool = False) -> None:
        self._topology = topology
        self._size = topology.size
        self._on_gpu = on_gpu

    def join(self, timeout: float) -> None:
        """Meets all ranks for the first time.

        Args:
            timeout: Seconds to wait for them.
        """
        with tf.device("CPU:0"):
            _reduce(tf.zeros([1]), self._size, _key("join"), timeout=timeout)

    # --- For the host ---

    def all_gather_bytes(self, payload: Any) -> Any:
        """Concatenates bytes of any length, in the order of rank."""
        return self.all_gather(payload, "exchange")

    def broadcast(self, arrays: list[Any]) -> list[Any]:
        """Returns the chief's values of uint8 tensors whose shapes are the same on all ranks."""
        received: list[Any] = list(arrays)
        with tf.device("CPU:0"):
            for number, members in enumerate(_packs(arrays)):
                lengths = [arrays[index].shape[0] for index in members]
                flat = tf.concat([arrays[index] for index in members], 0)
                words = self._from_chief(_to_words(flat), f"broadcast_{number}")
                parts = tf.split(_from_words(words, tf.uint8, sum(lengths)), lengths)
                for index, part in zip(members, parts, strict=True):
                    received[index] = part
        return received

    # --- For the step ---

    def all_gather(self, tensor: Any, name: str) -> Any:
        """Concatenates along the first axis, in the order of rank."""
        with tf.device("CPU:0"):
            rows = tf.shape(tensor)[0]
            everyones = self._gather(rows[None], _key(name, "rows"))
            row_shape = tf.shape(tensor)[1:]
            row_length = tf.reduce_prod(row_shape)
            words = _to_words(tensor)
            length = _bucket(_word_count(tf.reduce_max(everyones) * row_length, tensor.dtype))
            blocks = self._gather(
                tf.pad(words, [[0, length - tf.size(words)]])[None, :], _key_of_length(_key(name), length)
            )
            parts = [
                _from_words(blocks[rank], tensor.dtype, everyones[rank] * row_length) for rank in range(self._size)
            ]
            gathered = tf.reshape(tf.concat(parts, 0), tf.concat([[tf.reduce_sum(everyones)], row_shape], 0))
        gathered.set_shape([None, *tensor.shape[1:]])
        return gathered

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        """Adds a small tensor up over the ranks."""
        numbers = tf.convert_to_tensor(numbers)
        with tf.device("CPU:0"):
            total = tf.reshape(self._sum(tf.reshape(numbers, [-1]), name), tf.shape(numbers))
        total.set_shape(numbers.shape)
        return total

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        """Gives each rank its part of the chief's bytes."""
        with tf.device("CPU:0"):
            lengths = self._from_chief(lengths, f"{name}_lengths")
            total, rank = tf.reduce_sum(lengths), self._topology.rank
            length = _bucket(_word_count(total, tf.uint8))
            words = _to_words(payload) if self._topology.is_chief else tf.zeros([0], tf.int32)
            words = tf.pad(words, [[0, length - tf.size(words)]])
            chiefs = self._reduce(words, _key_of_length(_key(name), length))
            start = tf.reduce_sum(lengths[:rank])
            return _from_words(chiefs, tf.uint8, total)[start : start + lengths[rank]]

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        """See `Backend.all_reduce`."""
        rows = tf.reshape(tf.one_hot(self._topology.rank, self._size)[:, None] * row[None, :], [-1])
        summed: list[Any] = [*gradients, rows]
        dense = []
        for index, tensor in enumerate(summed):
            if isinstance(tensor, tf.IndexedSlices):
                summed[index] = self._gather_slices(tensor, f"{name}_sparse_{index}")
            else:
                dense.append(index)
        groups: dict[tf.DType, list[int]] = {}
        for index in dense:
            groups.setdefault(summed[index].dtype, []).append(index)
        for dtype, group in groups.items():
            for number, members in enumerate(_packs([summed[index] for index in group])):
                chosen = [group[member] for member in members]
                sums = self._sum_pack([summed[index] for index in chosen], f"{name}_{dtype.name}_{number}")
                for index, total in zip(chosen, sums, strict=True):
                    summed[index] = total
        rows = tf.reshape(summed.pop(), [self._size, -1])
        return summed, rows

    def _sum_pack(self, tensors: list[Any], name: str) -> list[Any]:
        """Adds tensors of one dtype up, in one buffer."""
        on_gpu = self._on_gpu and tensors[0].dtype.is_floating
        with tf.device("GPU:0" if on_gpu else "CPU:0"):
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            total = self._sum(flat[0] if len(flat) == 1 else tf.concat(flat, 0), name, on_gpu)
            parts = [total] if len(flat) == 1 else tf.split(total, [_length(part) for part in flat])
            sums = [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]
        for total, tensor in zip(sums, tensors, strict=True):
            total.set_shape(tensor.shape)
        return sums

    def _gather_slices(self, slices: Any, name: str) -> Any:
        """The rows of all ranks behind one another, as one process on the whole batch would have them."""
        return tf.IndexedSlices(
            self.all_gather(slices.values, name + "_values"),
            self.all_gather(slices.indices, name + "_indices"),
            slices.dense_shape,
        )

    # --- The operations ---

    def _sum(self, flat: Any, name: str, on_gpu: bool = False) -> Any:
        """Adds a tensor of one axis up."""
        wire = _ADD_AS.get(flat.dtype, flat.dtype)
        length = flat.shape[0]
        if length == 0 or self._size == 1:
            return flat
        sent = tf.cast(flat, wire)
        if length is not None:
            return tf.cast(self._reduce(sent, _key(name, wire.name, length), on_gpu), flat.dtype)
        length = tf.size(flat)
        everyones = self._gather(length[None], _key(name, "length"))
        alike = tf.debugging.Assert(
            tf.reduce_all(everyones == length), ["The ranks' tensors have different sizes:", everyones]
        )
        with tf.control_dependencies([alike] if alike is not None else []):
            padded = _bucket(length)
        key = _key_of_length(_key(name, wire.name), padded)
        total = self._reduce(tf.pad(sent, [[0, padded - length]]), key, on_gpu)
        return tf.cast(total[:length], flat.dtype)

    def _from_chief(self, numbers: Any, name: str) -> Any:
        """Returns the chief's integers: the others add zeros."""
        own = numbers if self._topology.is_chief else tf.zeros_like(numbers)
        return self._sum(own, name)

    def _reduce(self, flat: Any, key: Any, on_gpu: bool = False) -> Any:
        return flat if self._size == 1 else _reduce(flat, self._size, key, on_gpu)

    def _gather(self, block: Any, key: Any) -> Any:
        """Returns the blocks of all ranks, of the same shape everywhere."""
        if self._size == 1:
            return block
        return tf.raw_ops.CollectiveGatherV2(
            input=block, group_size=self._size, group_key=_GROUP, instance_key=key, ordering_token=[],
            communication_hint="ring",
        )  # fmt: skip


def _reduce(flat: Any, size: int, key: Any, on_gpu: bool = False, timeout: float = 0.0) -> Any:
    # No time limit but for the first: TensorFlow keeps a thread for each, until it is over.
    return tf.raw_ops.CollectiveReduceV2(
        input=flat, group_size=size, group_key=_GPU_GROUP if on_gpu else _GROUP, instance_key=key,
        ordering_token=[], merge_op="Add", final_op="Id", communication_hint="nccl" if on_gpu else "ring",
        timeout_seconds=timeout,
    )  # fmt: skip


# --- Keys ---


def _key(*parts: Any) -> int:
    """Returns a number for a collective, the same on all ranks.

    Data sets count on in their names; TensorFlow remembers every key, so they take those of old ones again.
    """
    name = re.sub(r"^(keras_dist_(?:batch|count)_)(\d+)", _in_turn, str(parts[0]))
    return zlib.crc32(repr((name, *parts[1:])).encode()) & 0x7FFFFFFF


def _in_turn(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) % _NAMES_IN_TURN}"


def _key_of_length(key: int, length: Any) -> Any:
    """Returns the key of a collective whose length is known only when it runs."""
    mixed = tf.cast(length, tf.int64) * 2654435761 + key
    return tf.cast(tf.bitwise.bitwise_and(mixed ^ tf.bitwise.right_shift(mixed, 17), 0x7FFFFFFF), tf.int32)


def _bucket(length: Any) -> Any:
    """Rounds a length up to one of few, at most a quarter longer, so that there are few keys."""
    length = tf.maximum(length, 4)
    magnitude = tf.cast(tf.math.ceil(tf.math.log(tf.cast(length, tf.float64)) / math.log(2.0) - 1e-9), tf.int32)
    quarter = tf.bitwise.left_shift(tf.ones_like(magnitude), tf.maximum(magnitude - 3, 0))
    return (length + quarter - 1) // quarter * quarter


# --- Buffers ---


def _packs(tensors: Sequence[Any]) -> list[list[int]]:
    """Returns which tensors are sent together: the small ones all in one buffer, large ones by themselves."""
    large = [index for index, tensor in enumerate(tensors) if _bytes(tensor) >= _LARGE_BYTES]
    small = [index for index, tensor in enumerate(tensors) if _bytes(tensor) < _LARGE_BYTES]
    return [*([small] if small else []), *([index] for index in large)]


def _bytes(tensor: Any) -> int:
    count = tensor.shape.num_elements()
    return 0 if count is None else int(count * tensor.dtype.size)


def _length(flat: Any) -> Any:
    return tf.size(flat) if flat.shape[0] is None else flat.shape[0]


def _word_count(count: Any, dtype: tf.DType) -> Any:
    """Returns how many int32 hold so many elements."""
    size = 1 if dtype == tf.bool else dtype.size
    return count * (size // _WORD) if size % _WORD == 0 else (count * size + _WORD - 1) // _WORD


def _to_words(tensor: Any) -> Any:
    """Returns the bits of a tensor as int32, of one axis."""
    flat = tf.reshape(tensor, [-1])
    if flat.dtype == tf.bool:
        flat = tf.cast(flat, tf.uint8)
    if flat.dtype.size % _WORD == 0:
        return tf.reshape(tf.bitcast(flat, tf.int32), [-1])
    raw = tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
    raw = tf.pad(raw, [[0, -tf.size(raw) % _WORD]])
    return tf.bitcast(tf.reshape(raw, [-1, _WORD]), tf.int32)


def _from_words(words: Any, dtype: tf.DType, count: Any) -> Any:
    """Returns the first elements of what `_to_words` has made, of one axis."""
    words = words[: _word_count(count, dtype)]
    if dtype == tf.bool:
        return tf.cast(_from_words(words, tf.uint8, count), tf.bool)
    if dtype.size % _WORD == 0:
        return tf.bitcast(words if dtype.size == _WORD else tf.reshape(words, [-1, dtype.size // _WORD]), dtype)
    raw = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[: count * dtype.size]
    return raw if dtype == tf.uint8 else tf.bitcast(tf.reshape(raw, [-1, dtype.size]) if dtype.size > 1 else raw, dtype)
