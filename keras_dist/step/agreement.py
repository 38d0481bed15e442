"""What the ranks have to agree on in every step, checked in the traffic that the step has anyway.

Each rank's row carries the fingerprint of the global batch that it read and the learning rate it is about to
use. If they differ, nothing is applied: the step stops on all ranks, and the error names rank and cause.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.errors import MismatchError

_MARK = "keras_dist: the ranks disagree"
_COLUMNS = " (a row for each rank: fingerprint of its batch, learning rate)"
_FINGERPRINT, _LEARNING_RATE = range(2)


@functools.cache
def agreement_of(size: int) -> Agreement:
    """Returns the one agreement of this process: optimizers may be shared between models."""
    return Agreement(size)


class Agreement:
    """Checks the rows of all ranks inside a step, and explains afterwards what was different.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        with tf.device("CPU:0"), tf.init_scope():
            self._rows = tf.Variable(tf.zeros([size, 2]), trainable=False, name="keras_dist_rows")

    def row(self, fingerprint: Any, learning_rate: Any) -> Any:
        """Returns what this rank tells the others: a float32 tensor of shape `(2,)`."""
        return tf.stack([tf.cast(fingerprint, tf.float32), tf.cast(learning_rate, tf.float32)])

    def check(self, rows: Any, tensors: Sequence[Any]) -> list[Any]:
        """Returns `tensors`, which can be had only if all rows are alike."""
        alike = tf.reduce_all(tf.equal(rows, rows[:1]) | (tf.math.is_nan(rows) & tf.math.is_nan(rows[:1])))

        def stop() -> Any:
            with tf.control_dependencies([self._rows.assign(rows)]):
                # A loop of the user's own shows this text as it is; `fit` explains it.
                return tf.debugging.Assert(False, [_MARK + _COLUMNS, rows], summarize=-1)

        with tf.control_dependencies([tf.cond(alike, lambda: tf.group(), stop)]):
            return [_identity(tensor) for tensor in tensors]

    def explain(self, error: BaseException) -> BaseException:
        """Returns the `MismatchError` behind an error of a step, or the error itself."""
        if not isinstance(error, tf.errors.InvalidArgumentError) or _MARK not in str(error):
            return error
        rows = self._rows.numpy()
        if not _alike(rows[:, _FINGERPRINT]):
            return _different_data(rows[:, _FINGERPRINT])
        return _different_learning_rates(rows[:, _LEARNING_RATE])


def _identity(tensor: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(tensor.values), tensor.indices, tensor.dense_shape)
    return tf.identity(tensor)


def _alike(values: np.ndarray) -> bool:
    return bool(np.all((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))))


def _different_data(fingerprints: np.ndarray) -> MismatchError:
    odd = odd_ranks(fingerprints)
    return MismatchError(
        "The ranks read different data, although each must pass the same data for keras_dist to split them.",
        f"{odd} of {len(fingerprints)} read another batch than the rest "
        f"(fingerprints {', '.join(f'{int(value):06x}' for value in fingerprints)})",
        "Usual causes: a shuffle, augmentation or generator that isn't seeded alike on all ranks, one extra random "
        "operation on one rank, `deterministic=False`, files listed in another order, data that depend on time or "
        "host. Seed it, or let the chief read for all: kd.distribute(model, data='chief').",
    )


def _different_learning_rates(rates: np.ndarray) -> MismatchError:
    return MismatchError(
        "The ranks have different learning rates.",
        ", ".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates)),
        "Set the learning rate on every rank, not only on the chief (take it out of `if kd.is_chief():`), "
        "and from values that are alike on all ranks.",
    )


def odd_ranks(values: Sequence[Any] | np.ndarray) -> str:
    """Names the ranks whose value is not the most frequent one."""
    listed = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
    usual = max(listed, key=listed.count)
    odd = [str(rank) for rank, value in enumerate(listed) if value != usual]
    return ("rank " if len(odd) == 1 else "ranks ") + ", ".join(odd)
