"""Asynchronous steps: each worker computes on a whole batch, and doesn't wait for the others."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.backends.parameter_server.batches import spec_of, without_optionals
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.engine import AHEAD, Engine
from keras_dist.backends.parameter_server.exchange import Logs, Outputs
from keras_dist.backends.parameter_server.functions import Functions, shifted_seeds
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.workers import Job
from keras_dist.errors import NotSupportedError
from keras_dist.step.optimizer import parts_of


class AsyncEngine(Engine):
    """Trains in asynchronous steps."""

    def __init__(self, model: keras.Model, backend: Coordinator, functions: Functions) -> None:
        super().__init__(model, backend, functions)
        bound, self._window = backend.max_staleness, AHEAD * self._size
        self._is_bounded = bound is not None
        if bound is not None:
            # Of a window of w steps in a row, each sees at most 2 (w - 1) others: those begun before, and those after.
            self._window = min(bound // 2 + 1, self._window)
        self._begun = 0
        self._fed: collections.deque[Job] = collections.deque()  # steps under way, first to last
        self._pass: Pass | None = None  # its steps may be under way too
        self._logs: Logs = {}

    def _train_step(self, iterator: Any) -> Logs:
        """Begins a step, and counts those that are done. On a `Pass` it waits until one is."""
        if isinstance(iterator, Pass):
            self._pass = iterator
            return self._step_of_any_worker(iterator, self._begin_training)
        batch = without_optionals(next(iterator))
        self._count_fed(left=self._window - 1)
        self._fed.append(self._begin_training(batch, spec_of(iterator)))
        while self._fed and self._fed[0].done:
            self._count(self._fed.popleft())
        return self._logs or self._model.get_metrics_result()

    def _test_step(self, data: Pass) -> Logs:
        return self._step_of_any_worker(data, self._begin_test)

    def drain(self) -> None:
        self._count_fed(left=0)
        while self._pass is not None and self._pass.under_way:
            self._count_read(self._pass)

    def last_logs(self, logs: Any) -> Any:
        self.drain()
        last, self._logs = self._logs, {}
        return last or logs

    def forget(self) -> None:
        super().forget()
        self._fed.clear()
        self._pass = None

    def _begin_training(self, data: Any, spec: Any) -> Job:
        self._begun += 1
        seeds = shifted_seeds(self._functions.seeds(), self._begun)
        return self._submit(self._functions.train_whole, data, (seeds,), spec)

    def _step_of_any_worker(self, data: Pass, begin: Callable[[Any, Any], Job]) -> Logs:
        """Begins steps as long as there is room for them, and waits until another one is done."""
        while True:
            while len(data.under_way) < self._window and (shard := data.next_shard(AHEAD)) is not None:
                data.under_way[begin(shard.next_batch(), data.element_spec)] = shard
            if not data.under_way:
                raise StopIteration
            if self._count_read(data):
                return self._logs

    def _count_read(self, data: Pass) -> bool:
        """Waits for a step and counts it; False if the worker had no examples for it."""
        jobs = [*data.under_way]
        job = jobs[0] if self._is_bounded else self._workers.first_done(jobs)
        shard, output = data.under_way.pop(job), self._count(job)
        shard.has_ended = shard.has_ended or output is None
        if not isinstance(output, Outputs):
            return False
        data.done += 1
        return True

    def _count_fed(self, left: int) -> None:
        while len(self._fed) > left:
            self._count(self._fed.popleft())

    def _count(self, job: Job) -> Any:
        (output,) = self._results([job])
        if isinstance(output, Outputs):
            self._logs = self._functions.count(self._kind, [output])
        return output


def check_async(optimizer: Any) -> None:
    """Raises `NotSupportedError` for what workers can't do at the same time."""
    for part in parts_of(optimizer):
        if part.gradient_accumulation_steps:
            raise NotSupportedError(
                "Workers that don't wait for each other can't accumulate gradients in one place.",
                f"gradient_accumulation_steps={part.gradient_accumulation_steps} in mode='async'",
                "Leave it out, or use kd.ParameterServer(mode='sync').",
            )
