"""Not a rival: only the fingerprints of a round's global batches, by which ranks see that they read the same data."""

import time
from collections.abc import Callable

import models

from contestants import BATCH, Case

RANKS = 2
BATCHES = 8


def build(case: Case) -> Callable[[], tuple[float, float]]:
    import tensorflow as tf

    from keras_dist.data.pipeline import fingerprint_of

    batch = next(iter(models.batches(case.model, BATCH * RANKS)))
    several = [tf.concat([part] * BATCHES, axis=0) for part in batch]

    @tf.function
    def fingerprints(steps: tf.Tensor, *several: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for step in tf.range(steps):
            # Another part in each step, so that TensorFlow computes all of it in each. Nothing is copied for it.
            first = step % BATCHES * BATCH * RANKS
            total += fingerprint_of([part[first : first + BATCH * RANKS] for part in several])
        return total

    def run() -> tuple[float, float]:
        fingerprints(tf.constant(1), *several)  # as in an epoch, whose first step is not timed
        start = time.perf_counter()
        total = float(fingerprints(tf.constant(case.steps_per_execution * case.executions), *several))
        return time.perf_counter() - start, total

    return run
