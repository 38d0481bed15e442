"""What a step assigns to variables by hand, and how the values of all shares make that of the whole batch.

- A value that does not depend on the share (a moving average of weights, a count of steps) is the same on all replicas.
- A value from the share is combined by the variable's `aggregation`: the changes are summed, or averaged by examples.
- Without an `aggregation` nobody can know how, and it is refused. A layer sees the whole batch (`whole_layers.py`), and
  Keras's own normalizations are averaged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_layers, tf_graphs
from keras_dist.compat.keras_model import attached
from keras_dist.data.shares import static_length
from keras_dist.errors import NotSupportedError
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Proof
from keras_dist.step.gathering import Exchange
from keras_dist.step.step import Step

COMBINED = ("sum", "mean")


@contextlib.contextmanager
def checked_assignments(model: keras.Model) -> Iterator[None]:
    """Refuses assignments of which nobody knows how to combine them, in this context. It sees those in a graph."""
    with contextlib.ExitStack() as stack:
        for variable in keras_layers.own_state(model):
            stack.enter_context(attached(variable, "assign", functools.partial(_assign, variable, variable.assign)))
        yield


def _assign(variable: Any, plain: Callable[[Any], Any], value: Any) -> Any:
    value, step = plain(value), step_module.current()
    if step is None:
        return value
    is_unknown = tf.executing_eagerly() or step.data is None
    if variable.aggregation in COMBINED:  # a static number of examples is a constant: it does not show in the graph
        step.own[id(variable)] = variable
    elif not is_unknown and not _depends_on(step, value) and not _counts(step, value):
        step.whole[id(variable)] = variable
    elif variable.aggregation == "none" and not is_unknown:
        raise NotSupportedError(
            "A step assigns a variable what it computes from its share of the batch. How the values of all shares make "
            "that of the whole batch can't be seen.",
            f"variable {variable.path!r} with aggregation='none'",
            "Assign it in the `call` of a layer, which then sees the whole batch; or create it with aggregation='sum' "
            "if the changes of the shares add up (a count), 'mean' if their mean over the examples is right.",
        )
    return value


def _depends_on(step: Step, value: Any) -> bool:
    """True if a value depends on the examples of the share, or it can't be seen in the step's own graph."""
    leaves = [leaf for leaf in tf.nest.flatten(step.data, expand_composites=True) if tf.is_tensor(leaf)]
    return any(leaf.graph is not value.graph for leaf in leaves) or not Proof(leaves).is_constant(value)


def _counts(step: Step, value: Any) -> bool:
    """True if a value is another one plus the number of examples in the share, which is a constant if it is static.

    If the share has one example, more likely steps are counted.
    """
    length = static_length(step.data)
    if length in (None, 1) or value.op.type not in ("Add", "AddV2"):
        return False
    return any(tf_graphs.constant_of(part) == length for part in value.op.inputs if part.shape.rank == 0)


@contextlib.contextmanager
def combined_assignments(exchange: Exchange, model: keras.Model, step: Step) -> Iterator[None]:
    """Combines what the replicas assign to variables with an `aggregation`, at the end of this context."""
    variables = [variable for variable in keras_layers.own_state(model) if variable.aggregation in COMBINED]
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, old in zip(variables, before, strict=True):
        if id(variable) in step.own:
            change = change_of(old, variable.value, step.dtype)
            weight = step.part if variable.aggregation == "mean" else tf.cast(step.count > 0, step.dtype)
            change = exchange.all_reduce_exact(tf.math.multiply_no_nan(change, weight), step.next_name("assigned"))
            variable.assign(old + tf.cast(_rounded(change, old), old.dtype))
            step.whole[id(variable)] = variable


def change_of(before: Any, after: Any, dtype: Any = tf.float64) -> Any:
    """Returns what was added to a value; nothing if both are infinite."""
    change = tf.cast(after, dtype) - tf.cast(before, dtype)
    return tf.where(after == before, tf.zeros_like(change), change)


def _rounded(change: Any, like: Any) -> Any:
    return tf.round(change) if like.dtype.is_integer else change
