"""Asynchronous steps: each worker computes on a whole batch, and doesn't wait for the others."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.batches import spec_of, type_of, without_optionals
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.engine import AHEAD, Engine
from keras_dist.backends.parameter_server.exchange import Logs
from keras_dist.backends.parameter_server.functions import Functions, shifted_seeds
from keras_dist.backends.parameter_server.job import Job
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.shards import ShardBatch
from keras_dist.backends.parameter_server.steps import Done, RemoteSteps
from keras_dist.errors import NotSupportedError
from keras_dist.step.optimizer import parts_of


class AsyncEngine(Engine):
    """Trains in asynchronous steps."""

    def __init__(self, model: keras.Model, backend: Coordinator, functions: Functions) -> None:
        super().__init__(model, backend, functions)
        bound = backend.max_staleness
        # Of a window of w steps in a row, each sees at most 2 (w - 1) others: those begun before, and those after.
        self._window = None if bound is None else bound // 2 + 1
        self._journals = backend.variable_devices()[0]
        self._begun = 0
        self._fed: collections.deque[Job] = collections.deque()  # steps under way, first to last
        self._pass: Pass | None = None  # its steps may be under way too
        self._logs: Logs = {}

    def _train_step(self, iterator: Any) -> Logs:
        """Begins a step, and counts those that are done. On a `Pass` it waits until one is."""
        if isinstance(iterator, Pass):
            self._pass = iterator
            return self._step_of_any_worker(iterator, self._begin_training)
        batch, spec = without_optionals(next(iterator)), spec_of(iterator)
        most = AHEAD * self._size
        self._count_fed(left=(most if self._window is None else min(self._window, most)) - 1)
        (seeds,) = self._next_seeds(1)
        self._fed.append(self._submit(self._functions.train_whole, batch, (seeds,), spec))
        while self._fed and self._fed[0].done:
            self._count(self._fed.popleft())
        return self._logs or self._model.get_metrics_result()

    def _test_step(self, data: Pass) -> Logs:
        return self._step_of_any_worker(data, self._begin_tests_of)

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

    def _next_seeds(self, steps: int) -> list[Any]:
        """Returns the random states of the next steps that begin."""
        seeds, begun = self._functions.seeds(), self._begun
        self._begun += steps
        return [shifted_seeds(seeds, begun + step + 1) for step in range(steps)]

    def _begin_training(self, batch: ShardBatch, spec: Any) -> Job:
        return self._begin(self._functions.train_whole, batch, self._next_seeds(batch.count), spec)

    def _begin_tests_of(self, batch: ShardBatch, spec: Any) -> Job:
        return self._begin(self._functions.test_whole, batch, [self._functions.seeds()] * batch.count, spec)

    def _begin(self, function: Any, batch: ShardBatch, seeds: Sequence[Any], spec: Any) -> Job:
        """Lets a worker make steps on batches that it reads.

        Args:
            function: Makes a step.
            batch: The batches.
            seeds: The random states of each step.
            spec: The specification of a batch.
        """
        if self._model.run_eagerly:
            return self._submit(function, batch, (seeds[0],), spec)
        together = self._most > 1
        key = function, str(spec), together
        if key not in self._traced:
            types = (tf.nest.map_structure(type_of, seeds[0]),)
            device = self._journals if together and function == self._functions.train_whole else None
            self._traced[key] = RemoteSteps(function, spec, types, self._functions.resets, together, device)
        steps = self._traced[key]
        args = (tf.nest.map_structure(lambda *states: tf.stack(states), *seeds),)
        return self._workers.submit(Job(steps, (steps.next_call(), args), batch))

    def _step_of_any_worker(self, data: Pass, begin: Callable[[ShardBatch, Any], Job]) -> Logs:
        """Begins calls as long as there is room for them, and waits until another step is done."""
        data.asked += 1
        while data.done < data.asked:
            while (batch := data.next_batch(self._most, AHEAD, self._window)) is not None:
                data.under_way[begin(batch, data.element_spec)] = batch
            if not data.under_way:
                data.asked = data.done
                raise StopIteration
            self._count_read(data)
        return self._logs

    @property
    def _most(self) -> int:
        """How many steps a call may have: all workers together make an execution."""
        steps = 1 if self._model.run_eagerly else -(-self._model.steps_per_execution // self._size)
        return steps if self._window is None else min(steps, max(1, self._window // self._size))

    def _count_read(self, data: Pass) -> None:
        """Waits for a call, and counts its steps."""
        jobs = [*data.under_way]
        job = jobs[0] if self._window is not None else self._workers.first_done(jobs)
        shard, done = data.under_way.pop(job).shard, self._count(job)
        shard.has_ended = shard.has_ended or done.has_ended
        data.done += done.steps

    def _count_fed(self, left: int) -> None:
        while len(self._fed) > left:
            self._count(self._fed.popleft())

    def _count(self, job: Job) -> Done:
        (output,) = self._results([job])
        done = output if isinstance(output, Done) else Done.of(output)
        if done.outputs is not None:
            self._logs = self._functions.count(self._kind, [done.outputs])
        return done


def check_async(optimizer: Any) -> None:
    """Raises `NotSupportedError` for what workers can't do at the same time."""
    for part in parts_of(optimizer):
        if part.gradient_accumulation_steps:
            raise NotSupportedError(
                "Workers that don't wait for each other can't accumulate gradients in one place.",
                f"gradient_accumulation_steps={part.gradient_accumulation_steps} in mode='async'",
                "Leave it out, or use kd.ParameterServer(mode='sync').",
            )
