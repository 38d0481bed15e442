"""keras_dist: `model.fit` after `kd.distribute`, and the sum over the ranks as a step makes it, on any backend.

Of parameter servers the `"whole"` `fit` is timed, with the beginning and the end of the epoch: the coordinator only
sends the steps out.
"""

import time
from collections.abc import Callable
from typing import Any

import models

from contestants import BATCH, Case, Sum, timed_sums
from contestants.plain_keras import compiled, fitted

TUNING_STEPS = 200  # 20 and one of each of three ways, and 6 executions of 16


def build(case: Case, timed: str = "steps") -> Callable[[], tuple[float, float]]:
    import keras_dist as kd

    batch = case.batch or BATCH * kd.num_replicas()
    if timed == "tune":
        return _tuned(kd.distribute(models.keras_model(case.model), tune=True), case, batch)
    return fitted(kd.distribute(models.keras_model(case.model)), case, batch, timed)


def _tuned(model: Any, case: Case, batch: int) -> Callable[[], tuple[float, float]]:
    """Lets `tune=True` choose in a training that seems long, so that all is worth trying."""
    import keras

    data, ends = models.batches(case.model, batch), list[tuple[int, float]]()

    class Clock(keras.callbacks.ProgbarLogger):  # as a progress bar it lets steps be put together; it is the chief's
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_begin(epoch, logs)
            ends.append((-1, time.perf_counter()))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append((batch, time.perf_counter()))

    def stop_if_chosen(epoch: int, _: Any) -> None:
        model.stop_training = (epoch + 1) * case.steps >= TUNING_STEPS

    stop = keras.callbacks.LambdaCallback(on_epoch_end=stop_if_chosen)
    compiled(model, case).fit(data, epochs=10_000, steps_per_epoch=case.steps, verbose=0, callbacks=[stop])

    def run() -> tuple[float, float]:
        ends.clear()
        history = model.fit(data, steps_per_epoch=case.steps, verbose=0, callbacks=[Clock()])
        if not ends:  # not the chief
            return 0.0, history.history["loss"][0]
        # Of more than one execution, without the first.
        (first, start), (last, end) = ends[len(ends) > 2], ends[-1]
        return (end - start) / (last - first) * case.executions, history.history["loss"][0]

    return run


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
