"""Measures how long a rank waits for slower ranks, without synchronized clocks.

All ranks start to work when a collective ends, and each measures how long it works until the next one. These durations
are sent with that collective: the slowest rank's minus its own is how long a rank has waited, without network time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Stopwatch:
    """Measures how long one rank waits, in steps and between them."""

    def __init__(self) -> None:
        with tf.device("CPU:0"), tf.init_scope():
            self._started = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_started")
            self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_waited")

    def restart(self) -> None:
        """Resets the waiting time. Called just after a collective."""
        self._waited.assign(0.0)
        self._started.assign(tf.timestamp())

    def waited(self) -> float:
        """Returns for how many seconds this rank has waited for others since `restart`."""
        return float(self._waited.numpy())

    def worked(self, after: Sequence[Any] = ()) -> Any:
        """Returns for how many seconds this rank has worked since the last collective, a float32 scalar.

        Args:
            after: Tensors that the work computes.
        """
        with tf.device("CPU:0"), tf.control_dependencies([_on_host(tensor) for tensor in after]):
            return tf.cast(tf.timestamp() - self._started, tf.float32)

    def synchronized(self, worked: Any, by_rank: Any) -> None:
        """Notes that a collective has ended.

        Args:
            worked: What `worked` returned.
            by_rank: The same of all ranks: float32 tensor of shape `(size,)`.
        """
        with tf.device("CPU:0"), tf.control_dependencies([by_rank]):
            self._waited.assign_add(tf.cast(tf.reduce_max(by_rank) - worked, tf.float64))
            self._started.assign(tf.timestamp())


def _on_host(tensor: Any) -> Any:
    """Copies one number to the host, which waits until a GPU has computed it."""
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return tf.identity(tf.reshape(values, [-1])[:1])
