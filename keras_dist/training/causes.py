"""What a verification compares of a step, and why a step on shares may compute something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_model, keras_optimizers, keras_random, tf_graphs
from keras_dist.step.trial import Difference, Quantity

_RANDOM = "^(Stateful|Stateless)?(Random|Multinomial|TruncatedNormal|ParameterizedTruncatedNormal)(?!GetAlg|GetKey)"
_CLIPPING = "clip_by_global_norm|clip_by_norm|global_norm"


class Suspects(NamedTuple):
    """Operations that the script itself calls in a step: pairs of type and line."""

    random: Sequence[tuple[str, str]] = ()
    clipping: Sequence[tuple[str, str]] = ()  # by a norm
    attributes: Sequence[str] = ()  # to which an eager step gives a value that depends on the share
    begins_with_them: bool = False  # nothing but the values of these attributes differs


def suspects_in(graph: Any) -> Suspects:
    """Returns the suspects in the graph of a step, none if it is `None`: the step runs eagerly."""
    if graph is None:
        return Suspects()
    return Suspects(tf_graphs.script_operations(graph, _RANDOM), tf_graphs.script_operations(graph, _CLIPPING))


def of(wrong: Sequence[Difference], backend: Backend, suspects: Suspects, differs_by_rank: bool) -> str:
    """Returns the likely cause, and what to do about it."""
    if suspects.attributes and (differs_by_rank or suspects.begins_with_them):
        return (
            f"Likely cause: a step computes {', '.join(suspects.attributes[:3])} from its share, in Python, and the "
            "next one uses it. Compute it from kd.gather(...), or in a variable with aggregation='mean' or 'sum'."
        )
    if differs_by_rank:
        return (
            "Likely cause: the ranks compute with different constants or weights: random numbers without a seed, the "
            "order of a Python `set`, what depends on kd.rank(). Make them the same on every rank (a seed, "
            "`sorted(...)`, kd.broadcast)."
        )
    if suspects.random:
        kind, line = suspects.random[0]
        return (
            f"Likely cause: a random layer, {kind} at {line}, draws other numbers for a share than for the whole "
            "batch. Draw by `keras.random` with a SeedGenerator: kd.distribute(model, exact=True) then takes the "
            "share's rows of what one process draws."
        )
    gradients = [difference for difference in wrong if difference.group.startswith("update")]
    if suspects.clipping and gradients:
        return (
            f"Likely cause: the step clips the gradients of a share, at {suspects.clipping[0][1]}. Call "
            "kd.all_reduce(gradients) before, or let the optimizer clip: clipnorm, clipvalue, global_clipnorm."
        )
    factors = [difference.factor for difference in gradients or wrong]
    if any(np.allclose(factors, expected, rtol=0.3) for expected in (backend.num_replicas, 1 / backend.num_replicas)):
        return (
            "Likely cause: a sum over the examples where a mean is expected, in a loss or metric that the step "
            "computes itself: a share's loss counts as a mean. Divide by the number of examples (`tf.reduce_mean`), "
            "pass it to `add_loss` or compile, or compute it from kd.gather(predictions)."
        )
    if all(difference.group == "variables" for difference in wrong):
        return (
            "Likely cause: state that is collected from a share, as in BatchNormalization. Assign it in the `call` of "
            "a layer, or create it with aggregation='sum' or 'mean', by `add_weight`: of a tf.Variable Keras and "
            "keras_dist know nothing."
        )
    if all(difference.group.startswith("metric ") for difference in wrong):
        return (
            "Likely cause: a metric of the script's own whose counts of two shares don't make that of the batch. Let "
            "its `update_state` add to variables, or compute it from `model.predict`."
        )
    if all(difference.group.startswith("predictions") for difference in wrong):
        return (
            "Likely cause: a layer that mixes the examples of a batch when it predicts. Compute it from kd.gather, "
            "or predict on one rank with a copy of the model that is not distributed."
        )
    return (
        "Likely cause: something that depends on all examples of the batch but sees a share only: a loss that compares "
        "examples or divides by their number (kd.losses.WholeBatch, kd.gather), a normalization by the statistics of "
        "the batch (BatchNormalization with exact=True), gradients that the step clips or scales itself "
        "(kd.all_reduce before), or data that differ by rank."
    )


def not_exact(model: keras.Model | None) -> str:
    """Returns a sentence that names the layers whose numbers are not those of one process by intention."""
    layers = [] if model is None else keras_layers.inexact_layers(model)
    if not layers:
        return ""
    unique = list(dict.fromkeys(repr(layer.name) for layer in layers))
    names = ", ".join(unique[:3]) + (" ..." if len(unique) > 3 else "")
    return f"{names} normalize by a share, or draw other noise on each replica; with exact=True they don't."


@dataclasses.dataclass(frozen=True, eq=False)
class Computed:
    """Collects what steps have computed."""

    model: keras.Model | None  # `None` in a custom loop
    is_prediction: bool
    others: Mapping[str, tf.Variable] = dataclasses.field(default_factory=dict)  # that Keras doesn't know, by name
    has_rows: bool = True  # the rows of a sparse gradient are compared too, beside their sums

    def of(
        self, applied: Sequence[Any], outputs: Any, assigned: dict[int, Any], state: Callable[[Any], Any]
    ) -> list[Quantity]:
        """Returns what a step has computed. `outputs` are its predictions, or its logs that no metric knows."""
        updated: set[int] = set()
        quantities: list[Quantity] = []
        for number, (optimizer, gradients, given) in enumerate(applied, start=1):
            variables = keras_optimizers.updated_variables(optimizer, given)
            updated.update(map(id, variables))
            of_update = f" in update {number}" if len(applied) > 1 else ""
            for variable, gradient in zip(variables, gradients, strict=False):
                if gradient is None:
                    continue
                path = f"{variable.path!r}{of_update}"
                dense = tf.convert_to_tensor(gradient)
                quantities.append(Quantity(f"the gradient of {path}", f"update {number}", dense))
                if self.has_rows and isinstance(gradient, tf.IndexedSlices):
                    # Adam squares each row, before it adds the rows of one index.
                    squares = tf.IndexedSlices(gradient.values**2, gradient.indices, gradient.dense_shape)
                    name = f"the sum of squared rows in the gradient of {path}"
                    quantities.append(Quantity(name, f"rows {number}", tf.convert_to_tensor(squares)))
        if self.model is None:  # what the step of a loop has assigned, other than by optimizers
            others = [v for v in assigned.values() if id(v) not in updated and not keras_random.is_seed(v)]
            return quantities + _values_of(sorted(others, key=lambda variable: variable.path))
        quantities += [Quantity(f"the tf.Variable {name}", "variables", v.value()) for name, v in self.others.items()]
        quantities += _state(self.model, updated, state)
        if self.is_prediction:
            leaves = tf.nest.flatten(outputs, expand_composites=True)
            quantities += [Quantity("the predictions", f"predictions {n}", leaf) for n, leaf in enumerate(leaves)]
        elif isinstance(outputs, dict):
            for name in sorted(outputs):
                if tf.is_tensor(outputs[name]):
                    value = tf.convert_to_tensor(outputs[name])
                    quantities.append(Quantity(f"logs[{name!r}]", f"log {name}", value))
        return quantities


def _values_of(variables: Sequence[Any]) -> list[Quantity]:
    return [Quantity(f"the variable {variable.path!r}", "variables", value_of(variable)) for variable in variables]


def _state(model: keras.Model, updated: set[int], state: Callable[[Any], Any]) -> list[Quantity]:
    quantities: list[Quantity] = []
    counted = set[int]()
    for metric in reversed(keras_model.flat_metrics(model)):  # those in another one first
        for variable in metric.variables:
            if id(variable) not in counted:
                counted.add(id(variable))
                name = f"the metric {metric.name!r} ({variable.name})"
                quantities.append(Quantity(name, f"metric {metric.name}", state(variable)))
    ignored = updated | counted | {id(generator.state) for generator in keras_random.seed_generators(model)}
    return quantities + _values_of([variable for variable in model.variables if id(variable) not in ignored])


def value_of(variable: Any) -> Any:
    return tf.convert_to_tensor(variable.value)


def common(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> tuple[list[Quantity], list[Quantity]]:
    """Returns the quantities of two steps without those that need not be in both.

    Not all variables that replicas assign in a loop can be seen, and TPU cores reduce dense gradients.
    """
    names = {quantity.name for quantity in expected} & {quantity.name for quantity in actual}
    compared = [
        [each for each in quantities if each.name in names or not each.group.startswith(("variables", "rows"))]
        for quantities in (expected, actual)
    ]
    return compared[0], compared[1]
