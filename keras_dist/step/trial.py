"""A step that is run to look at what it computes: everything that it assigns is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.compat import keras_model, keras_optimizers, tf_graphs
from keras_dist.compat.keras_model import Attributes
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import build_at_once


class Trial:
    """Runs functions from the same state.

    Args:
        others: Handles of variables that eager functions may change, and that are not Keras's.
        attributes: What else they may change.
    """

    def __init__(self, others: Sequence[Any] = (), attributes: Attributes | None = None) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}  # of eager steps
        self._others = [(handle, tf_graphs.read_handle(handle)) for handle in others]
        self.attributes = attributes or Attributes([])
        self._held = self.attributes.now()
        self.left: Any = None  # what the last function has left in the attributes

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function, and undoes what it changes.

        Args:
            function: Returns a structure of tensors.
        """
        if tf.executing_eagerly():
            return self._run_eagerly(function)
        concrete = tf.function(function, autograph=False).get_concrete_function()
        handles = tf_graphs.captured_variables(concrete.graph)
        before = [(handle, tf_graphs.read_handle(handle)) for handle in handles]
        outputs = concrete()
        with tf.control_dependencies([leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]):
            for handle, value in before:
                tf_graphs.assign_handle(handle, value)
        return outputs

    def _run_eagerly(self, function: Callable[[], Any]) -> Any:
        try:
            with keras_model.observed(self.note):
                return function()
        finally:
            for variable, value in self._before.values():
                keras_model.backing(variable).assign(value)
            for handle, value in self._others:
                tf_graphs.assign_handle(handle, value)
            self.left = self.attributes.now()
            self.attributes.set(self._held)

    @contextlib.contextmanager
    def beginning_with(self, held: Any) -> Iterator[None]:
        """Runs eager functions from other attributes in this context, unless that is `None`: what one has `left`."""
        self.attributes.set(held or self._held)
        try:
            yield
        finally:
            self.attributes.set(self._held)

    def applied(self) -> list[Any]:
        """Returns a list for `Step.applied`. What is about to be updated is noted."""
        return _Applied(self)

    def note(self, variable: Any) -> None:
        """Notes the value of a Keras variable that an eager step is about to change."""
        if tf.executing_eagerly() and id(variable) not in self._before:
            self._before[id(variable)] = variable, tf.identity(keras_model.backing(variable))


class _Applied(list[Any]):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial
        self._graph = tf_graphs.current()

    def append(self, update: tuple[Any, Any, Any]) -> None:
        optimizer, _, variables = update
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            return  # in a tf.cond: nothing of it can be returned; its effect on the variables can be seen
        if tf.executing_eagerly():
            build_at_once(optimizer, variables)
            for variable in (*keras_optimizers.updated_variables(optimizer, variables), *optimizer.variables):
                self._trial.note(variable)
        super().append(update)


@contextlib.contextmanager
def plain_step(data: Any, applied: list[Any]) -> Iterator[None]:
    """The context of a step on the whole batch in this process, as without keras_dist.

    Args:
        data: The batch.
        applied: Gets what optimizers are given, see `Step.applied`.
    """
    one, none = tf.constant(1), tf.constant(0.0)
    with step_module.entered(step_module.Step(one, one, none, data=data, is_plain=True, applied=applied)):
        yield
