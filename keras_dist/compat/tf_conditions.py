"""`tf.cond` with an update in a branch; Python's `if` in a `tf.function` becomes one. TensorFlow 2.20, 2.21, 2026-11.

`tests/unit/test_tf_compat.py` fails when it no longer goes through these names.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import cond as cond_module

from keras_dist.compat import keras_optimizers

_IS_IN_UNCHECKED_BRANCH = contextvars.ContextVar("keras_dist_branch", default=False)


class _Reduces(Exception):
    """A branch reduces over the ranks."""


def note_reduction() -> None:
    """Called before each reduction: in a branch that only some ranks may take, the others would wait for ever."""
    if _IS_IN_UNCHECKED_BRANCH.get():
        raise _Reduces


@contextlib.contextmanager
def checked_conditions(check: Callable[[Any], Any]) -> Iterator[None]:
    """Passes the predicate of each `tf.cond` that reduces in a branch through `check`, in this context.

    Args:
        check: Takes a bool tensor and returns it, once it is known to be the same on all ranks.
    """
    plain = cond_module.cond

    def traced(is_unchecked: bool, *args: Any, **kwargs: Any) -> Any:
        token = _IS_IN_UNCHECKED_BRANCH.set(is_unchecked)
        try:
            return plain(*args, **kwargs)
        finally:
            _IS_IN_UNCHECKED_BRANCH.reset(token)

    def cond(pred: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or keras_optimizers.applying() is not None:  # an optimizer's own are the same on all
            return plain(pred, *args, **kwargs)
        try:
            return traced(True, pred, *args, **kwargs)
        except _Reduces:
            return traced(False, check(pred), *args, **kwargs)

    tf.cond = cond_module.cond = cond
    try:
        yield
    finally:
        tf.cond = cond_module.cond = plain
