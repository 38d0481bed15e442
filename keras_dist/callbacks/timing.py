"""How long steps take, and how much of it is waiting for other ranks."""

from __future__ import annotations

import time
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.logging import logger
from keras_dist.step.stopwatch import Stopwatch


class Timing(keras.callbacks.Callback):
    """Adds the time of training steps to the logs of each epoch, for `TensorBoard`, `CSVLogger` and the history.

    Put it before them in the list. The numbers are alike on all ranks:

    - `step_seconds`: seconds per step, the mean over steps and ranks;
    - `wait_seconds`: how many of these a rank waits for slower ones, the mean over steps and ranks. 0 in one process;
    - `examples_per_second`: of all ranks together. It is left out if the model has a `train_step` of its own without
      Keras's loss metric, which counts them.

    Only training steps are measured, with the reading of their data and the callbacks between them; not validation,
    nor what callbacks do at the end of an epoch. The first epoch has the tracing of the step in it.

    A rank measures how long it works from the end of one reduction of the gradients until its own gradients are there
    for the next one. The slowest rank's time minus its own is what it waits. These times travel with the gradients, so
    clocks are not compared and nothing is sent for it; the time of the network is not in it. Ranks that wait for each
    other elsewhere in a step, for the data (`data="chief"`) or for the denominator of a loss, don't show there.

    Attributes:
        by_rank: `{"step_seconds": ..., "wait_seconds": ...}` of each rank in the last epoch. The rank with the least
            waiting is the slow one. The log of the level info shows it too.

    Example:

    ```python
    model.fit(x, y, callbacks=[kd.callbacks.Timing(), keras.callbacks.TensorBoard("logs")])
    ```
    """

    async_safe = True  # its hooks only look at the clock

    def __init__(self) -> None:
        super().__init__()
        self.by_rank: list[dict[str, float]] = []
        self.backend: Backend | None = None  # `fit` of a distributed model sets both
        self.stopwatch: Stopwatch | None = None
        self._began: float | None = None
        self._ended = 0.0
        self._steps = 0
        self._examples: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.backend is not None:
            # On one rank only, it ends here, with both calls named.
            self.backend.all_gather_object("kd.callbacks.Timing")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._steps, self._examples = None, 0, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        known = self.params.get("steps") or batch + 1  # the last execution may be of fewer steps than the others
        self._ended = time.monotonic()
        self._steps = min(batch + 1, known)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._examples is None and self._steps:
            self._examples = _examples_seen(self.model)  # validation is about to reset the metrics

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._began is None:
            return
        examples = _examples_seen(self.model) if self._examples is None else self._examples
        waited = 0.0 if self.stopwatch is None else self.stopwatch.waited()
        own = {"step_seconds": (self._ended - self._began) / self._steps, "wait_seconds": waited / self._steps}
        self.by_rank = [own] if self.backend is None else self.backend.all_gather_object("kd.callbacks.Timing", own)
        means = {key: sum(times[key] for times in self.by_rank) / len(self.by_rank) for key in own}
        if examples is not None:
            means["examples_per_second"] = examples / (means["step_seconds"] * self._steps)
        if logs is not None:
            logs.update(means)
        logger().info("epoch %d: %s", epoch + 1, _described(self.by_rank))


def _examples_seen(model: keras.Model) -> float | None:
    """Returns how many examples all ranks have had in this epoch, as Keras's average of the loss has counted them."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return float(metric.count)
    return None


def _described(by_rank: list[dict[str, float]]) -> str:
    return "; ".join(
        f"rank {rank}: {times['step_seconds']:.3g} s a step, {times['wait_seconds']:.3g} s of it waiting"
        for rank, times in enumerate(by_rank)
    )
