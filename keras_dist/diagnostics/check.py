"""One dry run: trace the step, find unsupported operations, compile, measure, search. Runs in the check's process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tpu_emulation
from keras_dist.compat.tpu_emulation import Compiled, CompilerError
from keras_dist.diagnostics import forbidden
from keras_dist.diagnostics.captured import Captured, resized
from keras_dist.diagnostics.compiler import Cache, Compiler, StartTask, Step
from keras_dist.diagnostics.report import Report
from keras_dist.diagnostics.search import LARGEST, Trial, bounds_of_limit
from keras_dist.diagnostics.targets import Target

_FOUND_BY_SEARCH = ("largest_batch", "too_large_batch", "search_end")


class DryRun:
    """Compiles the training step of a model for a TPU.

    Args:
        strategy: From `tpu_emulation.emulated_strategy`. The model's variables are made in its scope.
        captured: The compiled Keras model and its data.
        target: The TPU.
        start_task: Called at the start of each task with its name, and about how many seconds it takes.
        cache: Results of earlier runs.
    """

    def __init__(
        self, strategy: Any, captured: Captured, target: Target, start_task: StartTask, cache: Cache
    ) -> None:
        self._strategy = strategy
        self._captured = captured
        self._model = captured.model
        self._target = target
        self._start_task = start_task
        self._cache = cache
        self._compiler = Compiler(target, start_task, cache)

    def reports(self, batch: int, most_trials: int) -> Iterator[Report]:
        """Compiles for this batch size, then searches for the largest that fits, with at most `most_trials` trials.

        Yields one report again and again, each time with more results.
        """
        target, share = self._target, -(-batch // self._target.replicas)
        self._start_task("building the model", None)
        self._build(share)
        report = Report(
            target=target.name, topology=target.topology, chips=target.chips, replicas=target.replicas,
            batch=batch, batch_per_replica=share, parameters=self._model.count_params(),
            versions={"tensorflow": tf.__version__, "keras": keras.__version__, **tpu_emulation.versions()},
        )  # fmt: skip
        yield report
        self._start_task("tracing the step", None)
        traced = self._trace_and_check(report)
        if traced is not None:
            yield report
            step = self._compile(report, traced)
            if most_trials and report.compiles:
                report.missing = ["largest_batch"]
                yield report
                yield from self._search(report, step, most_trials)
            report.cached = not self._cache.misses
        report.missing = []
        yield report

    def _build(self, share: int) -> None:
        with self._strategy.scope():
            keras_model.build(self._model, resized(self._captured.specs, share))
            if getattr(self._model, "optimizer", None) is not None:
                self._model.optimizer.build(self._model.trainable_variables)

    def _trace_and_check(self, report: Report) -> tpu_emulation.Traced | None:
        """Returns the traced step, `None` if it has an operation that a TPU can't run."""
        start = time.monotonic()
        traced = self._trace(report.batch_per_replica)
        names = [layer.name for layer in keras_model.flatten_layers(self._model)]
        operations = [dataclasses.asdict(one) for one in forbidden.find(traced.graph, names)]
        report.forbidden = [*operations, *map(_varying, self._captured.varying)]
        report.seconds["trace"] = time.monotonic() - start
        report.gradient_reductions = traced.reductions
        report.missing.remove("forbidden")
        return None if operations else traced

    def _trace(self, share: int) -> tpu_emulation.Traced:
        return tpu_emulation.trace(self._strategy, self._model.train_step, resized(self._captured.specs, share))

    def _compile(self, report: Report, traced: tpu_emulation.Traced) -> Step:
        """Compiles for the batch size that was asked for."""
        start = time.monotonic()
        step = self._compiler.step(traced)
        try:
            result = self._compiler.result(step, f"compiling for {self._target.name}, batch {report.batch}")
        except CompilerError as error:
            report.error = str(error)[:2000]
            return step
        report.seconds["compile"] = time.monotonic() - start
        report.compiles, report.fits = True, result["fits"]
        available = result.get("available") or self._target.memory
        if report.fits:
            compiled = Compiled(**result["compiled"])
            report.memory = {"total": compiled.memory, **_sizes(compiled), "available": available}
            report.flops, report.bytes_accessed = compiled.flops, compiled.bytes_accessed
            report.compiled_reductions = compiled.reductions
        else:
            report.memory = {"total": result["memory"], "available": available}
        return step

    def _search(self, report: Report, step: Step, most_trials: int) -> Iterator[Report]:
        """Yields the report with closer and closer bounds of the largest batch that fits."""
        start = time.monotonic()
        examples = self._captured.examples
        most = min(examples // self._target.replicas or 1, LARGEST) if examples else LARGEST
        # The same step leads to the same search: kept as a whole, its trials need not be traced to recall them.
        content = ["search", step.content, most, most_trials]
        if (known := self._cache.get(content)) is not None:
            vars(report).update(known)
            return
        end = f"the script has {examples} examples" if most < LARGEST else "no larger one is tried"
        try:
            yield from self._bounds(report, most, most_trials, end)
        except Exception as error:  # what is known already must not be lost
            report.search_end = f"another size failed, {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            self._cache.put(content, {name: getattr(report, name) for name in _FOUND_BY_SEARCH})
        report.seconds["search"] = time.monotonic() - start

    def _bounds(self, report: Report, most: int, most_trials: int, end: str) -> Iterator[Report]:
        replicas, tried = self._target.replicas, 0

        def attempt(share: int) -> Trial:
            nonlocal tried
            tried += 1
            what = f"searching the largest batch, trial {tried} of at most {most_trials}"
            self._start_task(f"{what}: tracing batch {share * replicas}", None)
            step = self._compiler.step(self._trace(share))
            result = self._compiler.result(step, f"{what}: compiling batch {share * replicas}")
            return Trial(share, result["fits"], result["memory"])

        first = Trial(report.batch_per_replica, report.fits, report.memory["total"])
        for fitting, too_large in bounds_of_limit(first, attempt, report.memory["available"], most_trials, most):
            report.largest_batch, report.too_large_batch = fitting * replicas, too_large * replicas
            yield report
        if not report.too_large_batch:
            report.search_end = end if report.largest_batch >= most else f"{tried} trials were made"


def _varying(spec: str) -> dict[str, Any]:
    return {
        "op": "input", "layer": "", "file": "", "line": 0,
        "why": f"the data have no fixed shape, {spec}: pad each example in the dataset (`padded_batch`)",
    }  # fmt: skip


def _sizes(compiled: Compiled) -> dict[str, int]:
    names: Sequence[str] = ("arguments", "temporary", "results", "code")
    return {name: getattr(compiled, name) for name in names}
