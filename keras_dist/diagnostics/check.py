"""One dry run: trace the step, look for what is forbidden, compile, measure, search. In the check's own process."""

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
from keras_dist.diagnostics.report import Report
from keras_dist.diagnostics.search import Trial, largest_that_fits
from keras_dist.diagnostics.targets import Target

# Measured on 2 cores, from a small dense model to ResNet50; half or twice as long is usual.
_SECONDS_PER_OPERATION = 0.03

Tell = Callable[[str, float | None], None]


class Answers:
    """The compiler's answers, kept by the content of what was compiled.

    Args:
        folder: Where they are kept, `None` to keep none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.asked = self.known = 0

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns what is known."""
        self.asked += 1
        try:
            answer: dict[str, Any] = json.loads((self._folder / f"{key}.json").read_text())  # type: ignore[operator]
        except (TypeError, OSError, ValueError):
            return None
        self.known += 1
        return answer

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Keeps an answer."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{key}.part"
        part.write_text(json.dumps(answer))
        part.replace(self._folder / f"{key}.json")


class DryRun:
    """A model to be compiled for a TPU.

    Args:
        strategy: From `tpu_compiler.emulated_strategy`; the model's variables are made in its scope.
        model: A compiled Keras model.
        specs: Structure of `tf.TensorSpec`, of a batch.
        target: The TPU.
        tell: Is told what is done now, and how many seconds it may take.
        answers: What is known.
    """

    def __init__(
        self, strategy: Any, model: keras.Model, specs: Any, target: Target, tell: Tell, answers: Answers
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._specs = specs
        self._target = target
        self._tell = tell
        self._answers = answers
        self._last_seconds: float | None = None

    def run(self, batch: int, most_trials: int) -> Report:
        """Compiles for a batch of this many examples, then searches the largest that fits in so many compilations."""
        target, share = self._target, -(-batch // self._target.replicas)
        self._tell("building the model", None)
        self._build(share)
        report = Report(
            target=target.name, topology=target.topology, chips=target.chips, replicas=target.replicas,
            batch=batch, batch_per_replica=share, parameters=self._model.count_params(),
            versions={"tensorflow": tf.__version__, "keras": keras.__version__, **tpu_compiler.versions()},
        )  # fmt: skip
        self._tell("tracing the step", None)
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
            keras_model.build(self._model, self._share(share))
            if getattr(self._model, "optimizer", None) is not None:
                self._model.optimizer.build(self._model.trainable_variables)

    def _share(self, share: int) -> Any:
        return tf.nest.map_structure(lambda spec: tf.TensorSpec([share, *spec.shape[1:]], spec.dtype), self._specs)

    def _trace(self, share: int) -> tpu_compiler.Traced:
        return tpu_compiler.trace(self._strategy, self._model.train_step, self._share(share))

    def _compile(self, report: Report, traced: tpu_compiler.Traced, most_trials: int) -> None:
        start = time.monotonic()
        available = self._target.memory
        try:
            answer = self._answer(traced, report.batch)
        except CompilerError as error:
            report.error = str(error)[:2000]
            return
        report.seconds["compile"] = time.monotonic() - start
        report.compiles, report.fits = True, answer["fits"]
        available = answer.get("available") or available
        if report.fits:
            made = Compiled(**answer["compiled"])
            report.memory = {"total": made.memory, **_sizes(made), "available": available}
            report.flops, report.bytes_accessed = made.flops, made.bytes_accessed
            report.compiled_reductions = made.reductions
        else:
            report.memory = {"total": answer["memory"], "available": available}
        if most_trials:
            first = Trial(report.batch_per_replica, report.fits, answer["memory"])
            self._search(report, first, available, most_trials)
        report.cached = self._answers.asked == self._answers.known

    def _search(self, report: Report, first: Trial, available: int, most_trials: int) -> None:
        start, replicas = time.monotonic(), self._target.replicas

        def attempt(share: int) -> Trial:
            answer = self._answer(self._trace(share), share * replicas, "searching the largest batch: ")
            return Trial(share, answer["fits"], answer["memory"])

        good, bad = largest_that_fits(first, attempt, available, most_trials)
        report.largest_batch, report.too_large_batch = good * replicas, bad * replicas
        report.seconds["search"] = time.monotonic() - start

    def _answer(self, traced: tpu_compiler.Traced, batch: int, why: str = "") -> dict[str, Any]:
        """Returns the compiler's answer, known or new."""
        operations = sum(1 for _ in tpu_compiler.ops_of(traced.graph))
        self._tell(f"{why}compiling for {self._target.name}, batch {batch}", self._estimate(operations))
        code = tpu_compiler.lower(traced)
        facts = [tpu_compiler.fingerprint(code), self._target.topology, self._target.replicas, tpu_compiler.versions()]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if (known := self._answers.get(key)) is not None:
            return known
        start = time.monotonic()
        answer = self._compiled(code)
        if answer["fits"]:  # what doesn't fit is refused at once
            self._last_seconds = time.monotonic() - start
        self._answers.put(key, answer)
        return answer

    def _estimate(self, operations: int) -> float:
        return self._last_seconds or operations * _SECONDS_PER_OPERATION

    def _compiled(self, code: bytes) -> dict[str, Any]:
        try:
            made = tpu_compiler.compile_for(self._target.topology, self._target.replicas, code)
        except OutOfMemoryError as error:
            return {"fits": False, "memory": error.needed, "available": error.available}
        return {"fits": True, "memory": made.memory, "compiled": dataclasses.asdict(made)}


def _sizes(made: Compiled) -> dict[str, int]:
    names: Sequence[str] = ("arguments", "temporary", "results", "code")
    return {name: getattr(made, name) for name in names}
