"""A typical training loop that is written by hand for Horovod. It logs what `fit` logs."""

import time
from collections.abc import Callable
from typing import Any

import models

from contestants import BATCH, Case, Sum, timed_sums


def start() -> None:
    import horovod.tensorflow as hvd

    hvd.init()


def build(case: Case) -> Callable[[], tuple[float, float]]:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model, loss_of = models.keras_model(case.model), models.keras_loss()
    optimizer = models.keras_optimizer(case.optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)
    mean_loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    batches = models.batches(case.model, BATCH, hvd.size(), hvd.rank())

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), variables)
        mean_loss.update_state(loss)
        accuracy.update_state(y, logits)

    @tf.function
    def execution(iterator: Any) -> tuple[Any, Any]:
        if case.steps_per_execution == 1:
            step(*next(iterator))
        else:
            for _ in tf.range(case.steps_per_execution):
                step(*next(iterator))
        return mean_loss.result(), accuracy.result()

    def run() -> tuple[float, float]:
        for metric in (mean_loss, accuracy):
            metric.reset_state()
        iterator, times = iter(batches), []
        for _ in range(case.executions + 1):
            loss, _ = (float(value) for value in execution(iterator))
            times.append(time.perf_counter())
        return times[-1] - times[0], float(hvd.allreduce(tf.constant(loss), op=hvd.Average, name="loss"))

    return run


def build_sum(job: Sum) -> Callable[[], tuple[float, float]]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.fill([job.count], float(hvd.rank() + 1))

    @tf.function
    def total(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name=f"hand_{job.count}")

    def last_of(result: Any) -> float:
        return float(result[-1])

    return lambda: timed_sums(lambda: total(tensor), last_of, job.times, hvd.size())
