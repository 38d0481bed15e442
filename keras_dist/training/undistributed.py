"""Warns if a script trains without `kd.distribute`: nothing fails, but the ranks share no work."""

from __future__ import annotations

import atexit
import sys

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit
from keras_dist.logging import logger

ATTACHED = "_keras_dist"  # the attribute of a distributed model
_REMEDY = "Add `model = kd.distribute(model)` before `model.compile`"
_REMEDY_IN_A_LOOP = f"{_REMEDY}; in a custom loop `optimizer = kd.distribute(optimizer)`"


def watch(backend: Backend) -> None:
    """Warns once, on the chief: at the first `fit` of a model that is not distributed, or when the job ends.

    Args:
        backend: The backend that has just started.
    """
    is_shared = backend.num_replicas > 1 or backend.has_processes
    if is_shared and backend.topology.is_chief:
        warning = _Warning(backend)
        keras_fit.before_training(warning.before_training)
        atexit.register(warning.at_exit)


class _Warning:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_given = False

    def before_training(self, model: keras.Model) -> None:
        if not self._is_given and not hasattr(model, ATTACHED):
            self._warn(
                "the model %r is not distributed, so %s. %s. If this is intended, ignore this line.",
                model.name, self._consequence(), _REMEDY,
            )  # fmt: skip

    def at_exit(self) -> None:
        """A job that failed has another message, and ranks may divide the work themselves, by `kd.rank()`."""
        if not (self._is_given or self._backend.is_used or hasattr(sys, "last_value")):
            self._warn("nothing was distributed, so %s. %s.", self._consequence(), _REMEDY_IN_A_LOOP)

    def _consequence(self) -> str:
        size = self._backend.topology.size
        return f"each of the {size} ranks does the whole work alone" if size > 1 else "the replicas share no work"

    def _warn(self, text: str, *args: object) -> None:
        self._is_given = True
        logger().warning(text, *args)
