"""Copies of a variable on other devices, so that none reads it across devices. TensorFlow 2.21, 2026-11.

Whatever assigns the variable assigns its copies: the methods of the variable object are wrapped, since TensorFlow's own
mirrored variables are another class, which Keras's code for one process does not know.
`tests/unit/test_tf_copies.py` fails when one of the private names changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_compat

_COPIES = "_keras_dist_copies"
# All methods that change a variable. `tf.train.Checkpoint` calls the last one.
WRITES = (
    "assign", "assign_add", "assign_sub", "count_up_to", "batch_scatter_update", "scatter_add", "scatter_div",
    "scatter_max", "scatter_min", "scatter_mul", "scatter_sub", "scatter_update", "scatter_nd_add", "scatter_nd_max",
    "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update", "_strided_slice_assign", "_restore_from_tensors",
)  # fmt: skip

_FOLLOW: contextvars.ContextVar[bool] = contextvars.ContextVar("keras_dist_copies_follow", default=True)


@contextlib.contextmanager
def following(follow: bool) -> Iterator[None]:
    """In this context copies are assigned with their variable, or not: each device then updates its own."""
    token = _FOLLOW.set(follow)
    try:
        yield
    finally:
        _FOLLOW.reset(token)


def existing_copy(variable: tf.Variable, device: str) -> Any:
    """Returns the copy of a variable on a device, or the variable itself if it has none there."""
    return vars(variable).get(_COPIES, {}).get(device, variable)


def copy_on(variable: tf.Variable, device: str) -> Any:
    """Returns the copy of a variable on a device, which is made if there is none.

    Args:
        variable: An ordinary variable.
        device: The full name of the device.
    """
    copies = vars(variable).get(_COPIES)
    if copies is None:
        copies = {}
        setattr(variable, _COPIES, copies)
        for name in WRITES:
            setattr(variable, name, _followed(variable, getattr(variable, name), copies))
    if device not in copies:
        with tf.init_scope(), tf_compat.variables_made_by(), tf.device(device):
            copy = tf.Variable(variable.read_value(), trainable=variable.trainable, name="copy")
        tf_compat.copy_identity(copy, of=variable)
        copies[device] = copy
    return copies[device]


def _followed(variable: tf.Variable, plain: Callable[..., Any], copies: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def write(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if _FOLLOW.get():
            for copy in copies.values():
                copy.assign(variable.read_value())
        return result

    return write
