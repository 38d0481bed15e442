"""What a step on a worker would do to variables, caught and sent home, where it is done exactly once."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends import keras_placement
from keras_dist.errors import NotSupportedError


class Capture(keras.StatelessScope):
    """Catches what layers and metrics assign while it is entered.

    Args:
        given: Variables and the values they have in this step: metrics, random states.
        direct: Ids of variables that are assigned where they are: in asynchronous training, what is trained.
        counters: Ids of those among them that count steps, which are incremented in one operation.
    """

    def __init__(
        self,
        given: Sequence[tuple[Any, Any]],
        direct: frozenset[int] = frozenset(),
        counters: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(list(given), collect_losses=True)
        self.updated: dict[int, Any] = {}
        self._direct = direct
        self._counters = counters
        self._stale: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self._stale:
            raise NotSupportedError(
                "The step reads weights after it has applied gradients to them, but with parameter servers in 'sync' "
                "mode they are applied when all workers are done with the step.",
                f"variable {variable.path!r}",
                "Use kd.ParameterServer(mode='async'), or a backend that reduces in the step: horovod, multi_worker.",
            )
        value = super().get_current_value(variable)
        # Regularizers ask the scope itself.
        return keras_placement.backing(variable) if value is None else value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self._counters:
            backing = keras_placement.backing(variable)
            backing.assign_add(tf.ones([], backing.dtype))
        elif id(variable) in self._direct:
            keras_placement.backing(variable).assign(value)
        else:
            self.updated[id(variable)] = variable
            super().add_update(update)

    def make_stale(self, variables: Sequence[Any]) -> None:
        """Notes that variables will have other values once the step is over."""
        self._stale.update(id(variable) for variable in variables)


class Recorder:
    """Catches the gradients that a step applies.

    Args:
        capture: What else the step does.
        variables: Those of the model that are trained.
    """

    def __init__(self, capture: Capture, variables: Sequence[Any]) -> None:
        self.applied: list[tuple[Any, Sequence[Any], Sequence[Any] | None]] = []
        self._capture = capture
        self._variables = variables

    def record(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Notes a call of `apply`."""
        self._capture.make_stale(self._variables if variables is None else variables)
        self.applied.append((optimizer, gradients, variables))


_CURRENT: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("keras_dist_recorder", default=None)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Lets optimizers hand their gradients to a recorder."""
    token = _CURRENT.set(recorder)
    try:
        yield recorder
    finally:
        _CURRENT.reset(token)


def current() -> Recorder | None:
    """Returns the recorder of the step that is being traced, `None` outside of one."""
    return _CURRENT.get()
