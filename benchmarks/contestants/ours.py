"""keras_dist: `model.fit` after `kd.distribute`, and the sum over the ranks as a step makes it, on any backend.

Of parameter servers the `"whole"` `fit` is timed, with the beginning and the end of the epoch: the coordinator only
sends the steps out. So it is after `"tune"`, where an execution has as many steps as `fit` has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models

from contestants import BATCH, Case, Sum, timed_sums
from contestants.plain_keras import fitted

TUNING_STEPS = 200  # 20 and one of each of three ways, and 6 executions of 16


def build(case: Case, timed: str = "steps") -> Callable[[], tuple[float, float]]:
    import keras_dist as kd

    tunes, batch = timed == "tune", case.batch or BATCH * kd.num_replicas()
    model = kd.distribute(models.keras_model(case.model), tune=tunes)
    run = fitted(model, case, batch, "whole" if tunes else timed)
    if tunes:
        _tune(model, models.batches(case.model, batch), case.steps)
    return run


def _tune(model: Any, data: Any, steps: int) -> None:
    """Begins a long training, for which all is worth trying, and stops it when the choice is made."""
    import keras

    def stop_if_chosen(epoch: int, _: Any) -> None:
        model.stop_training = (epoch + 1) * steps >= TUNING_STEPS

    model.fit(
        data,
        epochs=10_000,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stop_if_chosen)],
    )


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
