"""What a step of a custom loop assigns to Keras variables, combined over the ranks: metrics, statistics of layers.

The rule is that of the replicas of one process, by the variable's `aggregation`. What a rank has changed counts in full
if the aggregation is `"sum"` (metrics), otherwise by its examples (BatchNormalization's moving averages). Of integers
and of `"only_first_replica"` the first rank's change counts. All changes travel in one reduction at the end of the
step. So the variables are the same on all ranks between steps, and `metric.result()` is right on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, keras_random, keras_strategy, tf_graphs
from keras_dist.errors import NotSupportedError
from keras_dist.step.assigned import change_of
from keras_dist.step.step import Step


@contextlib.contextmanager
def combined(backend: Backend, step: Step) -> Iterator[None]:
    """Combines what is assigned in this context, other than by distributed optimizers. Every rank must enter it.

    Raises:
        NotSupportedError: If a variable is assigned in a `tf.function` inside the step, which need not be traced again.
    """
    graph = tf_graphs.current()
    before: dict[int, tuple[Any, Any]] = {}

    def observe(variable: Any) -> None:
        # The seeds of all ranks go on alike.
        if variable.trainable or keras_random.is_seed(variable) or id(variable) in before:
            return
        _check_graph(graph, variable)
        before[id(variable)] = variable, tf.identity(keras_model.backing(variable))

    with keras_model.observed(observe):
        yield
    if before:
        _combine(backend, step, list(before.values()))


def _check_graph(graph: Any, variable: Any) -> None:
    if tf_graphs.current() is not graph:
        raise NotSupportedError(
            "The step of a custom training loop assigns a variable inside a tf.function, tf.cond or tf.while_loop, "
            "where it cannot be combined over the ranks.",
            f"variable {variable.path!r}",
            "Update metrics in the step itself, and put @tf.function around the function that calls kd.run.",
        )


def _combine(backend: Backend, step: Step, before: list[tuple[Any, Any]]) -> None:
    changes = [_weighted_change(backend, step, variable, value) for variable, value in before]
    flat = [tf.reshape(change, [-1]) for change in changes]
    total = backend.all_reduce_exact(tf.concat(flat, 0), step.next_name("loop_state"))
    sums = tf.split(total, [tf.size(change) for change in flat], num=len(flat))
    for (variable, value), change in zip(before, sums, strict=True):
        # Summed in float64, then rounded once.
        wide = tf.cast(value, tf.float64) + tf.reshape(change, tf.shape(value))
        keras_model.backing(variable).assign(tf.cast(wide, value.dtype))


def _weighted_change(backend: Backend, step: Step, variable: Any, value: Any) -> Any:
    change = change_of(value, tf.identity(keras_model.backing(variable)))
    # Not 0 × NaN: an empty share may have computed NaN.
    return tf.math.multiply_no_nan(change, _weight(backend, step, variable))


def _weight(backend: Backend, step: Step, variable: Any) -> Any:
    if variable.aggregation == "sum":
        return tf.cast(step.count > 0, tf.float64)
    if variable.aggregation == "only_first_replica" or not keras_strategy.is_float(variable):
        return tf.constant(float(backend.topology.is_chief), tf.float64)
    return tf.cast(step.part, tf.float64)
