"""Private names of Keras for several replicas in one process. Keras 3.15, 2026-11.

`tests/unit/test_keras_replicas.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.random import seed_generator

from keras_dist.compat import tf_compat, tf_copies, tf_graphs
from keras_dist.compat.keras_placement import backing, outside_stateless_scope

global_state = keras_backend.common.global_state


class ReplicaScope(keras.StatelessScope):
    """Intercepts the variables that a replica reads or assigns, see `comm/replicas.py`.

    Args:
        count: int32 scalar, the number of examples in the replica's share.
        metrics: Variables that are updated by one replica after the other, whatever their `aggregation`.
        own: Returns what the replica reads in place of a variable: its copy. Default: the variable itself.
        refuse: Called with a variable that is assigned in another graph, in a loop for instance: its new value could
            not be used outside of it.
    """

    def __init__(
        self,
        count: Any,
        metrics: Collection[Any],
        own: Callable[[Any], Any] = backing,
        refuse: Callable[[Any], object] = lambda variable: None,
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.count = count
        self._own, self._refuse = own, refuse
        self._metrics = {id(variable) for variable in metrics}
        self._assigned: dict[int, Any] = {}
        self.loss_ids: dict[int, set[int]] = collections.defaultdict(set)  # by layer
        self._graph = tf_graphs.current()

    def assigned(self) -> list[Any]:
        """Returns the variables whose new values are stored here."""
        return list(self._assigned.values())

    def take(self, variable: Any) -> Any:
        """Returns the value that this replica has assigned to a variable, or the variable's value."""
        return self.get_current_value(variable)

    def clear(self) -> None:
        """Drops the values, once they are assigned to the variables."""
        self.state_mapping.clear()
        self._assigned.clear()

    # --- What Keras calls ---

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self._adds_up(variable):
            if tf.get_static_value(self.count) is None or tf.get_static_value(self.count) == 0:
                value = tf.where(self.count > 0, value, tf.cast(variable._value, value.dtype))
            assign(variable, value)
        else:
            if tf_graphs.current() is not self._graph:
                self._refuse(variable)
            self.state_mapping[id(variable)] = tf.stop_gradient(value)  # none flows through a variable that is assigned
            self._assigned[id(variable)] = variable

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        return variable._value if self._adds_up(variable) else self._own(variable)

    def _adds_up(self, variable: Any) -> bool:
        return variable.aggregation == "sum" or id(variable) in self._metrics


@contextlib.contextmanager
def losses_of_each_replica() -> Iterator[None]:
    """Keeps what layers add by `add_loss` in one `ReplicaScope` apart from that of another, in this context.

    Keras notes in the layer which losses of a scope are its own, and drops these notes when the layer is called again:
    by the next replica, while this one waits for it.
    """

    def loss_ids(layer: keras.Layer) -> Any:
        scope = keras_backend.get_stateless_scope() if keras_backend.in_stateless_scope() else None
        if isinstance(scope, ReplicaScope):
            return scope.loss_ids[id(layer)]
        if "_loss_ids" not in vars(layer):  # Keras asks before it sets it
            raise AttributeError("_loss_ids")
        return vars(layer)["_loss_ids"]

    def set_loss_ids(layer: keras.Layer, ids: Any) -> None:
        vars(layer)["_loss_ids"] = ids

    keras.Layer._loss_ids = property(loss_ids, set_loss_ids)
    try:
        yield
    finally:
        del keras.Layer._loss_ids


class UpdateScope(keras.StatelessScope):
    """In this context an optimizer reads and updates the copies of one device.

    Args:
        own: Returns the copy of a variable.
    """

    def __init__(self, own: Callable[[Any], Any]) -> None:
        super().__init__(initialize_variables=False)
        self._own = own

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        own = self._own(variable)
        own.assign(tf.cast(value, own.dtype))

    def get_current_value(self, variable: Any) -> Any:
        return self._own(variable)


def copy_on(variable: Any, device: str) -> Any:
    """Returns the copy of a Keras variable on a device, see `tf_copies`; `None` before it has a value."""
    return None if variable._value is None else tf_copies.copy_on(variable._value, device)


def is_float(variable: Any) -> bool:
    return bool(keras_backend.is_float_dtype(variable.dtype))


def assign(variable: Any, value: Any) -> None:
    """Assigns to the variable itself and its copies, in any scope."""
    with tf_copies.following(True):
        variable._direct_assign(value)


def thread_state() -> dict[str, Any]:
    """Returns the state that Keras keeps per thread: the dtype policy, the random generator, open scopes."""
    before = random.getstate()
    # Create it here: created in a replica's thread, it would be lost, and in a trace it would have no value yet.
    with tf.init_scope(), tf_compat.variables_made_by():
        seed_generator.global_seed_generator()
    random.setstate(before)  # Keras draws its seed from Python's generator, from which layers draw theirs
    return _copied(vars(global_state.GLOBAL_STATE_TRACKER))


def set_thread_state(state: dict[str, Any]) -> None:
    """Sets the state that Keras keeps for this thread."""
    vars(global_state.GLOBAL_STATE_TRACKER).update(_copied(state))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copies the lists of open scopes: each thread changes its own."""
    return {name: copy.copy(value) if isinstance(value, list) else value for name, value in state.items()}


def initialize_variables_on(device: str) -> None:
    """Initializes at once, on a device, the variables that this thread creates inside a `StatelessScope`."""
    global_state.set_global_attribute("uninitialized_variables", _Initialized(device))


@contextlib.contextmanager
def initialized_at_once() -> Iterator[None]:
    """Initializes at once, in this context, variables that are created in a `StatelessScope`, as the strategy does."""
    before = global_state.get_global_attribute("uninitialized_variables")
    if isinstance(before, _Initialized):
        yield
        return
    global_state.set_global_attribute("uninitialized_variables", _Initialized())
    try:
        yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", before)


class _Initialized(list[Any]):
    """The list of variables that Keras would initialize after the scope: a step already trains with them.

    Args:
        device: Where ordinary ones are made; `None` for those of the current strategy.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._device = device

    def append(self, variable: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_stateless_scope())
            stack.enter_context(tf.init_scope())
            if self._device is not None:
                stack.enter_context(tf_compat.variables_made_by())
                stack.enter_context(tf.device(self._device))
            variable._deferred_initialize()
