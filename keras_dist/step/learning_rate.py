"""Reads and scales the learning rates of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.compat.keras_model import attach
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import logger

RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}
_SCALED_BY = "_keras_dist_scaled_by"
# The arguments of Keras's schedules that are rates. The value of a schedule is proportional to them.
_RATES = {
    "CosineDecay": ("initial_learning_rate", "warmup_target"),
    "CosineDecayRestarts": ("initial_learning_rate",),
    "ExponentialDecay": ("initial_learning_rate",),
    "InverseTimeDecay": ("initial_learning_rate",),
    "PiecewiseConstantDecay": ("values",),
    "PolynomialDecay": ("initial_learning_rate", "end_learning_rate"),
}


def variable_of(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's learning rate, `None` if the rate is a schedule."""
    rate = getattr(optimizer, "learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def sum_of(optimizer: Any) -> Any:
    """Returns the learning rate of an optimizer, or the sum of those in a `MultiOptimizer`, which has none itself."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        return optimizer.learning_rate
    return sum(keras.ops.cast(part.learning_rate, "float32") for part in parts)


def scale(optimizer: keras.optimizers.Optimizer, rule: str, size: int) -> None:
    """Scales the learning rate by the number of replicas. A second call does nothing.

    An optimizer that has made steps keeps its rate: if it was loaded, the rate may have been scaled before it was
    saved, and a plain Keras file does not say so.

    Args:
        optimizer: Any Keras optimizer.
        rule: One of `RULES`.
        size: Number of replicas.

    Raises:
        ConfigurationError: If the rate was scaled by another rule.
        NotSupportedError: If the rate is neither a number nor one of Keras's schedules.
    """
    before = getattr(optimizer, _SCALED_BY, None)
    if before not in (None, rule):
        raise ConfigurationError(
            "The learning rate of this optimizer was already scaled by another rule.",
            f"scale_learning_rate={rule!r} after {before!r}",
            "Call kd.distribute with one rule, or compile with a new optimizer.",
        )
    if before is not None:
        return
    if (steps := int(optimizer.iterations.numpy())) > 0:
        logger().warning("the optimizer has already made %d steps: its learning rate is not scaled", steps)
    elif (variable := variable_of(optimizer)) is not None:
        variable.assign(variable * RULES[rule](size))
    else:
        optimizer.learning_rate = _scaled_schedule(optimizer, RULES[rule](size))
    attach(optimizer, _SCALED_BY, rule)


def _scaled_schedule(optimizer: Any, factor: float) -> Any:
    """Returns a schedule of the same class with scaled rates, so that saved files do not need keras_dist."""
    try:
        config = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
        rates = _RATES[config["class_name"]] if config["module"] == "keras.optimizers.schedules" else ()
    except (KeyError, TypeError, NotImplementedError):
        rates = ()
    if not rates:
        raise NotSupportedError(
            "This learning rate cannot be scaled: it is neither a number nor one of Keras's schedules.",
            f"an optimizer {optimizer.name!r} with another schedule or function",
            "Leave `scale_learning_rate` out, and multiply by kd.num_replicas() inside your schedule.",
        )
    scaled = {name: _times(config["config"][name], factor) for name in rates}
    return keras.optimizers.schedules.deserialize({**config, "config": {**config["config"], **scaled}})


def _times(rates: Any, factor: float) -> Any:
    if rates is None:
        return None
    return [rate * factor for rate in rates] if isinstance(rates, list | tuple) else rates * factor
