"""Checks in every step that the ranks agree on the data and the learning rate, without extra communication.

Each rank sends a row with the fingerprint of its global batch and its learning rate along with the gradients. If the
rows differ, the step stops on all ranks before it updates anything, and the error names rank and cause. An evaluation
or prediction sends nothing in its steps, so its fingerprints are compared at its end, before it returns.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist.errors import MismatchError, NotSupportedError

_MARK = "keras_dist: the ranks disagree"
_CONDITION = "keras_dist: replicas differ in the condition of an update"
_SHAPES = "keras_dist: the shares of a batch have predictions of different shapes"


@functools.cache
def agreement_of(size: int) -> Agreement:
    """Returns the one agreement of this process: models may share optimizers."""
    return Agreement(size)


class Agreement:
    """Compares the rows of all ranks inside a step, and explains afterwards what differed."""

    def __init__(self, size: int) -> None:
        with tf.device("CPU:0"), tf.init_scope():
            self._rows = tf.Variable(tf.zeros([size, 2]), trainable=False, name="keras_dist_rows")

    def row(self, fingerprint: Any, learning_rate: Any) -> Any:
        """Returns this rank's row, a float32 tensor of shape `(2,)`."""
        return tf.stack([tf.cast(fingerprint, tf.float32), tf.cast(learning_rate, tf.float32)])

    def check(self, rows: Any, tensors: Sequence[Any]) -> list[Any]:
        """Returns `tensors`, or fails if the rows differ."""
        are_equal = tf.reduce_all(tf.equal(rows, rows[:1]) | (tf.math.is_nan(rows) & tf.math.is_nan(rows[:1])))
        text = f"{_MARK} (a row per rank: fingerprint of its batch, learning rate)"

        def stop() -> Any:
            with tf.control_dependencies([self._rows.assign(rows)]):
                # A custom training loop raises this text; `fit` explains it.
                return tf.debugging.Assert(False, [text, rows], summarize=-1)

        with tf.control_dependencies([tf.cond(are_equal, lambda: tf.group(), stop)]):
            return [_identity(tensor) for tensor in tensors]

    def explain(self, error: BaseException) -> BaseException:
        """Returns the `MismatchError` behind an error of a step, or the error itself."""
        if not isinstance(error, tf.errors.InvalidArgumentError) or _MARK not in str(error):
            return error
        fingerprints, rates = self._rows.numpy().T
        if np.all((fingerprints == fingerprints[0]) | (np.isnan(fingerprints) & np.isnan(fingerprints[0]))):
            return MismatchError(
                "The ranks have different learning rates.",
                ", ".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates)),
                "Set the learning rate on every rank, not only on the chief (take it out of `if kd.is_chief():`), "
                "and from values that are the same on all ranks.",
            )
        return _different_data(fingerprints)


def check_shapes(shapes: Any, rows: Any) -> Any:
    """Returns `rows`, or fails unless `shapes`, a row for each share with its predictions' shape, are the same."""
    check = tf.debugging.Assert(tf.reduce_all(shapes == shapes[:1]), [_SHAPES, shapes], summarize=-1)
    with tf.control_dependencies([check]):
        return tf.identity(rows)


def check_condition(number: Any, replicas: int, condition: Any) -> Any:
    """Returns a bool tensor, or fails unless `number`, of the replicas on which it is true, is 0 or all."""
    check = tf.debugging.Assert((number == 0) | (number == replicas), [_CONDITION, number], summarize=-1)
    with tf.control_dependencies([check]):
        return tf.identity(condition)


def explain_check(error: BaseException) -> BaseException:
    """Returns the error behind one of `check_shapes` or `check_condition`, or the error itself."""
    text = str(error) if isinstance(error, tf.errors.InvalidArgumentError) else ""
    if _SHAPES in text:
        shapes = re.search(re.escape(_SHAPES) + r"\W*?(\[\[[\d\s\[\]]*\]\])", text)
        return NotSupportedError(
            "The predictions for the shares of a batch have different shapes, so they cannot be put together.",
            "shapes of an example's prediction, by share: " + (" ".join(shapes[1].split()) if shapes else "different"),
            "Let the shape not depend on the other examples of the batch: pad to a fixed length. Or predict on one "
            "rank, with a copy of the model that is not distributed.",
        )
    if _CONDITION in text:
        return MismatchError(
            "Some ranks would make an update and others would skip it, so some would wait forever.",
            "a tf.cond around the update of an optimizer, whose condition is true on some ranks only",
            "Compute the condition from what is the same on all ranks: from `kd.all_reduce(gradients)`, from the "
            "number of steps. keras.optimizers.LossScaleOptimizer skips steps with infinite gradients by itself.",
        )
    return error


class Seen(NamedTuple):
    """What the steps of a rank have computed with since the last comparison."""

    data: int = 0  # the fingerprint of all batches
    constants: Sequence[tuple[str, str, str]] = ()  # of the steps that were traced, see `tf_graphs.constants_of`


def check_seen(by_rank: Sequence[Seen]) -> None:
    """Raises `MismatchError`, the same on every rank, if their data or constants differ."""
    if any(seen.data != by_rank[0].data for seen in by_rank):
        raise _different_data(np.asarray([seen.data for seen in by_rank]))
    all_constants = [seen.constants for seen in by_rank]
    # Only types of which every rank has as many: the chief's step may also print or write summaries.
    types = [Counter(kind for _, kind, _ in constants) for constants in all_constants]
    common = {kind for kind, count in types[0].items() if all(counts[kind] == count for counts in types)}
    hashes = [Counter((kind, value) for _, kind, value in constants if kind in common) for constants in all_constants]
    if all(values == hashes[0] for values in hashes):
        return
    rank, others = next((rank, values) for rank, values in enumerate(hashes) if values != hashes[0])
    unknown = hashes[0] - others
    names = [f"{name} ({kind})" for name, kind, value in all_constants[0] if (kind, value) in unknown]
    raise MismatchError(
        "The ranks compute with different constants, so they no longer train the same model.",
        f"rank 0 and rank {rank} differ in {', '.join(itertools.islice(names, 3))}",
        "Usual causes: random numbers without a seed, or the order of a Python `set`, in a layer, a loss or a "
        "vocabulary. Make the constant the same on every rank (`sorted(...)`, a seed, kd.broadcast), or a weight.",
    )


def _identity(tensor: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(tensor.values), tensor.indices, tensor.dense_shape)
    return tf.identity(tensor)


def _different_data(fingerprints: np.ndarray) -> MismatchError:
    return MismatchError(
        "The ranks read different data, but every rank must pass the same data.",
        f"{differing_ranks(fingerprints)} of {len(fingerprints)} read a different batch than the rest "
        f"(fingerprints {', '.join(f'{int(value):06x}' for value in fingerprints)})",
        "Usual causes: a shuffle, augmentation or generator without the same seed on all ranks, an extra random "
        "operation on one rank, `deterministic=False`, files listed in a different order, data that depend on time "
        "or host. Set the seed, or let the chief read for all ranks: kd.distribute(model, data='chief'). If each rank "
        "reads its own shard, as after `dataset.shard(kd.size(), kd.rank())`: kd.distribute(model, data='sharded').",
    )


def differing_ranks(values: Sequence[Any] | np.ndarray) -> str:
    """Names the ranks whose value is not the most frequent one."""
    listed = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
    usual = max(listed, key=listed.count)
    ranks = [str(rank) for rank, value in enumerate(listed) if value != usual]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks)
