"""One dry run: trace the step, find unsupported operations, compile, measure, search for the largest batch.

Runs in the process that compiles. Each compilation takes seconds to minutes, so the search makes few.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tf_graphs, tpu_emulation
from keras_dist.compat.tpu_emulation import CompilerError, OutOfMemoryError
from keras_dist.diagnostics import captured
from keras_dist.diagnostics.report import Report, Target
from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.permissions import write_whole

# These only call functions, whose operations are checked.
_CALLS = {
    "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case",
    "StatelessCase", "Placeholder", "NoOp", "_Arg", "_Retval", "SymbolicGradient",
}  # fmt: skip
_LENGTH = "the length of the result of {} depends on the data: a TPU needs fixed shapes"
# What is wrong with the operations of a type, and what to do.
_WHY = {
    "(Eager)?PyFunc(Stateless)?": "Python can't run on a TPU: move tf.py_function and tf.numpy_function into the "
    "dataset (`map`)",
    ".*(Hash|Lookup)Table.*": "lookup tables can't be on a TPU: apply StringLookup, IntegerLookup, TextVectorization "
    "in the dataset",
    "Print(V2)?|StringFormat": "nothing can be printed from a TPU: remove tf.print from the step",
    ".*Ragged.*": "ragged tensors have no fixed shape: use `to_tensor(shape=...)` in the dataset",
    # XLA compiles these.
    "Where": _LENGTH.format("tf.where(condition)"),
    "Unique(V2)?": _LENGTH.format("tf.unique"),
    "ListDiff": _LENGTH.format("tf.sets"),
}
_GRADIENT = "gradient_tape"
_FOLDERS = (sysconfig.get_path("stdlib"), Path(__file__).parents[1], *(Path(m.__file__).parent for m in (tf, keras)))
_LIBRARIES = tuple(f"{folder}/" for folder in _FOLDERS)

# Measured on 2 cores, from a small dense model to ResNet50. Half or twice as long is common.
_SECONDS_PER_OPERATION = 0.03

Send = Callable[[Any], None]


def main(descriptor: int) -> None:
    """The program of the process that compiles: a dry run comes by a pipe; reports, an error and tasks go back."""
    channel = connection.Connection(descriptor)
    try:
        _dry_run(channel.send, **channel.recv())
    except DistributionError as error:
        channel.send(error)
    except Exception as error:
        traceback.print_exc()
        channel.send(
            ConfigurationError(
                "The step can't be traced for a TPU.", f"{type(error).__name__}: {error}",
                "The traceback above shows where. Plain Keras must be able to trace it without `run_eagerly`.",
            )
        )


def _dry_run(
    send: Send, target: Target, answers: Path | None, trials: int, script: str = "", arguments: Sequence[str] = (),
    batch: int | None = None, model: str = "", specs: Any = None,
) -> None:  # fmt: skip
    strategy = tpu_emulation.emulated_strategy(target.replicas)
    if script:
        send(("running the script up to `fit`",))
        found = captured.run(Path(script), arguments, strategy)
    else:
        found = captured.load(model, specs, strategy)
    DryRun(strategy, found, target, send, answers).run(batch or captured.batch_of(found.specs), trials)


def find(graph: Any, layers: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the operations of a traced step that a TPU can't run, one per line of code, as in a `Report`."""
    tpu_emulation.start_xla()
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    # A gradient operation has no line in the user's code: it is reported only if its layer has no other operation.
    for op in sorted(tf_graphs.operations_of(graph), key=lambda op: _GRADIENT in op.name):
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
        one = {"op": op.type, "layer": layer, "file": file, "line": line, "why": why}
        found.setdefault((layer, file, line), one)
    return list(found.values())


def _why(op: Any) -> str | None:
    if op.type in _CALLS:
        return None
    if why := next((why for types, why in _WHY.items() if re.fullmatch(types, op.type)), None):
        return why
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return "there are no strings on a TPU: convert them to numbers in the dataset"
    return None if tpu_emulation.xla_compiles(op.type) else "XLA does not have this operation"


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
    low, high = (first, None) if first.fits else (_NOTHING, first)
    line, is_slow = (first, _NOTHING), False
    for trials_left in range(most_trials, -1, -1):
        yield low.batch, high.batch if high else 0
        top = high.batch if high else max(most, first.batch) + 1
        if not trials_left or top - low.batch <= max(1, int(_TOLERANCE * low.batch)):
            return
        limit = None if is_slow else _limit(*line, available)
        if has_both := bool(low.batch and high):
            guess = math.sqrt(low.batch * top) if limit is None else limit
        elif low.batch:
            guess = 4 * low.batch if limit is None else _BEYOND * limit
        else:
            guess = top / 4 if limit is None else limit / _BEYOND
        step, width = max(1, int(_TOLERANCE / 2 * low.batch)), top - low.batch
        trial = attempt(min(max(int(guess), low.batch + step), top - (step if high else 1)))
        low, high = (trial, high) if trial.fits else (low, trial)
        if low.batch and high:
            # If a prediction has hardly narrowed the bounds, the memory is far from a line.
            line, is_slow = (low, high), has_both and high.batch - low.batch > width / 2
        else:  # the two last trials are the closest to the limit while all are on one side of it
            line = (trial, line[0])


def _limit(one: Trial, other: Trial, available: int) -> float | None:
    """Returns the batch where a line through two trials meets the available memory, `None` if there is no such line."""
    if not one.memory or not (other.memory or other is _NOTHING):
        return None
    slope = (other.memory - one.memory) / (other.batch - one.batch)
    return one.batch + (available - one.memory) / slope if slope > 0 else None


@dataclasses.dataclass
class DryRun:
    """Compiles the training step of a model for a TPU.

    The strategy is from `tpu_emulation.emulated_strategy`: the model's variables are made in its scope. Results of the
    compiler are kept in the folder `answers`, if there is one.
    """

    strategy: Any
    found: captured.Captured
    target: Target
    send: Send
    answers: Path | None
    _last_seconds: float | None = None  # that a compilation has taken
    _is_cached: bool = True

    def run(self, batch: int, most_trials: int) -> Report:
        """Compiles for this batch size, then searches for the largest that fits. Sends the report as it grows."""
        model, target, share = self.found.model, self.target, -(-batch // self.target.replicas)
        self.send(("building the model",))
        with self.strategy.scope():
            keras_model.build(model, captured.resized(self.found.specs, share))
            if getattr(model, "optimizer", None) is not None:
                model.optimizer.build(model.trainable_variables)
        report = Report(
            target=target.name, topology=target.topology, chips=target.chips, replicas=target.replicas,
            batch=batch, batch_per_replica=share, parameters=model.count_params(),
            versions={"tensorflow": tf.__version__, "keras": keras.__version__, **tpu_emulation.versions()},
        )  # fmt: skip
        self.send(report)
        self.send(("tracing the step",))
        start = time.monotonic()
        traced = self._trace(share)
        operations = find(traced.graph, [layer.name for layer in keras_model.flatten_layers(model)])
        unfixed = "the data have no fixed shape, {}: pad each example in the dataset (`padded_batch`)"
        varying = [unfixed.format(spec) for spec in self.found.varying]
        report.forbidden = operations + [{"op": "input", "layer": "", "file": "", "line": 0, "why": w} for w in varying]
        report.seconds["trace"] = time.monotonic() - start
        report.gradient_reductions = traced.reductions
        report.missing.remove("forbidden")
        if not operations:
            self.send(report)
            content = self._compile(report, traced)
            if most_trials and report.compiles:
                report.missing = ["largest_batch"]
                self.send(report)
                self._search(report, content, most_trials)
            report.cached = self._is_cached
        report.missing = []
        self.send(report)
        return report

    def _trace(self, share: int) -> tpu_emulation.Traced:
        specs = captured.resized(self.found.specs, share)
        return tpu_emulation.trace(self.strategy, self.found.model.train_step, specs)

    def _measured(self, traced: tpu_emulation.Traced, what: str) -> tuple[list[Any], dict[str, Any]]:
        """Returns what decides about the compiler's result, and the result. Progress is shown under `what`."""
        code, target = tpu_emulation.lower(traced), self.target

        def compiled() -> dict[str, Any]:
            operations = sum(1 for _ in tf_graphs.operations_of(traced.graph))
            self.send((what, self._last_seconds or operations * _SECONDS_PER_OPERATION))
            start = time.monotonic()
            try:
                result = tpu_emulation.compile_for(target.topology, target.replicas, code)
            except OutOfMemoryError as error:  # refused at once: no measure of the next one
                return {"fits": False, "memory": error.needed, "available": error.available}
            self._last_seconds = time.monotonic() - start
            return {"fits": True, "memory": result.memory, "compiled": dataclasses.asdict(result)}

        content = [tpu_emulation.fingerprint(code), target.topology, target.replicas, tpu_emulation.versions()]
        return content, self._remembered(content, compiled)

    def _remembered(self, content: list[Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result of `work`, from the folder if it is there: JSON, by what decides about it."""
        if self.answers is None:
            self._is_cached = False
            return work()
        file = self.answers / f"{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(file.read_text()))
        self._is_cached = False
        result = work()
        self.answers.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(result).encode())
        return result

    def _compile(self, report: Report, traced: tpu_emulation.Traced) -> list[Any]:
        start = time.monotonic()
        try:
            content, result = self._measured(traced, f"compiling for {self.target.name}, batch {report.batch}")
        except CompilerError as error:
            report.error = str(error)[:2000]
            return []
        report.seconds["compile"] = time.monotonic() - start
        report.compiles, report.fits = True, result["fits"]
        compiled = result.get("compiled", {})  # if it fits
        sizes = {name: compiled[name] for name in ("arguments", "temporary", "results", "code") if name in compiled}
        available = result.get("available") or self.target.memory
        report.memory = {"total": result["memory"], **sizes, "available": available}
        report.flops, report.bytes_accessed = compiled.get("flops", 0.0), compiled.get("bytes_accessed", 0.0)
        report.compiled_reductions = compiled.get("reductions", 0)
        return content

    def _search(self, report: Report, content: list[Any], most_trials: int) -> None:
        """Sends the report with closer and closer bounds of the largest batch that fits."""
        replicas, examples = self.target.replicas, self.found.examples
        most = min(examples // replicas or 1, LARGEST) if examples else LARGEST
        start, tried = time.monotonic(), 0

        def attempt(share: int) -> Trial:
            nonlocal tried
            tried += 1
            what = f"searching the largest batch, trial {tried} of at most {most_trials}"
            self.send((f"{what}: tracing batch {share * replicas}",))
            _, result = self._measured(self._trace(share), f"{what}: compiling batch {share * replicas}")
            return Trial(share, result["fits"], result["memory"])

        def bounds() -> dict[str, Any]:
            first = Trial(report.batch_per_replica, report.fits, report.memory["total"])
            for fitting, too_large in bounds_of_limit(first, attempt, report.memory["available"], most_trials, most):
                report.largest_batch, report.too_large_batch = fitting * replicas, too_large * replicas
                report.seconds["search"] = time.monotonic() - start
                self.send(report)
            if not report.too_large_batch:
                end = f"the script has {examples} examples" if most < LARGEST else "no larger one is tried"
                report.search_end = end if report.largest_batch >= most else f"{tried} trials were made"
            return {name: getattr(report, name) for name in ("largest_batch", "too_large_batch", "search_end")}

        try:
            # The same step leads to the same search: kept as a whole, its trials need not be traced to recall them.
            vars(report).update(self._remembered(["search", content, most, most_trials], bounds))
        except Exception as error:  # what is known already must not be lost
            report.search_end = f"another size failed, {type(error).__name__}: {str(error).partition(chr(10))[0]}"
