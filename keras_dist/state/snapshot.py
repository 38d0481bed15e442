"""The state of a training that variables hold, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model
from keras_dist.errors import MismatchError
from keras_dist.state.metrics import assign_metric, combine_metrics, metric_states
from keras_dist.state.weights import mean_of
from keras_dist.step.optimizer import accumulators_of

Arrays = dict[str, np.ndarray]
_SHARED, _OWN = "variables", "of_rank"


def take(model: keras.Model, optimizers: Sequence[Any]) -> Arrays:
    """Returns the weights, statistics and seeds of a model, and the state of its optimizers, as they are now."""
    return {name: _value(variable) for name, variable in _named(model, optimizers).items()}


def put(arrays: Mapping[str, np.ndarray], model: keras.Model, optimizers: Sequence[Any]) -> None:
    """Sets the variables, which exist, to what `take` has returned.

    Raises:
        MismatchError: If they are of another model or optimizer.
    """
    variables = _named(model, optimizers)
    saved = {name: array.shape for name, array in arrays.items() if name.startswith(_SHARED)}
    current = {name: tuple(variable.shape) for name, variable in variables.items()}
    if saved != current:
        name = next(name for name in {**saved, **current} if saved.get(name) != current.get(name))
        raise MismatchError(
            "The commit is of another model or optimizer, so training can't go on from it.",
            f"{name}: shape {saved.get(name, 'none')} in the commit, {current.get(name, 'none')} now",
            "Build and compile the model as before, or pass another directory to kd.callbacks.Commit.",
        )
    for name, variable in variables.items():
        variable.assign(arrays[name])


def _named(model: keras.Model, optimizers: Sequence[Any]) -> dict[str, Any]:
    # Without the names of layers, which Keras numbers anew when a notebook builds the model once more.
    named = {f"{_SHARED}/model/{i}/{v.path.split('/')[-1]}": v for i, v in enumerate(model.variables)}
    for number, optimizer in enumerate(optimizers):
        named |= {f"{_SHARED}/optimizer_{number}/{i}": v for i, v in enumerate(optimizer.variables)}
    return named


class OwnState:
    """What each rank has of its own between two epochs: metrics, statistics, accumulated gradients.

    Args:
        model: The model.
        optimizers: Its optimizers.
        backend: The backend.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Any], backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._statistics = keras_model.statistics_of(model)
        self._accumulators = accumulators_of(optimizers)

    def take(self) -> dict[str, Any]:
        """Returns the state of this rank."""
        return {
            "metrics": [[_value(v) for v in metric.variables] for metric in self._model.metrics],
            "statistics": [_value(variable) for variable in self._statistics],
            "accumulators": [_value(variable) for variable in self._accumulators],
        }

    def put(self, of_ranks: Sequence[dict[str, Any]], is_within_epoch: bool) -> None:
        """Sets the state of this rank.

        Args:
            of_ranks: The states of all ranks, of which there may have been more or fewer.
            is_within_epoch: False if an epoch begins, for which Keras has reset the metrics.
        """
        topology = self._backend.topology
        if len(of_ranks) != topology.size:
            self._put_of_others(of_ranks, is_within_epoch)
            return
        own = of_ranks[topology.rank]
        if is_within_epoch:
            for metric, values in zip(self._model.metrics, own["metrics"], strict=True):
                assign_metric(metric, values)
        _assign(self._statistics, own["statistics"])
        _assign(self._accumulators, own["accumulators"])

    def _put_of_others(self, of_ranks: Sequence[dict[str, Any]], is_within_epoch: bool) -> None:
        """Gives the chief what all ranks had, the others nothing; of statistics the average to all."""
        if is_within_epoch and self._backend.topology.is_chief:
            combine_metrics(self._model, [own["metrics"] for own in of_ranks], metric_states(self._model)[1])
        statistics = zip(*(own["statistics"] for own in of_ranks), strict=True)
        _assign(self._statistics, [mean_of(values) for values in statistics])
        sums = [sum(values) for values in zip(*(own["accumulators"] for own in of_ranks), strict=True)]
        is_chief = self._backend.topology.is_chief
        _assign(self._accumulators, [total if is_chief else np.zeros_like(total) for total in sums])


def _value(variable: Any) -> np.ndarray:
    """Returns what a variable has now; of a variable on several cores, the value of all.

    On a CPU nothing is copied: a variable whose value is in use gets other memory for its next value.
    """
    return np.asarray(tf.convert_to_tensor(variable.value))


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
