"""Runs on the workers what Keras asks for: an engine for each model.

In synchronous steps each worker computes on a share of a batch, and the numbers are those of one process. In
asynchronous steps each worker computes on a whole batch, and doesn't wait for the others.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server import exchange
from keras_dist.backends.parameter_server.coordinator import Coordinator, Job, RemoteFunction
from keras_dist.backends.parameter_server.exchange import Known, Logs, Outputs, spec_of, type_of, without_optionals
from keras_dist.backends.parameter_server.functions import Functions, shifted_seeds
from keras_dist.backends.parameter_server.shards import Done, Pass, RemoteSteps, ShardBatch, ShardReader
from keras_dist.data.shares import Share, any_batch_size, row_count
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.training.distributed import DistributedModel
from keras_dist.training.trial import as_tensors, batch_of_shares

AHEAD = 2  # calls for each worker that wait or run, so that none is idle
# Steps that are put into one asynchronous call, if no callback acts between them: more would gain little.
TOGETHER, CALL_SECONDS = 8, 0.1


class Batch(NamedTuple):
    """The batch of a synchronous step."""

    shares: dict[int, Share]  # by replica, without empty ones; one if all are empty
    spec: Any  # what the step is traced for
    data: Pass | None = None  # from which the workers read it


class Tried(NamedTuple):
    """A step that a verification tries out. The engine knows how."""

    read: Callable[[], list[Share]]  # returns the shares of the batch, one after the other
    run: Callable[[list[Any]], Any]  # makes it on the workers, exactly; takes a list as of `Step.applied`
    spec: Any  # what the step is traced for, `None` for these data


class SyncEngine:
    """Runs the steps of one model on the workers of a backend.

    A training step, a prediction and, if noise and statistics are `exact`, an evaluation step is on shares of a batch.
    Otherwise each worker evaluates whole batches.
    """

    def __init__(
        self, model: keras.Model, backend: Coordinator, distributed: DistributedModel, exact: bool = False
    ) -> None:
        self._model, self._backend, self._distributed = model, backend, distributed
        self._functions = Functions(model, backend, distributed, exact)
        self._workers = backend.workers
        self._size = backend.workers.size
        self._traced: dict[Any, Any] = {}
        self._reader = ShardReader()  # of what is read in this process
        self._tests: tuple[Any, Iterator[Job]] | None = None  # an iterator, and the calls on its batches
        self._runs = 1  # of each step
        self._exact: SyncEngine | None = None  # makes the steps that a verification tries out

    def train(self, iterator: Any) -> Logs:
        """Makes one execution of Keras: `steps_per_execution` training steps, or what is left."""
        return self._execute(lambda: self._train_step(iterator))

    def test(self, iterator: Any) -> Logs:
        if isinstance(iterator, Pass) or self._functions.is_exact:
            return self._execute(lambda: self._test_step(iterator))
        if self._tests is None or self._tests[0] is not iterator:
            self._tests = iterator, self._begin_tests(iterator)
        jobs = self._tests[1]
        return self._execute(lambda: self._finish_test(next(jobs)))

    def predict(self, batches: Sequence[Any]) -> Any:
        """Returns the predictions of some batches, in their order. They follow each other: each one draws numbers."""
        outputs: list[Share] = []
        for given in map(without_optionals, batches):
            batch = self._cut(given)
            self._look("predict", batch, lambda exact, _: batch_of_shares(exact.predict_on(batch)))  # noqa: B023
            outputs += self.predict_on(batch)
        return batch_of_shares(outputs)

    def trace_again(self, kind: str) -> None:
        """Forgets what was traced of the steps of a kind. Those that are under way are still made as they were."""
        functions = [getattr(self._functions, f"{kind}_{size}", None) for size in ("share", "whole")]
        self._traced = {key: traced for key, traced in self._traced.items() if key[0] not in functions}
        self._exact = None

    def drain(self) -> None:
        """Waits for the training steps that are under way, and counts them. Synchronous ones are done already."""

    def last_logs(self, logs: Any) -> Any:
        """Returns the logs of the last step, once all are done."""
        return logs

    def forget(self) -> None:
        """Drops what is under way."""
        self._tests = None
        self._workers.forget()

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

    # --- Steps on shares ---

    def _train_step(self, iterator: Any) -> Logs:
        batch = self._next_batch(iterator)
        self._look("train", batch, lambda exact, applied: exact.train_on(batch, applied))
        return self.train_on(batch)

    def train_on(self, batch: Batch, applied: list[Any] | None = None) -> Logs:
        """Applies the gradients of all shares once. `applied` is as of `Step.applied`, if the step is tried out."""
        functions = self._functions
        kept: tuple[Any, ...] = ()
        while True:
            outputs = self._compute(functions.train_share, batch, kept)
            values = functions.kept(len(kept))
            gradients = [output.gradients for output in outputs]
            if applied is not None:
                applied += functions.updates(len(kept), gradients)
            statistics = [output.statistics for output in outputs] if values is None else []
            functions.apply(len(kept), gradients, statistics)
            if values is None:
                return self._count("train", outputs, batch)
            # The step reads weights after it has applied gradients to them: it is run again, up to its next phase.
            kept = (*kept, values)

    def _test_step(self, data: Any) -> Logs:
        batch = self._next_batch(data)
        self._look("test", batch, lambda exact, _: exact.test_on(batch))
        return self.test_on(batch)

    def test_on(self, batch: Batch) -> Logs:
        return self._count("test", self._compute(self._functions.test_share, batch), batch)

    def predict_on(self, batch: Batch) -> list[Share]:
        outputs = self._compute(self._functions.predict_share, batch)
        self._functions.set_seeds(outputs[0].seeds)
        pairs = zip(batch.shares.values(), outputs, strict=True)
        return [share._replace(data=predicted.logs) for share, predicted in pairs]

    def _look(self, kind: str, batch: Batch, run: Callable[[SyncEngine, Any], Any]) -> None:
        """Verifies a step if it is one of the first, and keeps rows for the check that is on by default if it is due.

        `run` makes it by another engine, whose noise and statistics are exact. Its second argument is as of
        `Step.applied`.
        """
        distributed = self._distributed
        verification, rows = distributed.verifications.get(kind), distributed.first_rows.get(kind)
        has_rows = any(share.count for share in batch.shares.values())

        def run_exactly(applied: list[Any]) -> Any:
            self._exact = self._exact or SyncEngine(self._model, self._backend, distributed, exact=True)
            return run(self._exact, applied)

        if has_rows and verification is not None:
            step, total = getattr(self._model, f"{kind}_step"), next(iter(batch.shares.values())).total
            tried = Tried(lambda: self._read_shares(batch), run_exactly, None if kind == "predict" else batch.spec)
            verification.look(step, tried, tf.constant(total))
        if has_rows and rows is not None and rows.is_due:
            rows.keep(self._read_shares(batch))

    def _read_shares(self, batch: Batch) -> list[Share]:
        shares = [*batch.shares.values()]
        if batch.data is None:
            return shares
        datas = self._results([self._submit(as_tensors, share.data, (), batch.spec) for share in shares])  # as they are
        return [share._replace(data=data) for share, data in zip(shares, datas, strict=True)]

    def _next_batch(self, iterator: Any) -> Batch:
        spec = tf.nest.map_structure(any_batch_size, spec_of(iterator))
        if not isinstance(iterator, Pass):
            return self._cut(without_optionals(next(iterator)), spec)
        while True:
            self._read_ahead(iterator)
            if shares := iterator.shares(self._results([*iterator.reads.values()])):
                return Batch(shares, spec, iterator)

    def _cut(self, batch: Any, spec: Any = None) -> Batch:
        shares = exchange.cut(batch, self._size)
        filled = {index: share for index, share in enumerate(shares) if share.count} or {0: shares[0]}
        if spec is None:
            spec = tf.nest.map_structure(lambda leaf: any_batch_size(type_of(leaf)), shares[0].data)
        return Batch(filled, spec)

    def _compute(self, function: Any, batch: Batch, kept: tuple[Any, ...] = ()) -> list[Outputs]:
        """Lets the workers run a function on the shares. After it they read their next batches."""
        seeds, shares = self._functions.seeds(), batch.shares
        positions, start = [], 0
        for at, (index, share) in enumerate(shares.items()):
            positions.append(tf.constant((share.count, share.total, index, at, len(shares), start)))
            start += share.count

        def submit(known: Known) -> list[Job]:
            datas = zip(shares.values(), positions, strict=True)
            return [
                self._submit(function, share.data, (position, seeds, known), batch.spec) for share, position in datas
            ]

        def run(told: Sequence[Sequence[Any]]) -> list[Outputs]:
            jobs = submit(Known(exchange.of_all_shares(told), kept))
            if batch.data is not None:
                self._read_ahead(batch.data)
            return self._results(jobs)

        if len(shares) == 1:
            return run(())
        return self._agreed(self._told_by_data(function, batch, positions, (seeds, Known((), kept))), run)

    def _told_by_data(
        self, function: Any, batch: Batch, positions: Sequence[Any], args: tuple[Any, ...]
    ) -> Sequence[Sequence[Any]]:
        """Returns what the shares tell each other, if it depends on their data alone: weights and masks of losses.

        Otherwise nothing. It is computed where the data are.
        """
        shares = [share.data for share in batch.shares.values()]
        if self._model.run_eagerly:
            return ()
        tell = self._remote(function, shares[0], (positions[0], *args), batch.spec).tell
        if tell is None:
            return ()
        pairs = zip(shares, positions, strict=True)
        if batch.data is None:
            return [tell(*pair) for pair in pairs]
        return self._results([self._submit(tell, data, (position,), batch.spec) for data, position in pairs])

    def _agreed(self, told: Sequence[Sequence[Any]], run: Callable[[Any], list[Outputs]]) -> list[Outputs]:
        """Runs a step with what all shares have told before, again and again until they tell the same.

        What is told first does not depend on the others, what is told next depends at most on that, and so on: the i-th
        tensor is right after i runs, and one more run computes with all of them.
        """
        before, outputs, runs = told, run(told), 1
        told = [output.told for output in outputs]
        while runs <= len(told[0]) and (not before or exchange.first_change(told, before) is not None):
            before, outputs, runs = told, run(told), runs + 1
            told = [output.told for output in outputs]
        change = exchange.first_change(told, before) if before else None
        if change is not None and not exchange.is_rounding(*change):
            raise NotSupportedError(
                "With parameter servers a step is repeated until the shares of a batch agree on what they compute "
                "together (its statistics, the inputs of losses and layers that see all of it). This step computes "
                "something else each time.",
                f"a tensor of shape {change[0].shape} and type {change[0].dtype.name} that differs between two runs",
                "Draw random numbers by `keras.random` with a `keras.random.SeedGenerator`, whose state is repeated, "
                "not by `tf.random`. Or use a backend that reduces in the step: horovod, multi_worker, mirrored.",
            )
        if runs != self._runs:
            self._runs = runs
            logger().debug("a step is run %d times, since its shares tell each other %d tensors", runs, len(told[0]))
        return outputs

    def _read_ahead(self, data: Pass) -> None:
        """Lets the workers read their next batches, unless they do already. They answer as `ShardReader.run`."""
        if not data.reads:
            data.reads = {batch: self._submit(None, batch, (), None) for batch in data.next_batches()}

    def _count(self, kind: str, outputs: Sequence[Outputs], batch: Batch) -> Logs:
        self._functions.set_seeds(outputs[0].seeds)
        return self._functions.count(kind, outputs, [share.count for share in batch.shares.values()])

    # --- Evaluation of whole batches ---

    def _begin_tests(self, iterator: Any) -> Iterator[Job]:
        """Yields the calls on the batches of an evaluation. Some are begun ahead, so that all workers have some."""
        jobs: collections.deque[Job] = collections.deque()
        spec = spec_of(iterator)
        for batch in map(without_optionals, iterator):
            count = int(row_count(batch))
            whole = Batch({0: Share(batch, count, count, exchange.NO_FINGERPRINT)}, spec)
            self._look("test", whole, lambda exact, _: exact.test_whole(batch, spec))  # noqa: B023
            jobs.append(self._begin_test(batch, spec))
            if len(jobs) == AHEAD * self._size:
                yield jobs.popleft()
        yield from jobs
        self._tests = None

    def test_whole(self, batch: Any, spec: Any) -> Logs:
        return self._finish_test(self._begin_test(batch, spec))

    def _begin_test(self, data: Any, spec: Any) -> Job:
        return self._submit(self._functions.test_whole, data, (self._functions.seeds(),), spec)

    def _finish_test(self, job: Job) -> Logs:
        outputs = self._results([job])
        self._functions.set_seeds(outputs[0].seeds)
        return self._functions.count("test", outputs)

    # --- Calls ---

    def _submit(self, function: Any, data: Any, args: tuple[Any, ...], spec: Any) -> Job:
        """Lets a worker run one of `Functions`; in this process if the user wants to see each operation.

        `data` is its first argument, or the batch that the worker reads for it. It is traced once for each kind of
        data: for `spec`, or for these data if that is `None`. Without a function the batch is only read.
        """
        batch = data if isinstance(data, ShardBatch) else None
        if self._model.run_eagerly:
            value = function(data, *args) if batch is None else self._reader.run(batch, function, args)
            return Job(None, (), batch, value=value, done=True)
        if function is None:
            return self._workers.submit(Job(None, (), batch))
        remote = self._remote(function, data, args, spec)
        return self._workers.submit(Job(remote, args if batch else (data, *args), batch))

    def _remote(self, function: Any, data: Any, args: tuple[Any, ...], spec: Any) -> RemoteFunction:
        spec = tf.nest.map_structure(type_of, data) if spec is None else spec
        key = function, str(spec), str(tf.nest.map_structure(lambda _: 0, args))
        if key not in self._traced:
            types = [t.of_any_shape() if isinstance(t, Known) else t for t in tf.nest.map_structure(type_of, args)]
            self._traced[key] = RemoteFunction(function, spec, types)
        return self._traced[key]

    def _results(self, jobs: Sequence[Job]) -> list[Any]:
        return [self._workers.result(job) for job in jobs]


class AsyncEngine(SyncEngine):
    """In training each worker takes a whole batch and doesn't wait for the others; and in evaluations of a `Pass`."""

    def __init__(self, model: keras.Model, backend: Coordinator, distributed: DistributedModel) -> None:
        super().__init__(model, backend, distributed)
        bound = backend.options()["max_staleness"]
        # Of a window of w steps in a row, each sees at most 2 (w - 1) others: those begun before, and those after.
        self._window = None if bound is None else bound // 2 + 1
        self._begun = 0
        # What makes steps, first to last: "train" or "test", and what the workers read.
        self._under_way: dict[Job, tuple[str, Pass | None]] = {}
        self._logs: Logs = {}
        self._seconds: dict[str, float] = {}  # of the last step of each kind

    def _train_step(self, iterator: Any) -> Logs:
        """Begins a step, and counts those that are done. On a `Pass` it waits until one is."""
        if isinstance(iterator, Pass):
            return self._step_of_any_worker("train", iterator)
        batch, spec = without_optionals(next(iterator)), spec_of(iterator)
        most = AHEAD * self._size if self._window is None else min(self._window, AHEAD * self._size)
        while len(self._under_way) >= most:
            self._count_next()
        (seeds,) = self._next_seeds(1)
        self._under_way[self._submit(self._functions.train_whole, batch, (seeds,), spec)] = "train", None
        while self._under_way and next(iter(self._under_way)).done:
            self._count_next()
        return self._logs or self._model.get_metrics_result()

    def _test_step(self, data: Any) -> Logs:
        return self._step_of_any_worker("test", data) if isinstance(data, Pass) else super()._test_step(data)

    def drain(self) -> None:
        while self._under_way:
            self._count_next()

    def last_logs(self, logs: Any) -> Any:
        self.drain()
        last, self._logs = self._logs, {}
        return last or logs

    def forget(self) -> None:
        super().forget()
        self._under_way.clear()

    def _next_seeds(self, steps: int) -> list[Any]:
        seeds, begun = self._functions.seeds(), self._begun
        self._begun += steps
        return [shifted_seeds(seeds, begun + step + 1) for step in range(steps)]

    def _begin(self, kind: str, batch: ShardBatch, data: Pass) -> Job:
        """Lets a worker make steps on batches that it reads, each with its random states."""
        spec = data.element_spec
        trains, functions = kind == "train", self._functions
        function = functions.train_whole if trains else functions.test_whole
        seeds = self._next_seeds(batch.count) if trains else [functions.seeds()] * batch.count
        if self._model.run_eagerly:
            return self._submit(function, batch, (seeds[0],), spec)
        together = data.together or self._per_execution > 1
        key = function, str(spec), together
        if key not in self._traced:
            types = (tf.nest.map_structure(type_of, seeds[0]),)
            self._traced[key] = RemoteSteps(function, spec, types, functions.resets, together)
        args = (tf.nest.map_structure(lambda *states: tf.stack(states), *seeds),)
        return self._workers.submit(Job(self._traced[key], (args,), batch))

    def _step_of_any_worker(self, kind: str, data: Pass) -> Logs:
        """Begins calls as long as there is room for them, and waits until another step is done."""
        data.asked += 1
        while data.done < data.asked:
            begun = [job.batch for job in self._under_way if job.batch is not None]
            while (batch := data.next_batch(self._most(kind, data), AHEAD, self._window, begun)) is not None:
                self._under_way[self._begin(kind, batch, data)] = kind, data
                begun.append(batch)
            if not begun:
                data.asked = data.done
                raise StopIteration
            self._count_next()
        return self._logs

    def _most(self, kind: str, data: Pass) -> int:
        """How many steps a call may have."""
        steps = self._per_execution
        if data.together and kind in self._seconds:
            steps = max(steps, min(TOGETHER, int(CALL_SECONDS / self._seconds[kind])))
        return steps if self._window is None else min(steps, max(1, self._window // self._size))

    @property
    def _per_execution(self) -> int:
        """How many steps a worker makes, so that all together make an execution."""
        return 1 if self._model.run_eagerly else -(-self._model.steps_per_execution // self._size)

    def _count_next(self) -> None:
        """Waits until a call has ended, the first one if staleness is bounded, and counts its steps."""
        jobs = [*self._under_way]
        job = jobs[0] if self._window is not None else self._workers.first_done(jobs)
        kind, data = self._under_way.pop(job)
        (output,) = self._results([job])
        if not isinstance(output, Done):  # of one step: its outputs, 0 if there were no examples, `None` after the end
            is_step = isinstance(output, Outputs)
            output = Done(int(is_step), output is None, output if is_step else None)
        if data is not None and job.batch is not None:
            job.batch.shard.has_ended |= output.has_ended
            data.done += output.steps
            self._seconds[kind] = job.seconds / max(1, output.steps)
        if output.outputs is not None:
            self._logs = self._functions.count(kind, [output.outputs])
