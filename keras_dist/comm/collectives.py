"""What the collectives of backends with one process per device have in common."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
                results[index] = self._all_gather_slices(gradient, f"{name}_sparse_{index}")
            else:
                dense.append(index)
        *sums, rows = self._all_reduce_dense([*(gradients[index] for index in dense), table], name)
        for index, total in zip(dense, sums, strict=True):
            results[index] = total
        return results, tf.reshape(rows, [size, -1])

    def _all_gather_slices(self, slices: Any, name: str) -> Any:
        """Concatenates the rows of all ranks, as one process would have them for the whole batch."""
        return tf.IndexedSlices(
            self.all_gather(slices.values, f"{name}_values"),
            self.all_gather(slices.indices, f"{name}_indices"),
            slices.dense_shape,
        )

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
