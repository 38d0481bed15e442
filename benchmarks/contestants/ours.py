"""keras_dist: `model.fit` after `kd.distribute`, and the sum over the ranks as a step makes it, on any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models

from contestants import BATCH, Case, Sum, timed_sums
from contestants.plain_keras import fitted


def build(case: Case) -> Callable[[], tuple[float, float]]:
    import keras_dist as kd

    batch = case.batch or BATCH * kd.num_replicas()
    return fitted(kd.distribute(models.keras_model(case.model)), case, batch)


def build_sum(job: Sum) -> Callable[[], tuple[float, float]]:
    import tensorflow as tf

    from keras_dist.api import current_backend

    backend = current_backend()
    tensor = tf.fill([job.count], float(backend.topology.rank + 1))

    @tf.function
    def total(tensor: Any) -> Any:
        (result,), _ = backend.all_reduce([tensor], tf.zeros([2]), f"benchmark_{job.count}")
        return result

    def last_of(result: Any) -> float:
        return float(result[-1])

    return lambda: timed_sums(lambda: total(tensor), last_of, job.times, backend.topology.size)
