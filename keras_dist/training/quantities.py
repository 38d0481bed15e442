"""What a verification compares of a step: gradients, states of metrics, other variables, logs, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, keras_optimizers, keras_random
from keras_dist.step.differences import Quantity

_NEED_NOT_BE_IN_BOTH = ("variables", "rows")


class Computed:
    """Collects what steps have computed.

    Args:
        model: The model, `None` in a custom loop.
        is_prediction: True if the steps predict.
        others: Variables that Keras doesn't know, by name.
        has_rows: True if the rows of a sparse gradient are compared too, beside their sums.
    """

    def __init__(
        self,
        model: keras.Model | None,
        is_prediction: bool,
        others: Mapping[str, tf.Variable] | None = None,
        has_rows: bool = True,
    ) -> None:
        self._model = model
        self._has_rows = has_rows
        self._others = others or {}
        self._is_prediction = is_prediction

    def of(
        self, applied: Sequence[Any], outputs: Any, assigned: dict[int, Any], state: Callable[[Any], Any]
    ) -> list[Quantity]:
        """Returns what a step has computed.

        Args:
            applied: See `Step.applied`.
            outputs: Its predictions, or those of its logs that no metric knows.
            assigned: The variables that it has assigned, by id.
            state: Returns the state of a metric's variable.
        """
        updated: set[int] = set()
        quantities: list[Quantity] = []
        for number, (optimizer, gradients, given) in enumerate(applied, start=1):
            variables = keras_optimizers.updated_variables(optimizer, given)
            updated.update(map(id, variables))
            of_update = f" in update {number}" if len(applied) > 1 else ""
            for variable, gradient in zip(variables, gradients, strict=False):
                if gradient is not None:
                    quantities += _of_gradient(f"{variable.path!r}{of_update}", number, gradient, self._has_rows)
        if self._model is None:
            return quantities + _state_of_loop(assigned, updated)
        quantities += [Quantity(f"the tf.Variable {name}", "variables", v.value()) for name, v in self._others.items()]
        return quantities + _state(self._model, updated, state) + self._outputs(outputs)

    def _outputs(self, outputs: Any) -> list[Quantity]:
        if self._is_prediction:
            leaves = tf.nest.flatten(outputs, expand_composites=True)
            return [Quantity("the predictions", f"predictions {n}", leaf) for n, leaf in enumerate(leaves)]
        if not isinstance(outputs, dict):
            return []
        return [
            Quantity(f"logs[{name!r}]", f"log {name}", tf.convert_to_tensor(outputs[name]))
            for name in sorted(outputs)
            if tf.is_tensor(outputs[name])
        ]


def _of_gradient(path: str, number: int, gradient: Any, has_rows: bool) -> list[Quantity]:
    """Of a sparse gradient also the squares of its rows: Adam squares each row, before it adds those of one index."""
    found = [Quantity(f"the gradient of {path}", f"update {number}", tf.convert_to_tensor(gradient))]
    if has_rows and isinstance(gradient, tf.IndexedSlices):
        squares = tf.IndexedSlices(gradient.values**2, gradient.indices, gradient.dense_shape)
        name = f"the sum of squared rows in the gradient of {path}"
        found.append(Quantity(name, f"rows {number}", tf.convert_to_tensor(squares)))
    return found


def _state_of_loop(assigned: dict[int, Any], updated: set[int]) -> list[Quantity]:
    """Returns what the step of a loop has assigned, other than by optimizers."""
    variables = [v for v in assigned.values() if id(v) not in updated and not keras_random.is_seed(v)]
    return [
        Quantity(f"the variable {variable.path!r}", "variables", value_of(variable))
        for variable in sorted(variables, key=lambda variable: variable.path)
    ]


def _state(model: keras.Model, updated: set[int], state: Callable[[Any], Any]) -> list[Quantity]:
    quantities: list[Quantity] = []
    counted = set[int]()
    for metric in reversed(keras_model.flat_metrics(model)):  # those in another one first
        for variable in metric.variables:
            if id(variable) not in counted:
                counted.add(id(variable))
                name = f"the metric {metric.name!r} ({variable.name})"
                quantities.append(Quantity(name, f"metric {metric.name}", state(variable)))
    ignored = updated | counted
    ignored |= {id(generator.state) for generator in keras_random.seed_generators(model)}
    quantities += [
        Quantity(f"the variable {variable.path!r}", "variables", value_of(variable))
        for variable in model.variables
        if id(variable) not in ignored
    ]
    return quantities


def value_of(variable: Any) -> Any:
    """Returns the value of a Keras variable as a tensor."""
    return tf.convert_to_tensor(variable.value)


def common(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> tuple[list[Quantity], list[Quantity]]:
    """Returns the quantities of two steps without those that need not be in both.

    Not all variables that replicas assign in a loop can be seen, and TPU cores reduce dense gradients.
    """
    names = {quantity.name for quantity in expected} & {quantity.name for quantity in actual}

    def compared(quantities: Sequence[Quantity]) -> list[Quantity]:
        return [each for each in quantities if each.name in names or not each.group.startswith(_NEED_NOT_BE_IN_BOTH)]

    return compared(expected), compared(actual)
