"""Why a step on shares computes something else than one on the whole batch: what a verification says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, tf_graphs
from keras_dist.step.differences import Difference

_RANDOM = "^(Stateful|Stateless)?(Random|Multinomial|TruncatedNormal|ParameterizedTruncatedNormal)(?!GetAlg|GetKey)"
_CLIPPING = "clip_by_global_norm|clip_by_norm|global_norm"


class Suspects(NamedTuple):
    """Operations that the script itself calls in a step: pairs of type and line.

    Args:
        random: Those that draw random numbers.
        clipping: Those that clip by a norm.
        attributes: Names of attributes that an eager step gives a value that depends on the share.
        begins_with_them: True if nothing but these values differs.
    """

    random: Sequence[tuple[str, str]] = ()
    clipping: Sequence[tuple[str, str]] = ()
    attributes: Sequence[str] = ()
    begins_with_them: bool = False


def suspects_in(graph: Any) -> Suspects:
    """Returns the suspects in the graph of a step, none if it is `None`: the step runs eagerly."""
    if graph is None:
        return Suspects()
    return Suspects(tf_graphs.script_operations(graph, _RANDOM), tf_graphs.script_operations(graph, _CLIPPING))


def of(wrong: Sequence[Difference], backend: Backend, suspects: Suspects, differs_by_rank: bool) -> str:
    """Returns the likely cause, and what to do about it.

    Args:
        wrong: What differs.
        backend: The backend.
        suspects: In the step.
        differs_by_rank: True if the ranks compute different numbers from the same batch.
    """
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
