"""What a step on a worker would do to variables, caught and sent home, where it is done exactly once."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_placement, tf_compat
from keras_dist.errors import NotSupportedError
from keras_dist.step import learning_rate


class Capture(keras.StatelessScope):
    """Catches what layers and metrics assign while it is entered.

    Args:
        given: Variables and the values they have in this step: metrics, random states.
        direct: Ids of variables that are assigned where they are: in asynchronous training, what is trained.
        counters: Ids of those among them that count steps, which are incremented in one operation.
        recorder: Knows what variables were before gradients were applied in this step.
    """

    def __init__(
        self,
        given: Sequence[tuple[Any, Any]],
        direct: frozenset[int] = frozenset(),
        counters: frozenset[int] = frozenset(),
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(list(given), collect_losses=True)
        self.updated: dict[int, Any] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._direct = direct
        self._counters = counters
        self._recorder = recorder

    def get_current_value(self, variable: Any) -> Any:
        before = None if self._recorder is None else self._recorder.read(variable)
        value = super().get_current_value(variable)
        value = before if value is None else value
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
            _check_graph(self._graph, "assigns a variable", f"variable {variable.path!r}")
            self.updated[id(variable)] = variable
            if self._recorder is not None:
                self._recorder.assigned.add(id(variable))
            super().add_update(update)


@dataclasses.dataclass
class Part:
    """A part of a training step, up to where it reads what it has applied gradients to.

    Args:
        applied: Optimizers, the gradients they are given, and for which variables.
        kept: Variables that are changed then, and were read before.
        is_last: False if the step goes on.
    """

    applied: list[tuple[Any, Sequence[Any], Sequence[Any] | None]] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)
    is_last: bool = True


class Recorder:
    """Catches the gradients that a step applies.

    Shares can't wait for each other within a step. So a step that reads weights after it has applied gradients to them
    (a GAN's) is run once for each of its parts, from the start: parts before this one find the weights that they have
    found before.

    Args:
        variables: Those of the model that are trained.
        before: The parts of this step that were applied already.
        values: Of each, the values that what it has kept had before.
    """

    def __init__(
        self, variables: Sequence[Any], before: Sequence[Part] = (), values: Sequence[Sequence[Any]] = ()
    ) -> None:
        self.part = Part()
        self._graph = tf.compat.v1.get_default_graph()
        self.assigned: set[int] = set()  # ids of what the step itself has given a value
        self._variables = variables
        # Variables, since the step may take gradients with respect to them.
        self._before = [
            {
                id(variable): tf_compat.temporary_variable(value, variable.trainable)
                for variable, value in zip(part.kept, its, strict=True)
            }
            for part, its in zip(before, values, strict=True)
        ]
        self._place = 0  # in which part the step is
        self._changed: dict[int, Any] = {}  # by this part
        self._read: set[int] = set()

    def record(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Notes a call of `apply`.

        Raises:
            NotSupportedError: If the step has assigned one of the variables before, or does this on a condition.
        """
        _check_graph(self._graph, "applies gradients", f"optimizer {optimizer.name!r}")
        for variable in self._variables if variables is None else variables:
            if id(variable) in self.assigned:
                raise NotSupportedError(
                    "The step assigns a weight and applies gradients to it afterwards. With parameter servers in "
                    "'sync' mode gradients are applied first.",
                    f"variable {variable.path!r}",
                    "Assign it after `apply`, or use kd.ParameterServer(mode='async').",
                )
        constant = learning_rate.variable_of(optimizer)
        changed = [*(self._variables if variables is None else variables), *optimizer.variables]
        self._changed.update({id(variable): variable for variable in changed if variable is not constant})
        if self._place == len(self._before):
            self.part.applied.append((optimizer, gradients, variables))

    def read(self, variable: Any) -> Any:
        """Returns what a variable was before this step changed it, `None` if it is still that."""
        if id(variable) in self._changed:
            if self._place == len(self._before):
                self.part.is_last = False
                self.part.kept = [changed for key, changed in self._changed.items() if key in self._read]
            self._place += 1
            self._changed = {}
        self._read.add(id(variable))
        return next((values[id(variable)] for values in self._before[self._place :] if id(variable) in values), None)


def _check_graph(graph: Any, what: str, who: str) -> None:
    """Raises `NotSupportedError` for what a step does in a graph of its own: nothing of it can be sent home."""
    if tf.compat.v1.get_default_graph() is not graph:
        raise NotSupportedError(
            f"The step {what} inside `tf.cond`, `tf.while_loop`, `tf.map_fn` or a `tf.function`. With parameter "
            "servers all that it changes has to be known to the step itself.",
            who,
            "Do it in the step itself: `variable.assign(tf.where(condition, value, variable))`.",
        )


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
