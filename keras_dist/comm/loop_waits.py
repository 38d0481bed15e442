"""In which collective of a loop of the user's own a rank is, where no Python of ours stands around it.

A `tf.function` of the user's runs `kd.run`, `kd.reduce` and the update of an optimizer as operations. So operations
say in two variables that a collective begins and ends; the watchdog's thread reads them. The steps of `fit` have
Python around them, and none of this in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# The calls of the user's, by how the names of their collectives begin.
_CALLS = {
    "keras_dist_loop_reduce": "kd.reduce()",
    "keras_dist_loop": "kd.run()",
    "keras_dist_denominator": "kd.run()",
    "keras_dist_gradients": "the update of an optimizer in a loop",
}


class Place(NamedTuple):
    """Where a rank is.

    Args:
        number: How many collectives of loops it has begun.
        call: The one that it is in; empty if it is in none.
    """

    number: int
    call: str


def call_of(name: str) -> str | None:
    """Returns the call of a loop that a collective belongs to, `None` if it belongs to something else."""
    return next((call for beginning, call in _CALLS.items() if name.startswith(beginning)), None)


class LoopWaits:
    """The place of this process, kept by operations around each collective of a loop."""

    def __init__(self) -> None:
        self._calls = ["", *dict.fromkeys(_CALLS.values())]
        with tf.device("CPU:0"), tf.init_scope():
            self._number = tf.Variable(0, dtype=tf.int64, trainable=False, name="keras_dist_loop_collectives")
            self._call = tf.Variable(0, trainable=False, name="keras_dist_loop_collective")

    def around(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Returns what a collective, that is traced now, makes of `tensors`."""
        with tf.device("CPU:0"):
            # Constants are made out here: in there they would take the place of the operation to wait for.
            none, one = tf.constant(0), tf.constant(1, tf.int64)
            called = self._call.assign(self._calls.index(call))  # after the end of the one before
            with tf.control_dependencies([called]):
                begun = self._number.assign_add(one)
        with tf.control_dependencies([begun]):
            tensors = tf.nest.map_structure(tf.identity, tensors, expand_composites=True)
        outputs = collective(tensors)
        with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(outputs, expand_composites=True)):
            end = self._call.assign(none)
        with tf.control_dependencies([end]):
            return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

    def place(self) -> Place:
        """Returns where this process is now; for any thread."""
        return Place(int(self._number.numpy()), self._calls[int(self._call.numpy())])
