"""The states of metrics on all ranks, combined into those of the global batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.comm.backend import Backend
from keras_dist.errors import NotSupportedError
from keras_dist.state.weights import settle


def settle_metrics(model: keras.Model, backend: Backend, call: str, logs: Any, weight: float) -> Any:
    """Does what `settle` does, and combines the states of the metrics.

    Args:
        model: The distributed model.
        backend: How the ranks talk.
        call: What the user called.
        logs: Values that a step returned that are not metrics of the model, or `None`.
        weight: How much this rank's `logs` count.

    Returns:
        The average of `logs` over the ranks.

    Raises:
        MismatchError: If the trained weights differ; the variables are named.
        NotSupportedError: If the states of a metric can't be combined.
    """
    metrics, resets = metric_states(model)
    everyone = settle(model, backend, call, (metrics, logs, weight))
    _add_up_metrics(model, [states for states, _, _ in everyone], resets)
    return _average_logs([logs for _, logs, _ in everyone], [weight for _, _, weight in everyone])


def metric_states(model: keras.Model) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Returns the state of each metric, and what it is after a reset: only what was counted since adds up."""
    states = [_values(metric) for metric in model.metrics]
    resets = []
    for metric, values in zip(model.metrics, states, strict=True):
        metric.reset_state()
        resets.append(_values(metric))
        _assign(metric, values)
    return states, resets


def _values(metric: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in metric.variables]


def _assign(metric: Any, values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


def _add_up_metrics(
    model: keras.Model, everyone: Sequence[list[list[np.ndarray]]], resets: list[list[np.ndarray]]
) -> None:
    for index, metric in enumerate(model.metrics):
        combined = []
        for position, variable in enumerate(metric.variables):
            values = [states[index][position] for states in everyone]
            combined.append(combine_states(values, resets[index][position], variable.aggregation, variable.path))
        _assign(metric, combined)


def combine_states(values: Sequence[np.ndarray], reset: np.ndarray, aggregation: str, name: str) -> np.ndarray:
    """Puts the states of one variable of a metric on all ranks together.

    Args:
        values: The states, in the order of rank.
        reset: The state after a reset, which counts once.
        aggregation: The variable's own: `"sum"`, `"mean"` or `"only_first_replica"`.
        name: Name of the variable, for the message.

    Raises:
        NotSupportedError: If the aggregation doesn't say how.
    """
    dtype = reset.dtype
    # Many float32 parts are added in float64, then rounded once.
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
        "The states of a metric can't be combined, so its value would be wrong.",
        f"variable {name!r} with aggregation={aggregation!r}",
        "Create the variable with add_variable(..., aggregation='sum') if the parts of the data add up in it.",
    )


def _average_logs(everyone: Sequence[Any], weights: Sequence[float]) -> Any:
    if everyone[0] is None:
        return None
    total = sum(weights) or 1.0
    return {
        key: sum(logs[key] * weight for logs, weight in zip(everyone, weights, strict=True) if weight) / total
        for key in everyone[0]
    }
