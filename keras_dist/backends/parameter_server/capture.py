"""Catches what a step on a worker would do to variables, so that it is done exactly once, by the coordinator."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, keras_optimizers, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.errors import NotSupportedError
from keras_dist.step import learning_rate
from keras_dist.step import step as step_module
from keras_dist.step.gradients import outside_of_a_step
from keras_dist.step.optimizer import build_optimizer, parts_of

_ATTACHED = "_keras_dist_recorded"


class Capture(keras.StatelessScope):
    """Catches what layers and metrics assign while it is entered.

    Args:
        given: Variables and their values in this step: metrics, random states.
        direct: Ids of variables that are assigned where they are: in asynchronous training, what is trained. What an
            optimizer assigns is assigned there too, its counter of steps in one operation.
        recorder: Knows the values that variables had before this step applied gradients.
    """

    def __init__(
        self,
        given: Sequence[tuple[Any, Any]],
        direct: frozenset[int] = frozenset(),
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(list(given), collect_losses=True)
        self.updated: dict[int, Any] = {}
        self.whole: set[int] = set()  # ids of what was assigned outside of a step on a share: of the whole batch
        self._graph = tf.compat.v1.get_default_graph()
        self._direct = direct
        self._recorder = recorder

    def get_current_value(self, variable: Any) -> Any:
        before = None if self._recorder is None else self._recorder.read(variable)
        value = super().get_current_value(variable)
        value = before if value is None else value
        # Regularizers ask the scope itself.
        return keras_model.backing(variable) if value is None else value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        optimizer = keras_optimizers.applying()
        if optimizer is not None and any(variable is counter for counter in _counters(optimizer)):
            backing = keras_model.backing(variable)
            backing.assign_add(tf.ones([], backing.dtype))
        elif optimizer is not None or id(variable) in self._direct:
            keras_model.backing(variable).assign(value)
        else:
            _check_graph(self._graph, "assigns a variable", f"variable {variable.path!r}")
            self.updated[id(variable)] = variable
            (self.whole.add if step_module.current() is None else self.whole.discard)(id(variable))
            if self._recorder is not None:
                self._recorder.assigned.add(id(variable))
            super().add_update((variable, tf.stop_gradient(value)))  # none flows through a variable that is assigned


def _counters(optimizer: Any) -> list[Any]:
    return [getattr(part, keras_model.STEP_COUNTER) for part in parts_of(optimizer)]


@dataclasses.dataclass
class Phase:
    """A phase of a training step: it ends where the step reads what it has applied gradients to.

    Args:
        applied: Optimizers, the gradients that they are given, and for which variables.
        kept: Variables that this phase has read and that its gradients change: later phases need the old values.
        is_last: False if the step goes on.
    """

    applied: list[tuple[Any, Sequence[Any], Sequence[Any] | None]] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)
    is_last: bool = True


class Recorder:
    """Records the gradients that a step applies.

    Shares can't wait for each other within a step. So a step that reads weights after it has applied gradients to them
    (a GAN's) is run once for each of its phases, from the start. The phases before this one find the weights as they
    were then.

    Args:
        trained: The variables of the model that are trained.
        phases: The phases of this step that were applied already.
        values: For each of them the values of what it has kept.
    """

    def __init__(
        self, trained: Sequence[Any], phases: Sequence[Phase] = (), values: Sequence[Sequence[Any]] = ()
    ) -> None:
        self.phase = Phase()
        self.assigned: set[int] = set()  # ids of the variables that the step itself has assigned
        self._graph = tf.compat.v1.get_default_graph()
        self._trained = trained
        # Variables, since the step may take gradients with respect to them.
        self._before = [
            {
                id(variable): tf_compat.temporary_variable(value, variable.trainable)
                for variable, value in zip(phase.kept, kept, strict=True)
            }
            for phase, kept in zip(phases, values, strict=True)
        ]
        self._index = 0  # of the phase in which the step is
        self._changed: dict[int, Any] = {}  # by this phase
        self._read: set[int] = set()

    def record(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Notes a call of `apply`.

        Raises:
            NotSupportedError: If the step has assigned one of the variables before, or the call is on a condition.
        """
        _check_graph(self._graph, "applies gradients", f"optimizer {optimizer.name!r}")
        targets = self._trained if variables is None else variables
        for variable in targets:
            if id(variable) in self.assigned:
                raise NotSupportedError(
                    "The step assigns a weight and applies gradients to it afterwards. With parameter servers in "
                    "'sync' mode gradients are applied first.",
                    f"variable {variable.path!r}",
                    "Assign it after `apply`, or use kd.ParameterServer(mode='async').",
                )
        constant = learning_rate.variable_of(optimizer)
        changed = [*targets, *optimizer.variables]
        self._changed.update({id(variable): variable for variable in changed if variable is not constant})
        if self._index == len(self._before):
            self.phase.applied.append((optimizer, gradients, variables))

    def read(self, variable: Any) -> Any:
        """Returns the value of a variable before this step changed it, `None` if it has that value still."""
        if id(variable) in self._changed:
            if self._index == len(self._before):
                self.phase.is_last = False
                self.phase.kept = [changed for key, changed in self._changed.items() if key in self._read]
            self._index += 1
            self._changed = {}
        self._read.add(id(variable))
        return next((values[id(variable)] for values in self._before[self._index :] if id(variable) in values), None)


def _check_graph(graph: Any, what: str, received: str) -> None:
    """Raises `NotSupportedError` for what a step does in an inner graph: nothing of it can be returned."""
    if tf.compat.v1.get_default_graph() is not graph:
        raise NotSupportedError(
            f"The step {what} inside `tf.cond`, `tf.while_loop`, `tf.map_fn` or a `tf.function`. With parameter "
            "servers the step itself must make all changes.",
            received,
            "Do it in the step itself: `variable.assign(tf.where(condition, value, variable))`.",
        )


_CURRENT: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("keras_dist_recorder", default=None)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Makes optimizers give their gradients to a recorder."""
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def attach_recorder(optimizer: Any, prepare: Callable[[Any], None]) -> Callable[..., Any]:
    """Makes an optimizer give its gradients to the recorder of a step; returns its plain `apply`.

    Calling it twice is the same as once.

    Args:
        optimizer: The optimizer.
        prepare: Makes it ready for steps without a recorder.
    """
    attached: Callable[..., Any] | None = getattr(optimizer, _ATTACHED, None)
    if attached is not None:
        return attached
    plain = keras_optimizers.plain_apply(optimizer)

    def build(variables: Any) -> None:
        if not optimizer.built and variables is not None:  # a custom step with several optimizers, a custom loop
            build_optimizer(optimizer, variables)

    def built(grads: Any, trainable_variables: Any = None) -> Any:
        build(trainable_variables)
        return plain(grads, trainable_variables)

    attach(optimizer, "apply", built)
    prepare(optimizer)
    unrecorded = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        recorder = _CURRENT.get()
        if recorder is None:
            return unrecorded(grads, trainable_variables)
        build(trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        return recorder.record(optimizer, list(grads), variables)

    attach(optimizer, _ATTACHED, plain)
    attach(optimizer, "apply", apply)
    return plain


def check_updates(optimizer: Any) -> None:
    """Makes an optimizer refuse to update outside of a step: the coordinator would train alone."""
    plain = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        if step_module.current() is None and not isinstance(keras_model.stateless_scope(), Capture):
            raise outside_of_a_step(f"the update of the optimizer {optimizer.name!r}")
        return plain(grads, trainable_variables)

    attach(optimizer, "apply", apply)
