"""The weights and statistics that ranks hold between steps: compared, broadcast and averaged.

All of it goes through `Backend.all_gather_object`: small, in a fixed order, with the same result on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_random
from keras_dist.errors import MismatchError
from keras_dist.logging import logger
from keras_dist.state import compiled
from keras_dist.step.agreement import odd_ranks


def checksums(variables: Sequence[Any]) -> np.ndarray:
    """Returns one int64 per variable, which depends on every bit of it."""
    if not variables:
        return np.zeros([0], np.int64)
    # Tensors, not variables: of those TensorFlow would take one model's trace for another model's shapes.
    return _checksums([tf.convert_to_tensor(variable.value) for variable in variables]).numpy()


@tf.function(autograph=False, reduce_retracing=True)
def _checksums(values: list[Any]) -> Any:
    return tf.stack([_checksum(value) for value in values])


def _checksum(value: Any) -> Any:
    value = tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
    numbers = tf.cast(tf.reshape(tf.bitcast(value, tf.uint8), [-1]), tf.int64)
    factors = tf.range(1, 2 * tf.size(numbers, tf.int64), 2, tf.int64) * 0x9E3779B97F4A7C1
    return tf.reduce_sum(numbers * factors)


def start_alike(
    model: keras.Model, optimizers: Sequence[Any], backend: Backend, call: str, plan: dict[str, Any] | None = None
) -> None:
    """Gives the chief's weights, optimizer state and first epoch to all ranks; refuses other models.

    Args:
        model: The distributed model.
        optimizers: Its optimizers.
        backend: How the ranks talk.
        call: What the user called.
        plan: What this rank is about to do (epochs, steps), which must be the same on all.

    Raises:
        MismatchError: If the ranks' models, optimizers or plans differ.
    """
    structure: list[tuple[str, list[Any]]] = [(type(model).__name__, [*map(_describe, model.variables)])]
    structure += [(type(optimizer).__name__, []) for optimizer in optimizers]
    structure += [("compile", compiled.describe(model))]
    everyone = backend.all_gather_object(
        call, (structure, plan, [o.built for o in optimizers], getattr(model, keras_fit.INITIAL_EPOCH))
    )
    _check_plans([plan for _, plan, _, _ in everyone])
    _check_structures([structure for structure, _, _, _ in everyone])
    _, _, chiefs_built, chiefs_epoch = everyone[0]
    # The chief may have loaded an optimizer's state, which the others have no variables for yet.
    for optimizer, built in zip(optimizers, chiefs_built, strict=True):
        if built and not optimizer.built:
            optimizer.build(model.trainable_variables)
    variables = [*model.variables]
    for optimizer, built in zip(optimizers, chiefs_built, strict=True):
        variables += optimizer.variables if built else []
    _broadcast(variables, backend)
    logger().debug("%s: all have the chief's %d variables, resumed epoch: %s", call, len(variables), chiefs_epoch)
    keras_model.attach(model, keras_fit.INITIAL_EPOCH, chiefs_epoch)


def _describe(variable: Any) -> tuple[str, tuple[int, ...], str]:
    return variable.path.split("/")[-1], tuple(variable.shape), variable.dtype


def _check_plans(plans: Sequence[Any]) -> None:
    if any(plan != plans[0] for plan in plans):
        raise MismatchError(
            "The ranks are about to train for different numbers of epochs or steps, so some would wait for ever.",
            "; ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans)),
            "Give `fit` the same arguments and data of the same size on every rank.",
        )


def _check_structures(structures: Sequence[Any]) -> None:
    if all(structure == structures[0] for structure in structures):
        return
    texts = [repr(structure) for structure in structures]
    rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    differences = [
        f"rank 0 has {ours!r} where rank {rank} has {theirs!r}"
        for ours, theirs in zip(_flat(structures[0]), _flat(structures[rank]), strict=False)
        if ours != theirs
    ] or [f"rank 0 has {len(_flat(structures[0]))} parts, rank {rank} has {len(_flat(structures[rank]))}"]
    raise MismatchError(
        "The ranks have different models.",
        differences[0],
        "Build and compile the same model on every rank: only files and printing belong under `if kd.is_chief():`.",
    )


def _flat(structure: Any) -> list[Any]:
    return [part for name, variables in structure for part in (name, *variables)]


def _broadcast(variables: Sequence[Any], backend: Backend) -> None:
    if backend.topology.size == 1:  # nobody to give a copy of what may be a large table
        return
    arrays = [np.asarray(variable.value) for variable in variables]
    for variable, array in zip(variables, backend.broadcast_arrays(arrays), strict=True):
        variable.assign(array)


def settle(model: keras.Model, backend: Backend, call: str, extra: Any = None) -> list[Any]:
    """Compares what all ranks have trained, and averages what each has collected, such as moving averages.

    Args:
        model: The distributed model.
        backend: How the ranks talk.
        call: What the user called.
        extra: Travels with the checksums.

    Returns:
        The `extra` of all ranks, in the order of rank.

    Raises:
        MismatchError: If the trained weights differ; the variables are named.
    """
    if backend.topology.size == 1:  # nobody whose weights could differ
        return [extra]
    trained, statistics = model.trainable_variables, _statistics(model)
    everyone = backend.all_gather_object(call, (checksums([*trained, *statistics]), extra))
    table = np.stack([sums for sums, _ in everyone])
    check_weights(trained, table[:, : len(trained)])
    columns = table[:, len(trained) :].T
    _average([variable for variable, column in zip(statistics, columns, strict=True) if _differ(column)], backend)
    return [extra for _, extra in everyone]


def check_weights(variables: Sequence[Any], table: np.ndarray) -> None:
    """Raises if any rank's weights differ from the others'.

    Args:
        variables: The variables, for their names.
        table: int64 checksums of shape `(ranks, variables)`.

    Raises:
        MismatchError: The same on every rank.
    """
    different = [index for index in range(table.shape[1]) if _differ(table[:, index])]
    if not different:
        return
    names = ", ".join(variables[index].path for index in different[:5])
    more = f" and {len(different) - 5} more" if len(different) > 5 else ""
    raise MismatchError(
        "The ranks hold different weights, so they no longer train one model.",
        f"{odd_ranks(table[:, different[0]])} differ(s) in {names}{more}",
        "Usual causes: a callback or loop that assigns weights on one rank only, or an optimizer that was made after "
        "`compile`. Do the same on every rank; wrap such an optimizer with kd.distribute(optimizer).",
    )


def _differ(column: np.ndarray) -> bool:
    return bool(np.any(column != column[0]))


def _statistics(model: keras.Model) -> list[Any]:
    """Variables that training changes but doesn't train, such as BatchNormalization's moving averages."""
    seeds = {id(generator.state) for generator in keras_random.seed_generators(model)}
    return [variable for variable in model.non_trainable_variables if id(variable) not in seeds]


def _average(variables: Sequence[Any], backend: Backend) -> None:
    """Averages floating variables over the ranks; of others the chief's value is taken."""
    if not variables:
        return
    everyone = backend.all_gather_object("the averaging of statistics", [np.asarray(v.value) for v in variables])
    for variable, *values in zip(variables, *everyone, strict=True):
        if keras.backend.is_float_dtype(variable.dtype):
            mean = np.mean([value.astype(np.float64) for value in values], axis=0)
            variable.assign(mean.astype(values[0].dtype))
        else:
            variable.assign(values[0])
