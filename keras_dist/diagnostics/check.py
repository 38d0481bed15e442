"""One dry run: trace the step, find unsupported operations, compile, measure, search for the largest batch.

Runs in the check's process. Each compilation takes seconds to minutes, so the search makes few.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tpu_emulation
from keras_dist.compat.tpu_emulation import Compiled, CompilerError
from keras_dist.diagnostics.captured import Cache, Captured, Compiler, StartTask, Step, resized
from keras_dist.diagnostics.report import Report, Target

# These only call functions, whose operations are checked.
_CALLS = {
    "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case",
    "StatelessCase", "Placeholder", "NoOp", "_Arg", "_Retval", "SymbolicGradient",
}  # fmt: skip
# XLA compiles them, but the length of their output depends on the data, which a TPU does not allow.
_DYNAMIC_SIZE = {"Where": "tf.where(condition)", "Unique": "tf.unique", "UniqueV2": "tf.unique", "ListDiff": "tf.sets"}
_GRADIENT = "gradient_tape"
_FOLDERS = (sysconfig.get_path("stdlib"), Path(__file__).parents[1], *(Path(m.__file__).parent for m in (tf, keras)))
_LIBRARIES = tuple(f"{folder}/" for folder in _FOLDERS)


@dataclasses.dataclass(frozen=True)
class Forbidden:
    """An operation that a TPU can't run."""

    op: str  # its type
    layer: str  # "" outside of layers
    file: str  # of the user's code that made it; where a layer of a library did, ""
    line: int
    why: str  # what is wrong, and what to do


def find(graph: Any, layers: Sequence[str]) -> list[Forbidden]:
    """Returns the operations of a traced step that a TPU can't run, one per line of code; `layers` has the names."""
    tpu_emulation.start_xla()
    found: dict[tuple[str, str, int], Forbidden] = {}
    # A gradient operation has no line in the user's code: it is reported only if its layer has no other operation.
    for op in sorted(tpu_emulation.ops_of(graph), key=lambda op: _GRADIENT in op.name):
        if (why := _why(op)) is None:
            continue
        layer = _layer(op.name, layers)
        if _GRADIENT in op.name and layer in {found_layer for found_layer, _, _ in found}:
            continue
        frames = [(frame.filename, frame.lineno) for frame in op.traceback or ()]
        user_frames = [
            (file, line) for file, line in frames
            if not (file.startswith((*_LIBRARIES, "<")) or "__autograph" in file or "-packages/" in file)
        ]  # fmt: skip
        # The innermost frame in the user's code. If there is none, the layer says more.
        known = user_frames if user_frames or layer else frames
        file, line = known[-1] if known else ("", 0)
        found.setdefault((layer, file, line), Forbidden(op.type, layer, file, line, why))
    return list(found.values())


def _why(op: Any) -> str | None:
    if op.type in _CALLS:
        return None
    if op.type in ("PyFunc", "PyFuncStateless", "EagerPyFunc"):
        return "Python can't run on a TPU: move tf.py_function and tf.numpy_function into the dataset (`map`)"
    if "HashTable" in op.type or "LookupTable" in op.type:
        return "lookup tables can't be on a TPU: apply StringLookup, IntegerLookup, TextVectorization in the dataset"
    if op.type in ("PrintV2", "Print", "StringFormat"):
        return "nothing can be printed from a TPU: remove tf.print from the step"
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return "there are no strings on a TPU: convert them to numbers in the dataset"
    if "Ragged" in op.type:
        return "ragged tensors have no fixed shape: use `to_tensor(shape=...)` in the dataset"
    if op.type in _DYNAMIC_SIZE:
        return f"the length of the result of {_DYNAMIC_SIZE[op.type]} depends on the data: a TPU needs fixed shapes"
    if not tpu_emulation.xla_compiles(op.type):
        return "XLA does not have this operation"
    return None


def _layer(name: str, layers: Sequence[str]) -> str:
    """Returns the layer from the name of an operation: Keras adds the layers; TensorFlow numbers repeated names."""
    for part in reversed(name.split("/")):
        for scope in (part, re.sub(r"_\d+$", "", part)):
            if scope in layers:
                return scope
    return ""


LARGEST = 2**16  # of one replica: nobody trains with more
_TOLERANCE = 0.04  # stops when the two bounds are this close
_BEYOND = 1.1  # how far behind the predicted limit the other bound is looked for


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of one compilation."""

    batch: int  # of a replica
    fits: bool
    memory: int  # bytes needed, 0 if unknown


_NOTHING = Trial(0, True, 0)  # a batch of nothing needs no memory


def bounds_of_limit(
    first: Trial, attempt: Callable[[int], Trial], available: int, most_trials: int, most: int
) -> Iterator[tuple[int, int]]:
    """Yields the largest batch that was found to fit and the smallest that was found not to, 0 for none, as they close.

    Memory grows about linearly with the batch. So the limit is predicted by a line through these two, and the
    prediction is tried. As long as one of the two is missing, a batch beyond the predicted limit is tried. `most` is
    the largest batch that is of use.
    """
    trials = [first]
    yield _batches(trials)
    for _ in range(most_trials):
        if (batch := _next(trials, available, max(most, first.batch))) is None:
            return
        trials.append(attempt(batch))
        yield _batches(trials)


def _batches(trials: list[Trial]) -> tuple[int, int]:
    fitting, too_large = _bounds(trials)
    return (fitting.batch if fitting else 0), (too_large.batch if too_large else 0)


def _bounds(trials: list[Trial]) -> tuple[Trial | None, Trial | None]:
    fitting = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    too_large = min((trial for trial in trials if not trial.fits), key=lambda trial: trial.batch, default=None)
    return fitting, too_large


def _next(trials: list[Trial], available: int, most: int) -> int | None:
    """Returns the batch to try next, `None` if the bounds are close."""
    fitting, too_large = _bounds(trials)
    low, high = (fitting.batch if fitting else 0), (too_large.batch if too_large else most + 1)
    step = max(1, int(_TOLERANCE / 2 * low))
    if high - low <= max(1, int(_TOLERANCE * low)):
        return None
    if fitting and too_large:
        # If the last prediction has hardly narrowed the bounds, the memory is far from a line.
        low_before, high_before = _batches(trials[:-1])
        is_slow = low_before and high_before and high - low > (high_before - low_before) / 2
        limit = None if is_slow else _limit(fitting, too_large, available)
        guess = math.sqrt(low * high) if limit is None else limit
    else:
        # The two last trials are the closest to the limit while all are on one side of it.
        limit = _limit(trials[-1], trials[-2] if len(trials) > 1 else _NOTHING, available)
        beyond, without_line = (_BEYOND, 4 * low) if fitting else (1 / _BEYOND, high / 4)
        guess = without_line if limit is None else limit * beyond
    return min(max(int(guess), low + step), high - (step if too_large else 1))


def _limit(one: Trial, other: Trial, available: int) -> float | None:
    """Returns the batch where a line through two trials meets the available memory, `None` if there is no such line."""
    if not one.memory or not (other.memory or other is _NOTHING):
        return None
    slope = (other.memory - one.memory) / (other.batch - one.batch)
    return one.batch + (available - one.memory) / slope if slope > 0 else None


class DryRun:
    """Compiles the training step of a model for a TPU.

    The strategy is from `tpu_emulation.emulated_strategy`: the model's variables are made in its scope. `start_task` is
    called with the name of each task, and about how many seconds it takes.
    """

    def __init__(self, strategy: Any, captured: Captured, target: Target, start_task: StartTask, cache: Cache) -> None:
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
        with self._strategy.scope():
            keras_model.build(self._model, resized(self._captured.specs, share))
            if getattr(self._model, "optimizer", None) is not None:
                self._model.optimizer.build(self._model.trainable_variables)
        report = Report(
            target=target.name, topology=target.topology, chips=target.chips, replicas=target.replicas,
            batch=batch, batch_per_replica=share, parameters=self._model.count_params(),
            versions={"tensorflow": tf.__version__, "keras": keras.__version__, **tpu_emulation.versions()},
        )  # fmt: skip
        yield report
        self._start_task("tracing the step", None)
        start = time.monotonic()
        traced = self._trace(share)
        names = [layer.name for layer in keras_model.flatten_layers(self._model)]
        operations = [dataclasses.asdict(one) for one in find(traced.graph, names)]
        report.forbidden = [*operations, *map(_varying, self._captured.varying)]
        report.seconds["trace"] = time.monotonic() - start
        report.gradient_reductions = traced.reductions
        report.missing.remove("forbidden")
        if not operations:
            yield report
            step = self._compile(report, traced)
            if most_trials and report.compiles:
                report.missing = ["largest_batch"]
                yield report
                yield from self._search(report, step, most_trials)
            report.cached = not self._cache.misses
        report.missing = []
        yield report

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
            sizes = {name: getattr(compiled, name) for name in ("arguments", "temporary", "results", "code")}
            report.memory = {"total": compiled.memory, **sizes, "available": available}
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
            names = ("largest_batch", "too_large_batch", "search_end")
            self._cache.put(content, {name: getattr(report, name) for name in names})
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
