"""Synchronous steps: each worker computes on a share of a batch, and the numbers are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.batches import (
    NO_FINGERPRINT,
    concatenated,
    cut,
    spec_of,
    type_of,
    whole_of,
    without_optionals,
)
from keras_dist.backends.parameter_server.coordinator import Coordinator
from keras_dist.backends.parameter_server.engine import Engine
from keras_dist.backends.parameter_server.exchange import (
    MOST_TOLD,
    Known,
    Logs,
    Outputs,
    check_repeats,
    is_same,
    of_all_shares,
)
from keras_dist.backends.parameter_server.functions import Functions
from keras_dist.backends.parameter_server.job import Job
from keras_dist.backends.parameter_server.reading import Pass
from keras_dist.backends.parameter_server.shards import ShardBatch
from keras_dist.backends.parameter_server.strategy import Tried
from keras_dist.data.shares import Share, any_batch_size, row_count
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.training.verification import NotComparable, Verification


class SyncEngine(Engine):
    """Trains in synchronous steps."""

    def __init__(self, model: keras.Model, backend: Coordinator, functions: Functions) -> None:
        super().__init__(model, backend, functions)
        self._runs = 1  # of each step
        self._backend = backend
        self._exact: SyncEngine | None = None  # makes the steps that a verification tries out

    def _train_step(self, iterator: Any) -> Logs:
        shares, spec = self._next_shares(iterator), _share_spec(iterator)
        self._verify("train", shares, spec, lambda exact, applied: exact.train_on(shares, iterator, applied))
        self._keep_first_rows("train", shares, spec)
        return self.train_on(shares, iterator)

    def train_on(self, shares: dict[int, Share], iterator: Any, applied: list[Any] | None = None) -> Logs:
        """The workers compute the gradients of their shares. The sums are applied once.

        Args:
            shares: Of the batch, by replica.
            iterator: They are from it.
            applied: As of `Step.applied`, if the step is tried out.
        """
        functions = self._functions
        kept: tuple[Any, ...] = ()
        outputs = self._compute(functions.train_share, shares, iterator, kept)
        while not functions.is_last(len(kept)):
            # The step reads weights after it has applied gradients to them: it is run again, up to its next phase.
            values = functions.kept(len(kept))
            self._apply(len(kept), outputs, [], applied)
            kept = (*kept, values)
            outputs = self._compute(functions.train_share, shares, iterator, kept)
        self._apply(len(kept), outputs, [output.statistics for output in outputs], applied)
        return self._count("train", outputs, shares)

    def _apply(
        self, phase: int, outputs: Sequence[Outputs], statistics: Sequence[Any], applied: list[Any] | None
    ) -> None:
        gradients = [output.gradients for output in outputs]
        if applied is not None:
            applied += self._functions.updates(phase, gradients)
        self._functions.apply(phase, gradients, statistics)

    def test(self, iterator: Any) -> Logs:
        if not self._functions.is_exact:
            return super().test(iterator)
        self._kind = "test"
        return self._execute(lambda: self._test_step(iterator))

    def _test_step(self, data: Any) -> Logs:
        shares = self._next_shares(data)
        self._verify("test", shares, _share_spec(data), lambda exact, _: exact.test_on(shares, data))
        self._keep_first_rows("test", shares, _share_spec(data))
        return self.test_on(shares, data)

    def test_on(self, shares: dict[int, Share], iterator: Any) -> Logs:
        """Makes an evaluation step on shares."""
        return self._count("test", self._compute(self._functions.test_share, shares, iterator, ()), shares)

    def predict(self, batches: Sequence[Any]) -> Any:
        """The shares of a batch may compute something together. Batches follow each other: each one draws numbers."""
        cuts = [self._cut(batch) for batch in batches]
        if not all(cuts):  # a batch without examples has predictions too, of no rows
            return super().predict(batches)
        for shares in cuts:
            self._verify_prediction(shares)
        outputs = [output for shares in cuts for output in self.predict_on(shares)]
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(concatenated, *outputs)

    def predict_on(self, shares: dict[int, Share]) -> list[Any]:
        """Returns the predictions of each share."""
        parts = self._compute(self._functions.predict_share, shares, None, ())
        self._functions.set_seeds(parts[0].seeds)
        return [part.logs for part in parts]

    # --- Verification ---

    def _verification(self, kind: str) -> Verification | None:
        """Returns what verifies the steps of a kind, `None` once that is done."""
        return self._functions.strategy.verifications.get(kind)

    def _verify_prediction(self, shares: dict[int, Share]) -> None:
        self._verify("predict", shares, None, lambda exact, _: whole_of(exact.predict_on(shares)))

    def _verify_test(self, batch: Any, spec: Any) -> None:
        if self._verification("test") is not None:
            whole = Share(batch, count := int(row_count(batch)), count, NO_FINGERPRINT)
            self._verify("test", {0: whole} if count else {}, spec, lambda exact, _: exact.test_whole(batch, spec))

    def _verify(self, kind: str, shares: dict[int, Share], spec: Any, run: Callable[[SyncEngine, Any], Any]) -> None:
        """Verifies a step if it is one of the first.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            shares: Of its batch.
            spec: What the step is traced for, `None` for these data.
            run: Makes the step by another engine, whose noise and statistics are exact. Its second argument is as of
                `Step.applied`.
        """
        strategy, verification = self._functions.strategy, self._verification(kind)
        if verification is None or not shares:
            return

        def run_exactly(applied: list[Any]) -> Any:
            self._exact = self._exact or SyncEngine(self._model, self._backend, self._functions.exact())
            return run(self._exact, applied)

        def read() -> list[Any]:
            return self._read_shares(shares, spec)

        step, total = getattr(self._model, f"{kind}_step"), next(iter(shares.values())).total
        verification.look(strategy, step, Tried(read, run_exactly, spec), tf.constant(total))

    def _read_shares(self, shares: dict[int, Share], spec: Any) -> list[Any]:
        datas = [share.data for share in shares.values()]
        if not any(isinstance(data, ShardBatch) for data in datas):
            return datas
        return self._results([self._submit(_itself, data, (), spec) for data in datas])

    def _keep_first_rows(self, kind: str, shares: dict[int, Share], spec: Any) -> None:
        """Keeps rows for the check that is on by default, if this step is the first of its kind."""
        strategy = self._functions.strategy
        if (rows := strategy.first_rows.get(kind)) is None or rows.graph is not None or not shares:
            return
        datas = zip(shares.values(), self._read_shares(shares, spec), strict=True)
        rows.keep([share._replace(data=data) for share, data in datas])
        strategy.run_rows = self._run_rows

    def _run_rows(self, kind: str, batch: Any, applied: list[Any]) -> Any:
        """Makes a step on a few rows in this process, without a graph, with exact noise and statistics."""
        exact = SyncEngine(self._model, self._backend, self._functions.exact(is_trial=True))
        shares = self._cut(batch)
        try:
            return exact.train_on(shares, None, applied) if kind == "train" else exact.test_on(shares, None)
        except NotComparable:  # Keras adds to its text where it was raised
            reason = f"parameter servers would repeat it for more than {MOST_TOLD} layers that see the whole batch"
            raise NotComparable(reason) from None
        except NotSupportedError as error:
            raise NotComparable(error.problem) from error

    def _next_shares(self, iterator: Any) -> dict[int, Share]:
        """Returns the shares of the next step, by replica; none of them is empty."""
        if not isinstance(iterator, Pass):
            return self._cut(next(iterator))
        while True:
            self._read_ahead(iterator)
            if shares_read := iterator.shares(self._results([*iterator.reads.values()])):
                return shares_read

    def _cut(self, batch: Any) -> dict[int, Share]:
        shares = cut(without_optionals(batch), self._size)
        return {index: share for index, share in enumerate(shares) if share.count}

    def _compute(self, function: Any, shares: dict[int, Share], iterator: Any, kept: tuple[Any, ...]) -> list[Outputs]:
        """Lets the workers run a function on the shares. After it they read their next batches."""
        seeds, spec = self._functions.seeds(), _share_spec(iterator) or _spec_of_any_size(shares)
        starts = itertools.accumulate((share.count for share in shares.values()), initial=0)
        positions = {
            index: (share.count, share.total, index, at, len(shares), start)
            for at, (index, share), start in zip(itertools.count(), shares.items(), starts, strict=False)
        }
        arguments = {index: (tf.constant(position), seeds) for index, position in positions.items()}

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

    def _count(self, kind: str, outputs: Sequence[Outputs], shares: dict[int, Share]) -> Logs:
        self._functions.set_seeds(outputs[0].seeds)
        return self._functions.count(kind, outputs, [share.count for share in shares.values()])


def _itself(data: Any) -> Any:
    return data


def _share_spec(iterator: Any) -> Any:
    """Returns what a step on a share is traced for, `None` where there is no dataset."""
    spec = spec_of(iterator)
    return None if spec is None else tf.nest.map_structure(any_batch_size, spec)


def _spec_of_any_size(shares: dict[int, Share]) -> Any:
    data = next(iter(shares.values())).data
    return tf.nest.map_structure(any_batch_size, tf.nest.map_structure(type_of, data))
