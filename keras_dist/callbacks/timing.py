"""A callback that measures how long steps take, and how long each rank waits for the others."""

from __future__ import annotations

import time
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.logging import logger
from keras_dist.step.stopwatch import Stopwatch


class Timing(keras.callbacks.Callback):
    """Adds the time of training steps to the logs of each epoch, for `TensorBoard`, `CSVLogger` and the history.

    Put it before those callbacks in the list, and on every rank: if one rank lacks it, `fit` raises an error. It
    logs these numbers, the same on all ranks:

    - `step_seconds`: seconds per step, averaged over steps and ranks;
    - `wait_seconds`: seconds per step in which a rank waits for slower ranks, averaged likewise. 0 in one process;
    - `examples_per_second`: summed over all ranks. It is missing if a custom `train_step` does not update Keras's
      loss metric, which counts the examples.

    It measures training steps, including reading their data and the callbacks between them, but neither validation
    nor callbacks at the end of an epoch. The first epoch includes tracing.

    A rank's working time runs from the end of one gradient reduction until its gradients are ready for the next.
    Its waiting time is the slowest rank's working time minus its own. The times are sent with the gradients, so this
    needs no extra communication and no synchronized clocks, and network time is not included. Waiting elsewhere in a
    step, for data (`data="chief"`) or for the denominator of a loss, is not measured.

    Attributes:
        by_rank: List with a dict `{"step_seconds": ..., "wait_seconds": ...}` for each rank, from the last epoch.
            The rank with the least waiting is the slowest. It is also logged at level info.

    Example:

    ```python
    model.fit(x, y, callbacks=[kd.callbacks.Timing(), keras.callbacks.TensorBoard("logs")])
    ```
    """

    async_safe = True  # its batch hooks only read the clock

    def __init__(self) -> None:
        super().__init__()
        self.by_rank: list[dict[str, float]] = []
        self.backend: Backend | None = None  # a distributed `fit` sets this and the stopwatch
        self.stopwatch: Stopwatch | None = None
        self._began: float | None = None
        self._ended = 0.0
        self._steps = 0
        self._examples: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.backend is not None:
            self.backend.all_gather_object("kd.callbacks.Timing")  # raises an error if another rank lacks the callback

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._steps, self._examples = None, 0, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        known = self.params.get("steps") or batch + 1  # the last execution may have fewer steps
        self._ended = time.monotonic()
        self._steps = min(batch + 1, known)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._examples is None and self._steps:
            self._examples = _examples_seen(self.model)  # before validation resets the metrics

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._began is None:
            return
        examples = _examples_seen(self.model) if self._examples is None else self._examples
        waited = 0.0 if self.stopwatch is None else self.stopwatch.waited()
        times = {"step_seconds": (self._ended - self._began) / self._steps, "wait_seconds": waited / self._steps}
        self.by_rank = [times] if self.backend is None else self.backend.all_gather_object("kd.callbacks.Timing", times)
        means = {key: sum(each[key] for each in self.by_rank) / len(self.by_rank) for key in times}
        if examples is not None:
            means["examples_per_second"] = examples / (means["step_seconds"] * self._steps)
        if logs is not None:
            logs.update(means)
        logger().info("epoch %d: %s", epoch + 1, _described(self.by_rank))


def _examples_seen(model: keras.Model) -> float | None:
    """Returns the number of examples of all ranks in this epoch, which Keras's loss metric counts."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return float(metric.count)
    return None


def _described(by_rank: list[dict[str, float]]) -> str:
    return "; ".join(
        f"rank {rank}: {times['step_seconds']:.3g} s per step, {times['wait_seconds']:.3g} s of it waiting"
        for rank, times in enumerate(by_rank)
    )
