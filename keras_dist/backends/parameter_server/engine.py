"""Takes batches from Keras, lets workers compute on them, and hands the logs back: one engine for each model."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.backends.parameter_server.batches import (
    Share,
    concatenated,
    in_parts,
    shares_of,
    spec_of,
    type_of,
    without_optionals,
)
from keras_dist.backends.parameter_server.functions import Functions
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.worker_data import END, Batch, Held
from keras_dist.backends.parameter_server.workers import Job
from keras_dist.comm.backend import SEED_OFFSET
from keras_dist.data.shares import Shares, any_number

if TYPE_CHECKING:
    from keras_dist.backends.parameter_server.backend import ParameterServer

_AHEAD = 2  # functions for each worker that may wait or run, so that none is idle


class Engine:
    """Runs the steps of one model.

    Args:
        model: The model.
        backend: Who computes.
        functions: What is traced for the model.
    """

    def __init__(self, model: keras.Model, backend: ParameterServer, functions: Functions) -> None:
        self._model = model
        self._backend = backend
        self._functions = functions
        self._size = backend.workers.size
        self._under_way: collections.deque[Any] = collections.deque()  # jobs of asynchronous steps, first to last
        self._logs: dict[str, Any] = {}
        self._number = 0
        self._test_ahead: tuple[Any, collections.deque[Any], bool] = (None, collections.deque(), False)
        self._pass: Pass | None = None  # of asynchronous steps, some of which may be under way
        self._held = Held()  # what is read here, where the user wants to see each operation
        self._concrete: dict[Any, Any] = {}
        self.waits = False  # for each step: the caller wants its logs

    def forget(self) -> None:
        """Drops what is under way."""
        self._under_way.clear()
        self._pass = None
        self._test_ahead = (None, collections.deque(), False)
        self._backend.workers.forget()

    # --- Training ---

    def train(self, iterator: Any) -> dict[str, Any]:
        """Makes one execution of Keras: `steps_per_execution` steps, or what is left."""
        if isinstance(iterator, Pass):
            return self._execute(lambda: self._train_pass(iterator))
        step, spec = self._train_async if self._backend.mode == "async" else self._train_sync, spec_of(iterator)
        return self._execute(lambda: step(next(iterator), spec))

    def _execute(self, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                logs = step()
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
        return logs or {}

    def _train_sync(self, batch: Any, spec: Any) -> dict[str, Any]:
        batch = without_optionals(batch)
        return self._train_shares(in_parts(batch) if isinstance(batch, Shares) else shares_of(batch, self._size), spec)

    def _train_shares(
        self, shares: Sequence[Share], spec: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        functions = self._functions
        before: list[Any] = []  # of a step that goes on after gradients were applied: for each part of it
        outputs, shares = self._on_shares("share", shares, spec, meanwhile, before)
        while not functions.is_last(len(before)):
            kept = functions.kept(len(before))
            functions.apply(len(before), [output["gradients"] for output in outputs], [])
            before.append(kept)
            outputs, shares = self._on_shares("share", shares, spec, lambda: None, before)
        gradients, statistics = ([output[key] for output in outputs] for key in ("gradients", "statistics"))
        functions.apply(len(before), gradients, statistics)
        return self._counted(outputs, shares)

    def _on_shares(
        self, name: str, shares: Sequence[Share], spec: Any, meanwhile: Callable[[], None], *more: Any
    ) -> tuple[list[Any], list[Share]]:
        """Runs a function on the shares of one batch; returns what came out, and of which shares."""
        shares, seeds = [share for share in shares if share.count], self._seeds()
        spec = None if spec is None else tf.nest.map_structure(any_number, spec)
        args = [
            (share.data, tf.constant(share.count), tf.constant(share.total), _shifted(seeds, share.place))
            for share in shares
        ]
        outputs = self._on_workers(name, [(*own, [], *more) for own in args], spec, meanwhile)
        if outputs[0]["denominators"]:
            # A loss that divides by more than the number of examples: once more, with what all divide by together.
            sums = [tf.add_n(parts) for parts in zip(*[output["denominators"] for output in outputs], strict=True)]
            outputs = self._on_workers(name, [(*own, sums, *more) for own in args], spec)
        return outputs, shares

    def _counted(self, outputs: Sequence[Any], shares: Sequence[Share]) -> dict[str, Any]:
        self._keep_seeds(_shifted(outputs[0]["seeds"], -shares[0].place))
        logs = self._functions.count([output["metrics"] for output in outputs])
        return _mean_logs(outputs, [share.count for share in shares]) or logs

    @property
    def _window(self) -> int:
        """How many asynchronous steps may be under way."""
        bound = self._backend.max_staleness
        # Of a window of w steps in a row, each sees at most 2 (w - 1) others: those begun before, and those after it.
        return _AHEAD * self._size if bound is None else min(bound // 2 + 1, _AHEAD * self._size)

    def _train_async(self, batch: Any, spec: Any) -> dict[str, Any]:
        self._drain(self._window - 1)
        self._number += 1
        seeds = _shifted(self._seeds(), self._number)
        self._under_way.append(self._submit("whole", (without_optionals(batch), seeds), spec))
        if self.waits:
            self.drain()
        self._drain_finished()
        return self._logs or self._model.get_metrics_result()

    def drain(self) -> None:
        """Waits for all steps that are under way, and counts them."""
        self._drain(0)
        while self._pass is not None and self._pass.jobs:
            self._count_next(self._pass)

    def _drain(self, left: int) -> None:
        while len(self._under_way) > left:
            self._count(self._result(self._under_way.popleft()))

    def _drain_finished(self) -> None:
        while self._under_way and isinstance(self._under_way[0], Job) and self._under_way[0].done:
            self._count(self._result(self._under_way.popleft()))

    def _count(self, output: Any) -> None:
        logs = self._functions.count([output["metrics"]])
        self._logs = _mean_logs([output], [1]) or logs

    def last_logs(self, logs: Any) -> Any:
        """Returns the logs of the last step, once all are done."""
        self.drain()
        last, self._logs = self._logs, {}
        return last or logs

    # --- Evaluation and prediction ---

    def test(self, iterator: Any) -> dict[str, Any]:
        """Makes one execution of an evaluation."""
        if isinstance(iterator, Pass):
            return self._execute(lambda: self._test_pass(iterator))
        jobs = self._read_ahead(iterator)
        return self._execute(lambda: self._test_step(next(jobs)))

    def _read_ahead(self, iterator: Any) -> Any:
        """Yields the jobs of batches; some are begun before they are asked for, so that all workers have some."""
        if self._test_ahead[0] is not iterator:
            self._test_ahead = (iterator, collections.deque(), False)
        spec = spec_of(iterator)
        while True:
            _, jobs, has_ended = self._test_ahead
            while not has_ended and len(jobs) < _AHEAD * self._size:
                try:
                    batch = without_optionals(next(iterator))
                except (StopIteration, tf.errors.OutOfRangeError):
                    has_ended = True
                    self._test_ahead = (iterator, jobs, True)
                else:
                    jobs.append(self._submit("test", (batch, self._seeds()), spec))
            if not jobs:
                self._test_ahead = (None, collections.deque(), False)
                return
            yield jobs.popleft()

    def _test_step(self, job: Any) -> dict[str, Any]:
        output = self._result(job)
        self._keep_seeds(output["seeds"])
        logs = self._functions.count([output["metrics"]])
        return _mean_logs([output], [1]) or logs

    def predict(self, batches: Sequence[Any]) -> Any:
        """Returns the predictions of some batches, in their order: each worker computes a part of each."""
        batches = [without_optionals(batch) for batch in batches]
        parts = [
            share.data for batch in batches for share in shares_of(batch, self._size) if share.count or not share.total
        ]
        spec = tf.nest.map_structure(any_number, tf.nest.map_structure(type_of, batches[0]))
        outputs = self._on_workers("predict", [(part, self._seeds()) for part in parts], spec)
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(concatenated, *outputs)

    # --- Data that workers read ---

    def _train_pass(self, data: Pass) -> dict[str, Any]:
        if self._backend.mode == "sync":
            shares = self._next_of_all(data)
            return self._train_shares(shares, data.element_spec, lambda: data.read(self._read))
        self._pass = data
        return self._step_of_one("whole", data)

    def _test_pass(self, data: Pass) -> dict[str, Any]:
        if self._backend.mode == "sync":
            shares = self._next_of_all(data)
            return self._counted(
                *self._on_shares("test_share", shares, data.element_spec, lambda: data.read(self._read))
            )
        return self._step_of_one("test", data)

    def _next_of_all(self, data: Pass) -> list[Share]:
        """Returns one batch of each worker. The next ones are to be read while these are computed on."""
        while True:
            if not data.counts:
                data.read(self._read)
            shares = data.shares([self._result(count) for count in data.counts])
            if any(share.count for share in shares):
                return shares

    def _step_of_one(self, name: str, data: Pass) -> dict[str, Any]:
        """Returns the logs once another step on a batch of a single worker is done; others are begun meanwhile."""
        while True:
            while len(data.jobs) < self._window and (lane := data.next_lane(_AHEAD)) is not None:
                self._number += 1
                seeds = self._seeds() if name == "test" else _shifted(self._seeds(), self._number)
                data.jobs.append((lane, self._submit(name, (lane.next(), seeds), data.element_spec)))
            if not data.jobs:
                raise StopIteration
            if (logs := self._count_next(data)) is not None:
                return logs

    def _count_next(self, data: Pass) -> dict[str, Any] | None:
        """Counts a step that is done; `None` if the worker had no examples for it."""
        jobs = [job for _, job in data.jobs]
        in_order = self._backend.max_staleness is not None or not isinstance(jobs[0], Job)
        job = jobs[0] if in_order else self._backend.workers.first_done(jobs)
        lane, output = data.pop(job), self._result(job)
        if not isinstance(output, dict):
            lane.has_ended = lane.has_ended or output == END
            return None
        data.done += 1
        self._count(output)
        return self._logs

    def _read(self, batch: Batch) -> Any:
        if self._model.run_eagerly:
            return self._held.run(batch, None, ())
        return self._backend.workers.submit(None, batch=batch)

    # --- Workers ---

    def _on_workers(
        self, name: str, args: Sequence[tuple[Any, ...]], spec: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        jobs = [self._submit(name, own, spec) for own in args]
        meanwhile()
        return [self._result(job) for job in jobs]

    def _submit(self, name: str, args: tuple[Any, ...], spec: Any) -> Any:
        """Lets a worker run one of the functions.

        Args:
            name: Of the function.
            args: The data, or which batch of its own a worker reads, and more.
            spec: What the function is traced for, `None` for these data.
        """
        function, batch = getattr(self._functions, name), args[0] if isinstance(args[0], Batch) else None
        if self._model.run_eagerly:  # the user wants to see each operation: here
            return function(*args) if batch is None else self._held.run(batch, function, args[1:])
        spec = tf.nest.map_structure(type_of, args[0]) if spec is None else spec
        key = name, str(spec), str(tf.nest.map_structure(lambda _: 0, args[1:]))
        if key not in self._concrete:
            rest = tf.nest.map_structure(type_of, args[1:])
            self._concrete[key] = function.get_concrete_function(spec, *rest)
        if batch is not None:
            return self._backend.workers.submit(self._concrete[key], *args[1:], batch=batch)
        return self._backend.workers.submit(self._concrete[key], *args)

    def _result(self, job: Any) -> Any:
        return self._backend.workers.result(job) if isinstance(job, Job) else job

    def _seeds(self) -> list[Any]:
        return [tf.convert_to_tensor(seed.value) for seed in self._functions.seeds]

    def _keep_seeds(self, values: Sequence[Any]) -> None:
        for seed, value in zip(self._functions.seeds, values, strict=True):
            seed.assign(value)


def _shifted(seeds: Sequence[Any], place: int) -> list[Any]:
    """Returns other random streams, alike whenever the place is."""
    return [tf.constant((np.asarray(seed).astype(np.int64) + [place * SEED_OFFSET, 0]).astype(seed.dtype.name))
            for seed in seeds]  # fmt: skip


def _mean_logs(outputs: Sequence[Any], counts: Sequence[int]) -> dict[str, Any]:
    """Returns the mean of logs that a step made up itself; empty if they are the metrics."""
    total = sum(counts)
    return {
        key: sum(output["logs"][key] * count for output, count in zip(outputs, counts, strict=True)) / total
        for key in outputs[0]["logs"]
    }
