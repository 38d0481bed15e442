"""Runs on the workers what Keras asks for: an engine for each model. It trains by `sync_engine` or `async_engine`."""

from __future__ import annotations

import abc
import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.batches import concatenated, cut, spec_of, type_of, without_optionals
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.exchange import Known, Logs
from keras_dist.backends.parameter_server.functions import Functions, shifted_seeds
from keras_dist.backends.parameter_server.job import Job
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.remote import RemoteFunction
from keras_dist.backends.parameter_server.shards import ShardBatch, ShardReader
from keras_dist.data.shares import any_batch_size

AHEAD = 2  # calls for each worker that wait or run, so that none is idle


class Engine(abc.ABC):
    """Runs the steps of one model.

    Args:
        model: The model.
        backend: Whose workers compute.
        functions: What is traced for the model.
    """

    def __init__(self, model: keras.Model, backend: Coordinator, functions: Functions) -> None:
        self._model = model
        self._functions = functions
        self._workers = backend.workers
        self._size = backend.workers.size
        self._traced: dict[Any, Any] = {}
        self._reader = ShardReader()  # of what is read in this process
        self._streams = itertools.count()  # of random numbers, one for each share that is predicted
        self._tests: tuple[Any, Iterator[Job]] | None = None  # an iterator, and the calls on its batches
        self._kind = "train"  # of the steps that run: "train" or "test"
        self.waits = False  # for each step: the caller wants its logs

    def train(self, iterator: Any) -> Logs:
        """Makes one execution of Keras: `steps_per_execution` training steps, or what is left."""
        self._kind = "train"
        logs = self._execute(lambda: self._train_step(iterator))
        return self.last_logs(logs) if self.waits else logs

    def test(self, iterator: Any) -> Logs:
        """Makes one execution of an evaluation."""
        self._kind = "test"
        if isinstance(iterator, Pass):
            return self._execute(lambda: self._test_step(iterator))
        if self._tests is None or self._tests[0] is not iterator:
            self._tests = iterator, self._begin_tests(iterator)
        jobs = self._tests[1]
        return self._execute(lambda: self._finish_test(next(jobs)))

    def predict(self, batches: Sequence[Any]) -> Any:
        """Returns the predictions of some batches, in their order: each worker computes a share of each."""
        batches = [without_optionals(batch) for batch in batches]
        shares = [share for batch in batches for share in cut(batch, self._size) if share.count or not share.total]
        spec = tf.nest.map_structure(any_batch_size, tf.nest.map_structure(type_of, batches[0]))
        seeds = self._functions.seeds()
        jobs = [
            self._submit(self._functions.predict, share.data, (shifted_seeds(seeds, next(self._streams)),), spec)
            for share in shares
        ]
        outputs = self._results(jobs)
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(concatenated, *outputs)

    def drain(self) -> None:  # noqa: B027 - synchronous steps are done when they return
        """Waits for the training steps that are under way, and counts them."""

    def last_logs(self, logs: Any) -> Any:
        """Returns the logs of the last step, once all are done."""
        return logs

    def forget(self) -> None:
        """Drops what is under way."""
        self._tests = None
        self._workers.forget()

    @abc.abstractmethod
    def _train_step(self, iterator: Any) -> Logs:
        """Makes a training step on the next batch, or on the next batches of a `Pass`."""

    @abc.abstractmethod
    def _test_step(self, data: Pass) -> Logs:
        """Makes an evaluation step on the next batches of a `Pass`."""

    def _execute(self, step: Callable[[], Logs]) -> Logs:
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                logs = step()
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
        return logs or {}

    def _begin_tests(self, iterator: Any) -> Iterator[Job]:
        """Yields the calls on the batches of an evaluation. Some are begun ahead, so that all workers have some."""
        jobs: collections.deque[Job] = collections.deque()
        spec = spec_of(iterator)
        for batch in map(without_optionals, iterator):
            self._verify_test(batch, spec)
            jobs.append(self._begin_test(batch, spec))
            if len(jobs) == AHEAD * self._size:
                yield jobs.popleft()
        yield from jobs
        self._tests = None

    def test_whole(self, batch: Any, spec: Any) -> Logs:
        """Makes an evaluation step on a whole batch."""
        return self._finish_test(self._begin_test(batch, spec))

    def _begin_test(self, data: Any, spec: Any) -> Job:
        return self._submit(self._functions.test_whole, data, (self._functions.seeds(),), spec)

    def _verify_test(self, batch: Any, spec: Any) -> None:  # noqa: B027 - asynchronous steps are not verified
        """Verifies an evaluation step on a whole batch if it is one of the first."""

    def _finish_test(self, job: Job) -> Logs:
        outputs = self._results([job])
        self._functions.set_seeds(outputs[0].seeds)
        return self._functions.count("test", outputs)

    # --- Calls on the workers ---

    def _submit(self, function: Any, data: Any, args: tuple[Any, ...], spec: Any) -> Job:
        """Lets a worker run a function; in this process if the user wants to see each operation.

        Args:
            function: One of `Functions`. It is traced once for each kind of data.
            data: Its first argument, or the batch that the worker reads for it.
            args: The other arguments.
            spec: What the function is traced for, `None` for these data.
        """
        batch = data if isinstance(data, ShardBatch) else None
        if self._model.run_eagerly:
            value = function(data, *args) if batch is None else self._reader.run(batch, function, args)
            return Job(None, (), value=value, done=True)
        spec = tf.nest.map_structure(type_of, data) if spec is None else spec
        key = function, str(spec), str(tf.nest.map_structure(lambda _: 0, args))
        if key not in self._traced:
            types = [t.of_any_shape() if isinstance(t, Known) else t for t in tf.nest.map_structure(type_of, args)]
            self._traced[key] = RemoteFunction(function, spec, types)
        return self._workers.submit(Job(self._traced[key], args if batch else (data, *args), batch))

    def _read(self, batch: ShardBatch) -> Job:
        """Lets a worker read a batch. The result is the number of examples, `None` after the last batch."""
        if self._model.run_eagerly:
            return Job(None, (), value=self._reader.run(batch, None, ()), done=True)
        return self._workers.submit(Job(None, (), batch))

    def _results(self, jobs: Sequence[Job]) -> list[Any]:
        return [self._result(job) for job in jobs]

    def _result(self, job: Job) -> Any:
        sent = self._workers.result(job)
        return sent if job.function is None else job.function.results(sent)
