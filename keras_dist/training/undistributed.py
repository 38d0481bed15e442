"""What a script trains without `kd.distribute`: nothing would fail, but the ranks share no work."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import MutableSet, Sequence
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_optimizers
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.gradients import outside_of_a_step

ATTACHED = "_keras_dist"  # the attribute of a distributed model
_REMEDY = "Add `model = kd.distribute(model)` before `model.compile`"
DISTRIBUTED: MutableSet[keras.Model] = weakref.WeakSet()
_REMEDY_IN_A_LOOP = f"{_REMEDY}; in a custom loop `optimizer = kd.distribute(optimizer)`"


def watch(backend: Backend) -> None:
    """Looks at everything that the script trains.

    The chief warns once, at the first `fit` of a model that is not distributed, or when the job ends. A loop of the
    script's own that updates a distributed model, but shares nothing, gets an error.

    Args:
        backend: The backend that has just started.
    """
    if backend.num_replicas == 1 and not backend.has_processes:
        return
    look = _Look(backend)
    keras_fit.before_training(look.before_training)
    keras_optimizers.before_updates(look.before_update)
    if backend.topology.is_chief:
        atexit.register(look.at_exit)


class _Look:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_warned = False
        self._in_fit: MutableSet[Any] = weakref.WeakSet()  # optimizers of models that Keras trains, as warned

    def before_training(self, model: keras.Model) -> None:
        if hasattr(model, ATTACHED):
            return
        if (optimizer := getattr(model, "optimizer", None)) is not None:
            self._in_fit.add(optimizer)
        if not self._is_warned:
            self._warn(
                "the model %r is not distributed, so %s. %s. If this is intended, ignore this line.",
                model.name, self._consequence(), _REMEDY,
            )  # fmt: skip

    def before_update(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """An optimizer that is distributed has its own check, and one that a step applies is distributed there."""
        if self._backend.num_replicas == 1 or step_module.current() is not None or optimizer in self._in_fit:
            return
        updated = set(map(id, variables))
        if any(id(variable) in updated for model in DISTRIBUTED for variable in model.trainable_variables):
            raise outside_of_a_step(f"the update of a distributed model by the optimizer {optimizer.name!r}")

    def at_exit(self) -> None:
        """A job that failed has another message, and ranks may divide the work themselves, by `kd.rank()`."""
        if not (self._is_warned or self._backend.is_used or hasattr(sys, "last_value")):
            self._warn("nothing was distributed, so %s. %s.", self._consequence(), _REMEDY_IN_A_LOOP)

    def _consequence(self) -> str:
        size = self._backend.topology.size
        return f"each of the {size} ranks does the whole work alone" if size > 1 else "the replicas share no work"

    def _warn(self, text: str, *args: object) -> None:
        self._is_warned = True
        if self._backend.topology.is_chief:
            logger().warning(text, *args)
