"""A callback that measures how long steps take, and how long each rank waits for the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.logging import logger
from keras_dist.state.weights import Loss, loss_of
from keras_dist.step.step import Stopwatch


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

    Args:
        log_dir: Where the chief writes, for TensorBoard, the numbers of each rank after each epoch: `step_seconds`,
            `wait_seconds`, and the `loss` and `examples_per_second` of its own shares. Each rank is a run of its
            own, `rank-0`, `rank-1`, ..., so each chart has a line for each rank. By default nothing is written. It
            may be the `log_dir` of `keras.callbacks.TensorBoard`.

    Attributes:
        by_rank: List with a dict of these numbers for each rank, from the last epoch. The rank with the least waiting
            is the slowest. It is also logged at level info. Without Keras's loss metric, `loss` and
            `examples_per_second` are missing.

    Example:

    ```python
    model.fit(x, y, callbacks=[kd.callbacks.Timing("logs"), keras.callbacks.TensorBoard("logs")])
    ```
    """

    async_safe = True  # its batch hooks only read the clock

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.by_rank: list[dict[str, float]] = []
        self.backend: Backend | None = None  # a distributed `fit` sets this, and the next two
        self.stopwatch: Stopwatch | None = None
        self.loss_of_rank: Callable[[], Loss | None] | None = None
        self._log_dir = None if log_dir is None else os.fspath(log_dir)  # perhaps `gs://bucket/logs`, which is no Path
        self._writers: list[Any] = []
        self._began: float | None = None
        self._ended = 0.0
        self._steps = 0
        self._loss: Loss | None = None

    @property
    def event_folders(self) -> list[Path]:
        """Where the chief writes event files."""
        return [] if self._log_dir is None else sorted(Path(self._log_dir).glob("rank-*"))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.backend is not None:
            self.backend.all_gather_object("kd.callbacks.Timing")  # raises an error if another rank lacks the callback

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._steps, self._loss = None, 0, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        known = self.params.get("steps") or batch + 1  # the last execution may have fewer steps
        self._ended = time.monotonic()
        self._steps = min(batch + 1, known)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._loss is None and self._steps:
            self._loss = loss_of(self.model)  # before validation resets the metrics

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._began is None:
            return
        seconds, loss = self._ended - self._began, loss_of(self.model) if self._loss is None else self._loss
        waited = 0.0 if self.stopwatch is None else self.stopwatch.waited()
        times = {"step_seconds": seconds / self._steps, "wait_seconds": waited / self._steps}
        own = loss if self.loss_of_rank is None else self.loss_of_rank()
        of_share = {} if own is None else {"loss": own.mean, "examples_per_second": own.examples / seconds}
        own_numbers = {**times, **of_share}
        call = "kd.callbacks.Timing"
        self.by_rank = [own_numbers] if self.backend is None else self.backend.all_gather_object(call, own_numbers)
        means = {key: sum(each[key] for each in self.by_rank) / len(self.by_rank) for key in times}
        if loss is not None:
            means["examples_per_second"] = loss.examples / (means["step_seconds"] * self._steps)
        if logs is not None:
            logs.update(means)
        described = "; ".join(
            f"rank {rank}: {each['step_seconds']:.3g} s per step, {each['wait_seconds']:.3g} s of it waiting"
            for rank, each in enumerate(self.by_rank)
        )
        logger().info("epoch %d: %s", epoch + 1, described)
        if self._log_dir is not None and (self.backend is None or self.backend.topology.is_chief):
            self._write(self._log_dir, epoch)

    def _write(self, log_dir: str, epoch: int) -> None:
        for rank, numbers in enumerate(self.by_rank):
            if rank == len(self._writers):
                self._writers.append(tf.summary.create_file_writer(os.path.join(log_dir, f"rank-{rank}")))
            with self._writers[rank].as_default(epoch):
                for name, number in numbers.items():
                    tf.summary.scalar(f"ranks/{name}", number)
            self._writers[rank].flush()

    def on_train_end(self, logs: Any = None) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []
