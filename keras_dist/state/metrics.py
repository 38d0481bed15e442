"""Combines the states of metrics over the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model
from keras_dist.errors import NotSupportedError
from keras_dist.state.weights import synchronize
from keras_dist.step.agreement import Seen


@dataclasses.dataclass(frozen=True)
class Loss:
    """What Keras's loss metric has counted in an epoch."""

    mean: float  # over the examples
    examples: float  # their number, or the sum of their weights


def loss_of(model: keras.Model) -> Loss | None:
    """Returns what Keras's loss metric has counted, `None` if the model has none."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return Loss(float(metric.result()), float(metric.count))
    return None


def synchronize_metrics(
    model: keras.Model,
    optimizers: Sequence[Any],
    backend: Backend,
    call: str,
    logs: dict[str, Any],
    weight: float,
    seen: Seen,
) -> dict[str, Any]:
    """Synchronizes the weights, combines the states of the metrics, and averages other logs.

    Returns the averages over the ranks, by `weight`, of `logs`, which a custom step returned beside results of metrics.
    Of values that are no numbers, the chief's.
    """
    own, resets = _own(model, logs, weight)
    return _combine(model, synchronize(model, optimizers, backend, call, own, seen), resets)


@contextlib.contextmanager
def of_all_ranks(
    model: keras.Model, backend: Backend, call: str, logs: dict[str, Any], weight: float
) -> Iterator[dict[str, Any]]:
    """In this context the metrics have counted what all ranks have counted. Yields averages of other logs."""
    own, resets = _own(model, logs, weight)
    try:
        yield _combine(model, backend.all_gather_object(call, own), resets)
    finally:
        for metric, values in zip(model.metrics, own[0], strict=True):
            assign(metric.variables, values)


def _own(model: keras.Model, logs: dict[str, Any], weight: float) -> tuple[tuple[Any, Any, float], Any]:
    metrics, resets = metric_states(model)
    return (metrics, {name: np.asarray(value) for name, value in logs.items()}, weight), resets


def _combine(model: keras.Model, gathered: Sequence[Any], resets: Any) -> dict[str, Any]:
    combine_metrics(model, [states for states, _, _ in gathered], resets)
    names = sorted({name for _, logs, _ in gathered for name in logs})
    return {name: _average([(logs[name], weight) for _, logs, weight in gathered if name in logs]) for name in names}


def metric_states(model: keras.Model) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Returns the state of each metric, and its state after a reset: only what was counted since is summed."""
    states = [_values(metric) for metric in model.metrics]
    resets = []
    attributes = keras_model.Attributes(keras_model.flat_metrics(model))
    held = attributes.now()  # a reset drops what they keep in Python too
    for metric, values in zip(model.metrics, states, strict=True):
        metric.reset_state()
        resets.append(_values(metric))
        assign(metric.variables, values)
    attributes.set(held)
    return states, resets


def _values(metric: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in metric.variables]


def assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def combine_metrics(
    model: keras.Model, by_rank: Sequence[list[list[np.ndarray]]], resets: list[list[np.ndarray]]
) -> None:
    """Sets the metrics to what all ranks have counted; `by_rank` and `resets` as `metric_states` returns them."""
    for index, metric in enumerate(model.metrics):
        combined = []
        for position, variable in enumerate(metric.variables):
            values = [states[index][position] for states in by_rank]
            combined.append(combine_states(values, resets[index][position], variable.aggregation, variable.path))
        assign(metric.variables, combined)


def combine_states(values: Sequence[np.ndarray], reset: np.ndarray, aggregation: str, name: str) -> np.ndarray:
    """Combines the ranks' values of one variable of a metric. Its value after a reset is counted once."""
    dtype = reset.dtype
    # Sum float32 values in float64, then round once.
    wide = np.float64 if np.issubdtype(dtype, np.floating) else dtype
    if aggregation == "only_first_replica":
        return values[0]
    if aggregation == "sum":
        base = reset.astype(wide)
        return (base + sum(value.astype(wide) - base for value in values)).astype(dtype)
    if aggregation == "mean":
        return np.mean([value.astype(np.float64) for value in values], axis=0).astype(dtype)
    raise not_additive(aggregation, name)


def not_additive(aggregation: str, name: str) -> NotSupportedError:
    """Returns the error for a variable of a metric whose states can't be combined."""
    return NotSupportedError(
        "The state of a metric cannot be combined over the ranks, so its value would be wrong.",
        f"variable {name!r} with aggregation={aggregation!r}",
        "If the variable is a sum over examples, create it with add_variable(..., aggregation='sum').",
    )


def _average(weighted: Sequence[tuple[np.ndarray, float]]) -> Any:
    first, total = weighted[0][0], sum(weight for _, weight in weighted)
    if not total or first.dtype.kind in "OSU" or all(np.array_equal(first, value) for value, _ in weighted):
        return first
    mean = np.sum([value.astype(np.float64) * (weight / total) for value, weight in weighted if weight], axis=0)
    return mean if first.dtype.kind in "biu" else mean.astype(first.dtype)
