"""What TensorFlow says when the other end of a connection has gone, or was replaced."""

from __future__ import annotations

import tensorflow as tf

_LOSS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_REPLACED = (
    "Unable to find a context_id", "unknown device", "remote_handle", "does not exist", "Primary device is not remote",
    "is neither a type of a primitive operation", "Client for target",
)  # fmt: skip


def may_be_loss(error: BaseException) -> bool:
    """True if an error may come from a process that was lost, or replaced."""
    if isinstance(error, _LOSS):
        return True
    text = str(error)
    return isinstance(error, tf.errors.OpError) and any(sign in text for sign in _REPLACED)
