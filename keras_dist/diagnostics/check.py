"""One dry run: trace the step, find unsupported operations, compile, measure, search. Runs in the check's process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tpu_compiler
from keras_dist.compat.tpu_compiler import Compiled, CompilerError, OutOfMemoryError
from keras_dist.diagnostics import forbidden
from keras_dist.diagnostics.captured import resized
from keras_dist.diagnostics.report import Report
from keras_dist.diagnostics.search import Trial, largest_that_fits
from keras_dist.diagnostics.targets import Target

# Measured on 2 cores, from a small dense model to ResNet50. Half or twice as long is common.
_SECONDS_PER_OPERATION = 0.03

StartTask = Callable[[str, float | None], None]


class CompilerCache:
    """The compiler's results, by the content of what was compiled.

    Args:
        folder: Where they are kept; `None` to keep none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.requests = self.hits = 0

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns a result that was kept."""
        self.requests += 1
        try:
            result: dict[str, Any] = json.loads((self._folder / f"{key}.json").read_text())  # type: ignore[operator]
        except (TypeError, OSError, ValueError):
            return None
        self.hits += 1
        return result

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keeps a result."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{key}.part"
        part.write_text(json.dumps(result))
        part.replace(self._folder / f"{key}.json")


class DryRun:
    """Compiles the training step of a model for a TPU.

    Args:
        strategy: From `tpu_emulation.emulated_strategy`. The model's variables are made in its scope.
        model: A compiled Keras model.
        specs: A batch, as a structure of `tf.TensorSpec`.
        target: The TPU.
        start_task: Called at the start of each task with its name, and about how many seconds it takes.
        cache: Results of earlier runs.
    """

    def __init__(
        self, strategy: Any, model: keras.Model, specs: Any, target: Target, start_task: StartTask, cache: CompilerCache
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._specs = specs
        self._target = target
        self._start_task = start_task
        self._cache = cache
        self._last_seconds: float | None = None

    def run(self, batch: int, most_trials: int) -> Report:
        """Compiles for this batch size, then searches for the largest that fits, with at most `most_trials` trials."""
        target, share = self._target, -(-batch // self._target.replicas)
        self._start_task("building the model", None)
        self._build(share)
        report = Report(
            target=target.name, topology=target.topology, chips=target.chips, replicas=target.replicas,
            batch=batch, batch_per_replica=share, parameters=self._model.count_params(),
            versions={"tensorflow": tf.__version__, "keras": keras.__version__, **tpu_compiler.versions()},
        )  # fmt: skip
        self._start_task("tracing the step", None)
        start = time.monotonic()
        traced = self._trace(share)
        names = [layer.name for layer in keras_model.flatten_layers(self._model)]
        report.forbidden = [dataclasses.asdict(one) for one in forbidden.find(traced.graph, names)]
        report.seconds["trace"] = time.monotonic() - start
        report.gradient_reductions = traced.reductions
        if not report.forbidden:
            self._compile(report, traced, most_trials)
        return report

    def _build(self, share: int) -> None:
        with self._strategy.scope():
            keras_model.build(self._model, resized(self._specs, share))
            if getattr(self._model, "optimizer", None) is not None:
                self._model.optimizer.build(self._model.trainable_variables)

    def _trace(self, share: int) -> tpu_compiler.Traced:
        return tpu_compiler.trace(self._strategy, self._model.train_step, resized(self._specs, share))

    def _compile(self, report: Report, traced: tpu_compiler.Traced, most_trials: int) -> None:
        start = time.monotonic()
        available = self._target.memory
        try:
            result = self._compile_or_recall(traced, report.batch)
        except CompilerError as error:
            report.error = str(error)[:2000]
            return
        report.seconds["compile"] = time.monotonic() - start
        report.compiles, report.fits = True, result["fits"]
        available = result.get("available") or available
        if report.fits:
            compiled = Compiled(**result["compiled"])
            report.memory = {"total": compiled.memory, **_sizes(compiled), "available": available}
            report.flops, report.bytes_accessed = compiled.flops, compiled.bytes_accessed
            report.compiled_reductions = compiled.reductions
        else:
            report.memory = {"total": result["memory"], "available": available}
        if most_trials:
            first = Trial(report.batch_per_replica, report.fits, result["memory"])
            self._search(report, first, available, most_trials)
        report.cached = self._cache.requests == self._cache.hits

    def _search(self, report: Report, first: Trial, available: int, most_trials: int) -> None:
        start, replicas = time.monotonic(), self._target.replicas

        def attempt(share: int) -> Trial:
            result = self._compile_or_recall(self._trace(share), share * replicas, "searching the largest batch: ")
            return Trial(share, result["fits"], result["memory"])

        fitting, too_large = largest_that_fits(first, attempt, available, most_trials)
        report.largest_batch, report.too_large_batch = fitting * replicas, too_large * replicas
        report.seconds["search"] = time.monotonic() - start

    def _compile_or_recall(self, traced: tpu_compiler.Traced, batch: int, why: str = "") -> dict[str, Any]:
        """Returns the compiler's result, from the cache if it is there."""
        operations = sum(1 for _ in tpu_compiler.ops_of(traced.graph))
        self._start_task(f"{why}compiling for {self._target.name}, batch {batch}", self._estimate(operations))
        code = tpu_compiler.lower(traced)
        target = self._target
        content = [tpu_compiler.fingerprint(code), target.topology, target.replicas, tpu_compiler.versions()]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        if (known := self._cache.get(key)) is not None:
            return known
        start = time.monotonic()
        result = self._compiled(code)
        if result["fits"]:  # the compiler refuses others at once
            self._last_seconds = time.monotonic() - start
        self._cache.put(key, result)
        return result

    def _estimate(self, operations: int) -> float:
        return self._last_seconds or operations * _SECONDS_PER_OPERATION

    def _compiled(self, code: bytes) -> dict[str, Any]:
        try:
            compiled = tpu_compiler.compile_for(self._target.topology, self._target.replicas, code)
        except OutOfMemoryError as error:
            return {"fits": False, "memory": error.needed, "available": error.available}
        return {"fits": True, "memory": compiled.memory, "compiled": dataclasses.asdict(compiled)}


def _sizes(compiled: Compiled) -> dict[str, int]:
    names: Sequence[str] = ("arguments", "temporary", "results", "code")
    return {name: getattr(compiled, name) for name in names}
