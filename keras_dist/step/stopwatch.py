"""How long a rank waits for slower ones, measured without comparing clocks.

Ranks set out together when a reduction or a meeting has ended, and each measures how long it works until the next one.
These durations travel with it: the slowest rank's minus its own is how long a rank has waited. Their clocks need not be
alike, and the time that the network takes is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Stopwatch:
    """Measures the waiting of one rank, in steps and between them."""

    def __init__(self) -> None:
        with tf.device("CPU:0"), tf.init_scope():
            self._set_out = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_set_out")
            self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_waited")

    def restart(self) -> None:
        """Forgets what was measured. Called when all ranks have just met."""
        self._waited.assign(0.0)
        self._set_out.assign(tf.timestamp())

    def waited(self) -> float:
        """Returns the seconds since `restart` in which this rank had nothing to do but wait for others."""
        return float(self._waited.numpy())

    def worked(self, after: Sequence[Any] = ()) -> Any:
        """Returns for how many seconds this rank has worked since the ranks set out, a float32 scalar.

        Args:
            after: Tensors that the work ends with.
        """
        with tf.device("CPU:0"), tf.control_dependencies([_on_host(tensor) for tensor in after]):
            return tf.cast(tf.timestamp() - self._set_out, tf.float32)

    def met(self, own: Any, everyone: Any) -> None:
        """Notes that all ranks have met.

        Args:
            own: What `worked` returned.
            everyone: The same of all ranks: float32 of shape `(size,)`.
        """
        with tf.device("CPU:0"), tf.control_dependencies([everyone]):
            self._waited.assign_add(tf.cast(tf.reduce_max(everyone) - own, tf.float64))
            self._set_out.assign(tf.timestamp())


def _on_host(tensor: Any) -> Any:
    """Copies one number off the device: a GPU has computed it by then, not only been told to."""
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return tf.identity(tf.reshape(values, [-1])[:1])
