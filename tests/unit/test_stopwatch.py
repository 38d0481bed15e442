"""How long a rank has waited: the slowest rank's time minus its own, at each collective."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.step.step import Stopwatch


@pytest.mark.parametrize("traced", [False, True])
def test_waiting_adds_up(traced: bool) -> None:
    stopwatch = Stopwatch()
    stopwatch.restart()

    def meet(own: tf.Tensor, everyone: tf.Tensor) -> None:
        stopwatch.synchronized(own, everyone)

    run = tf.function(meet) if traced else meet
    run(tf.constant(1.0), tf.constant([1.0, 3.0, 2.0]))
    run(tf.constant(4.0), tf.constant([4.0, 0.5, 2.0]))
    run(tf.constant(1.0), tf.constant([1.0, 0.5, 1.5]))
    np.testing.assert_allclose(stopwatch.waited(), 2.5)
    stopwatch.restart()
    assert stopwatch.waited() == 0.0


def test_work_is_measured_from_the_last_meeting() -> None:
    stopwatch = Stopwatch()
    before = float(tf.timestamp())
    stopwatch.restart()
    gradients = [tf.ones([2, 3]), tf.IndexedSlices(tf.ones([0, 3]), tf.zeros([0], tf.int32), tf.constant([5, 3]))]
    first = float(stopwatch.worked(after=gradients))
    stopwatch.synchronized(tf.constant(0.0), tf.constant([0.0]))
    between = float(tf.timestamp())
    second = float(stopwatch.worked())
    assert 0 <= first <= between - before
    assert 0 <= second <= float(tf.timestamp()) - before
