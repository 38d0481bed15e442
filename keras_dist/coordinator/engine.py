"""Takes batches from Keras, lets workers compute on them, and hands the logs back: one engine for each model."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.backends.base import SEED_OFFSET
from keras_dist.backends.parameter_server import ParameterServer
from keras_dist.backends.ps_workers import Job
from keras_dist.coordinator.functions import Functions
from keras_dist.data import row_count, share_bounds

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
        self._concrete: dict[Any, Any] = {}
        self.waits = False  # for each step: the caller wants its logs

    def forget(self) -> None:
        """Drops what is under way."""
        self._under_way.clear()
        self._test_ahead = (None, collections.deque(), False)
        self._backend.workers.forget()

    # --- Training ---

    def train(self, iterator: Any) -> dict[str, Any]:
        """Makes one execution of Keras: `steps_per_execution` steps, or what is left."""
        step = self._train_async if self._backend.mode == "async" else self._train_sync
        spec = _spec_of(iterator)
        return self._execute(lambda batch: step(batch, spec), iterator)

    def _execute(self, step: Callable[[Any], dict[str, Any]], iterator: Any) -> dict[str, Any]:
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            logs = step(batch)
        return logs or {}

    def _train_sync(self, batch: Any, spec: Any) -> dict[str, Any]:
        functions = self._functions
        shares = [share for share in shares_of(_without_optionals(batch), self._size) if share.count]
        seeds, counts = self._seeds(), [share.count for share in shares]
        spec = None if spec is None else tf.nest.map_structure(_any_number, spec)
        args = [
            (share.data, tf.constant(share.count), tf.constant(share.total), _shifted(seeds, share.place))
            for share in shares
        ]
        outputs = self._on_workers("share", [(*own, []) for own in args], spec)
        if outputs[0]["denominators"]:
            # A loss that divides by more than the number of examples: once more, with what all divide by together.
            sums = [tf.add_n(parts) for parts in zip(*[output["denominators"] for output in outputs], strict=True)]
            outputs = self._on_workers("share", [(*own, sums) for own in args], spec)
        functions.apply([output["gradients"] for output in outputs], [output["statistics"] for output in outputs])
        self._keep_seeds(_shifted(outputs[0]["seeds"], -shares[0].place))
        logs = functions.count([output["metrics"] for output in outputs])
        return _mean_logs(outputs, counts) or logs

    def _train_async(self, batch: Any, spec: Any) -> dict[str, Any]:
        bound = self._backend.max_staleness
        # Of a window of w steps in a row, each sees at most 2 (w - 1) others: those begun before, and those after it.
        window = _AHEAD * self._size if bound is None else min(bound // 2 + 1, _AHEAD * self._size)
        self._drain(window - 1)
        self._number += 1
        seeds = _shifted(self._seeds(), self._number)
        self._under_way.append(self._submit("whole", (_without_optionals(batch), seeds), spec))
        if self.waits:
            self.drain()
        self._drain_finished()
        return self._logs or self._model.get_metrics_result()

    def drain(self) -> None:
        """Waits for all steps that are under way, and counts them."""
        self._drain(0)

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
        return self._execute(self._test_step, self._read_ahead(iterator))

    def _read_ahead(self, iterator: Any) -> Any:
        """Yields the jobs of batches; some are begun before they are asked for, so that all workers have some."""
        if self._test_ahead[0] is not iterator:
            self._test_ahead = (iterator, collections.deque(), False)
        spec = _spec_of(iterator)
        while True:
            _, jobs, has_ended = self._test_ahead
            while not has_ended and len(jobs) < _AHEAD * self._size:
                try:
                    batch = _without_optionals(next(iterator))
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
        batches = [_without_optionals(batch) for batch in batches]
        parts = [
            share.data for batch in batches for share in shares_of(batch, self._size) if share.count or not share.total
        ]
        spec = tf.nest.map_structure(_any_number, tf.nest.map_structure(_type_of, batches[0]))
        outputs = self._on_workers("predict", [(part, self._seeds()) for part in parts], spec)
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(_behind_one_another, *outputs)

    # --- Workers ---

    def _on_workers(self, name: str, args: Sequence[tuple[Any, ...]], spec: Any) -> list[Any]:
        jobs = [self._submit(name, own, spec) for own in args]
        return [self._result(job) for job in jobs]

    def _submit(self, name: str, args: tuple[Any, ...], spec: Any) -> Any:
        """Lets a worker run one of the functions.

        Args:
            name: Of the function.
            args: The data, and more.
            spec: What the function is traced for, `None` for these data.
        """
        function = getattr(self._functions, name)
        if self._model.run_eagerly:  # the user wants to see each operation: here
            return function(*args)
        spec = tf.nest.map_structure(_type_of, args[0]) if spec is None else spec
        key = name, str(spec), *map(len, args[-1:])
        if key not in self._concrete:
            rest = tf.nest.map_structure(_type_of, args[1:])
            self._concrete[key] = function.get_concrete_function(spec, *rest)
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


# --- Batches ---


@dataclasses.dataclass(frozen=True)
class _Part:
    data: Any
    place: int
    count: int
    total: int


def shares_of(batch: Any, size: int) -> list[_Part]:
    """Cuts a batch into as many shares, some of which may be empty."""
    total = int(row_count(batch))
    bounds = [share_bounds(total, place, size) for place in range(size)]
    parts = []
    for place, (start, stop) in enumerate(bounds):
        rows = functools.partial(_rows, start=start, stop=stop)
        parts.append(_Part(tf.nest.map_structure(rows, batch), place, stop - start, total))
    return parts


def _rows(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = [int(length) for length in leaf.dense_shape[1:]]
        return tf.sparse.slice(leaf, [start, *[0] * len(shape)], [stop - start, *shape])
    return leaf if leaf is None or leaf.shape.rank == 0 else leaf[start:stop]


def _spec_of(iterator: Any) -> Any:
    """What Keras would trace a step for; `None` where there is no data set."""
    spec = getattr(iterator, "element_spec", None)
    return None if spec is None else tf.nest.map_structure(_none_if_optional, spec)


def _none_if_optional(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _type_of(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(leaf)


def _any_number(spec: Any) -> Any:
    """The specification of a part of a batch."""
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return spec


def _without_optionals(batch: Any) -> Any:
    """Keras's data sets hold an empty `Optional` for `None`."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        composite = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if composite else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(convert, batch)


def _behind_one_another(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(list(parts), 0)
