"""Statistics of the global batch, for layers that ask for them: `BatchNormalization(synchronized=True)`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.step import step as step_module


def summed(backend: Backend, numbers: Any) -> Any:
    """Adds numbers up over the replicas, so that gradients flow back to all of them.

    A replica's gradient is weighted by its share when gradients are reduced. What flows back through a sum comes from
    all losses: it counts by their shares, not by that of the replica that it flows to.

    Args:
        backend: How the replicas talk.
        numbers: Float tensor, of the same shape on all replicas.

    Returns:
        The sum, alike on all of them; outside of a distributed step `numbers` itself.
    """
    step = step_module.current()
    if step is None:
        return numbers
    name = step.next_name("statistics")

    @tf.custom_gradient
    def total(numbers: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            part = tf.cast(step.part, upstream.dtype)
            everyones = backend.all_reduce_exact(tf.math.multiply_no_nan(upstream, part), f"{name}_gradient")
            return tf.math.divide_no_nan(everyones, part)

        # The one example of an empty share doesn't count.
        own = tf.where(step.count > 0, numbers, tf.zeros_like(numbers))
        return backend.all_reduce_exact(own, name), gradient

    return total(numbers)
