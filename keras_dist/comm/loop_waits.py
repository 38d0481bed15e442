"""Which collective of a custom training loop this rank waits in.

In `fit` our Python code surrounds each step. In a custom loop the user's `tf.function` runs `kd.run`, `kd.reduce` and
the update of an optimizer as operations. There, further operations write the beginning and the end of each collective
to two variables, which the watchdog's thread reads. Steps of `fit` contain none of these operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# The user's calls, by the beginnings of their collectives' names.
_CALLS = {
    "keras_dist_loop_reduce": "kd.reduce()",
    "keras_dist_loop": "kd.run()",
    "keras_dist_denominator": "kd.run()",
    "keras_dist_condition": "a tf.cond around an update",
    "keras_dist_all_reduce": "kd.all_reduce()",
    "keras_dist_gradients": "the update of an optimizer in a loop",
}


def call_of(name: str) -> str | None:
    """Returns the call of a custom loop that a collective belongs to, `None` if it belongs to something else."""
    return next((call for beginning, call in _CALLS.items() if name.startswith(beginning)), None)


class LoopWaits:
    """Tracks the collectives of custom loops in this process, by operations before and after each."""

    def __init__(self) -> None:
        self._calls = ["", *dict.fromkeys(_CALLS.values())]
        with tf.device("CPU:0"), tf.init_scope():
            self._number = tf.Variable(0, dtype=tf.int64, trainable=False, name="keras_dist_loop_collectives")
            self._call = tf.Variable(0, trainable=False, name="keras_dist_loop_collective")

    def track(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Traces `collective(tensors)` between operations that record its beginning and its end; returns its result."""
        with tf.device("CPU:0"):
            # Made here: under control dependencies, a constant would get the dependency instead of the assignment.
            none, one = tf.constant(0), tf.constant(1, tf.int64)
            entered = self._call.assign(self._calls.index(call))  # after the end of the previous collective
            with tf.control_dependencies([entered]):
                begun = self._number.assign_add(one)
        with tf.control_dependencies([begun]):
            tensors = tf.nest.map_structure(tf.identity, tensors, expand_composites=True)
        outputs = collective(tensors)
        with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(outputs, expand_composites=True)):
            left = self._call.assign(none)
        with tf.control_dependencies([left]):
            return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

    def position(self) -> tuple[int, str]:
        """Returns how many collectives have begun, and the call of the current one; any thread may call it."""
        return int(self._number.numpy()), self._calls[int(self._call.numpy())]
