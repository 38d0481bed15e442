"""Synchronous steps: each worker computes on a share of a batch, and the numbers are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.batches import concatenated, cut, spec_of, without_optionals
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.engine import Engine
from keras_dist.backends.parameter_server.exchange import Known, Logs, Outputs, check_repeats, is_same, of_all_shares
from keras_dist.backends.parameter_server.functions import Functions
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.workers import Job
from keras_dist.data.shares import Share, any_batch_size
from keras_dist.logging import logger


class SyncEngine(Engine):
    """Trains in synchronous steps."""

    def __init__(self, model: keras.Model, backend: Coordinator, functions: Functions) -> None:
        super().__init__(model, backend, functions)
        self._runs = 1  # of each step

    def _train_step(self, iterator: Any) -> Logs:
        """The workers compute the gradients of their shares. The sums are applied once."""
        functions, shares = self._functions, self._next_shares(iterator)
        kept: tuple[Any, ...] = ()
        outputs = self._compute(functions.train_share, shares, iterator, kept)
        while not functions.is_last(len(kept)):
            # The step reads weights after it has applied gradients to them: it is run again, up to its next phase.
            values = functions.kept(len(kept))
            functions.apply(len(kept), [output.gradients for output in outputs], [])
            kept = (*kept, values)
            outputs = self._compute(functions.train_share, shares, iterator, kept)
        gradients, statistics = [output.gradients for output in outputs], [output.statistics for output in outputs]
        functions.apply(len(kept), gradients, statistics)
        return self._count(outputs, shares)

    def test(self, iterator: Any) -> Logs:
        if not self._functions.is_exact:
            return super().test(iterator)
        self._kind = "test"
        return self._execute(lambda: self._test_step(iterator))

    def _test_step(self, data: Any) -> Logs:
        shares = self._next_shares(data)
        return self._count(self._compute(self._functions.test_share, shares, data, ()), shares)

    def predict(self, batches: Sequence[Any]) -> Any:
        """If the numbers are exactly those of one process, batches follow each other, since each one draws some."""
        if not self._functions.is_exact:
            return super().predict(batches)
        outputs: list[Any] = []
        for batch in map(without_optionals, batches):
            shares = {index: share for index, share in enumerate(cut(batch, self._size)) if share.count}
            if not shares:
                return super().predict(batches)
            parts = self._compute(self._functions.predict_share, shares, None, ())
            self._functions.set_seeds(parts[0].seeds)
            outputs += [part.logs for part in parts]
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(concatenated, *outputs)

    def _next_shares(self, iterator: Any) -> dict[int, Share]:
        """Returns the shares of the next step, by replica; none of them is empty."""
        if not isinstance(iterator, Pass):
            shares = cut(without_optionals(next(iterator)), self._size)
            return {index: share for index, share in enumerate(shares) if share.count}
        while True:
            self._read_ahead(iterator)
            if shares_read := iterator.shares(self._results([*iterator.reads.values()])):
                return shares_read

    def _compute(self, function: Any, shares: dict[int, Share], iterator: Any, kept: tuple[Any, ...]) -> list[Outputs]:
        """Lets the workers run a function on the shares. After it they read their next batches."""
        seeds, spec = self._functions.seeds(), spec_of(iterator)
        spec = None if spec is None else tf.nest.map_structure(any_batch_size, spec)
        starts = itertools.accumulate((share.count for share in shares.values()), initial=0)
        positions = {
            index: (share.count, share.total, index, at, len(shares), start)
            for at, (index, share), start in zip(itertools.count(), shares.items(), starts, strict=False)
        }
        arguments = {index: (tuple(map(tf.constant, position)), seeds) for index, position in positions.items()}

        def submit(known: Known) -> list[Job]:
            return [
                self._submit(function, share.data, (*arguments[index], known), spec) for index, share in shares.items()
            ]

        jobs = submit(Known((), kept))
        if isinstance(iterator, Pass):
            self._read_ahead(iterator)
        outputs: list[Outputs] = self._results(jobs)
        if len(shares) == 1 or not outputs[0].told:
            return outputs
        return self._repeat(outputs, lambda gathered: self._results(submit(Known(gathered, kept))))

    def _repeat(self, outputs: list[Outputs], run: Callable[[tuple[Any, ...]], list[Outputs]]) -> list[Outputs]:
        """Runs a step again with what all shares have told in the run before, until they tell the same again.

        What is told first does not depend on the others, what is told next depends at most on that, and so on: the i-th
        tensor is right after i runs, and one more run computes with all of them.
        """
        runs, most = 1, 1 + len(outputs[0].told)
        told = before = [output.told for output in outputs]
        while runs < most and (runs == 1 or not is_same(told, before)):
            outputs, runs = run(of_all_shares(told)), runs + 1
            told, before = [output.told for output in outputs], told
        check_repeats(told, before)
        if runs != self._runs:
            self._runs = runs
            logger().debug("a step is run %d times, since its shares tell each other %d tensors", runs, most - 1)
        return outputs

    def _read_ahead(self, data: Pass) -> None:
        """Lets the workers read their next batches, unless they do already."""
        if not data.reads:
            data.reads = {batch: self._read(batch) for batch in data.next_batches()}

    def _count(self, outputs: Sequence[Outputs], shares: dict[int, Share]) -> Logs:
        self._functions.set_seeds(outputs[0].seeds)
        return self._functions.count(self._kind, outputs, [share.count for share in shares.values()])
