"""The callbacks that `fit` adds to the list, and the state of the script's own since the training began."""

import functools
import inspect
import pdb
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import environment
from keras_dist.callbacks import (
    ChiefOnly,
    Timing,
    attributes_of,
    defines,
    inner_of,
    rates_of,
    set_rates,
)
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model
from keras_dist.environment import Topology
from keras_dist.errors import ConfigurationError
from keras_dist.logging import announce, logger
from keras_dist.state import checkpoint, snapshot, weights
from keras_dist.step.step import Stopwatch

_NAMES_OF_WRITERS = (
    "ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "RemoteMonitor", "OrbaxCheckpoint",
    "ProgbarLogger",
)  # fmt: skip
_WRITERS = tuple(getattr(keras.callbacks, name) for name in _NAMES_OF_WRITERS if hasattr(keras.callbacks, name))
State = dict[str, Any]


class CallbackStates:
    """Takes the states of callbacks, and gives them back to the callbacks of another run.

    Settings, such as a patience, come from the script. What a callback changes is its state.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        names = [type(callback).__name__ for callback in callbacks]
        keys = [f"{name} {n + 1}" if (n := names[:index].count(name)) else name for index, name in enumerate(names)]
        self._callbacks = dict(zip(keys, callbacks, strict=True))
        self._initial: dict[str, State] = {}

    def begin(self) -> None:
        """Called when all callbacks have begun, and have changed nothing else yet."""
        self._initial = self._attributes()

    def take(self) -> dict[str, State]:
        """Returns what has changed since then, by the name of the callback's class."""
        now = self._attributes()
        return {name: snapshot.changed(self._initial[name], state) for name, state in now.items()}

    def restore(self, states: dict[str, State]) -> None:
        """Gives the callbacks what `take` has returned."""
        for name, callback in self._callbacks.items():
            keras_fit.choose_direction(callback)
            snapshot.restore(callback, states.get(name, {}))
            keras_fit.write_at_step(callback)
        if lost := [name for name, state in states.items() if state and name not in self._callbacks]:
            logger().warning("the commit has the state of callbacks that are not there now: %s", ", ".join(lost))

    def _attributes(self) -> dict[str, State]:
        return {name: snapshot.attributes_of(callback) for name, callback in self._callbacks.items()}


_IN_ONE_PROCESS = "`keras-dist run -np 1 train.py` debugs in one process"


def install(topology: Topology) -> None:
    """Makes `breakpoint()` stop rank 0 only, unless the script or the user has chosen another debugger."""
    is_pythons_own = sys.breakpointhook is sys.__breakpointhook__
    if topology.size > 1 and is_pythons_own and environment.get(environment.PYTHON_BREAKPOINT) is None:
        sys.breakpointhook = functools.partial(_stop, topology)


def _stop(topology: Topology, *args: Any, **kwargs: Any) -> None:
    if not topology.is_chief:
        logger().debug("breakpoint() is skipped: only rank 0 has a terminal")
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigurationError(
            "breakpoint() needs a terminal, and this rank has none.",
            f"breakpoint() on {topology}",
            f"{_IN_ONE_PROCESS}. In a terminal, rank 0 of `keras-dist run` stops too.",
        )
    announce(f"keras_dist: only rank 0 stops; the other ranks wait in their next common call. {_IN_ONE_PROCESS}.")
    frame = inspect.currentframe()
    pdb.Pdb().set_trace(frame and frame.f_back)


class Synchronizer(keras.callbacks.Callback):
    """Gives all ranks the same state at the start, and stops them together."""

    async_safe = True  # it has no batch hooks

    def __init__(
        self, backend: Backend, optimizers: Sequence[Any], callbacks: Sequence[Any], stopwatch: Stopwatch | None
    ) -> None:
        super().__init__()
        self._backend = backend
        self._optimizers = optimizers
        self._callbacks = callbacks
        self._of_chief = [callback for callback in callbacks if isinstance(callback, ChiefOnly)]
        self._stopwatch = stopwatch  # measures how long this rank waits for others, `None` if nobody asks

    def on_train_begin(self, logs: Any = None) -> None:
        # As this callback is the last one, the chief's BackupAndRestore has loaded its state by now.
        plan = {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
        weights.broadcast_state(self.model, self._optimizers, self._backend, "model.fit (start)", plan)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._synchronize(f"model.fit (start of epoch {epoch + 1})")
        if self._stopwatch is not None:
            self._stopwatch.restart()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._synchronize(f"model.fit (end of epoch {epoch + 1})", logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._synchronize("model.fit (end)")

    def _synchronize(self, call: str, logs: Any = None) -> None:
        """Stops all ranks if one of them stops, and sends what `ChiefOnly` callbacks have set.

        Otherwise the other ranks would wait in the next step, use other learning rates than the chief, or continue
        with other numbers after `fit`.
        """
        worked = None if self._stopwatch is None else float(self._stopwatch.worked())
        told = None
        if self._of_chief and self._backend.topology.is_chief:
            has_set_a_rate = any(callback.has_set_a_rate for callback in self._of_chief)
            has_evaluated = any(callback.has_evaluated for callback in self._of_chief)
            added: dict[str, Any] = {}
            for callback in self._of_chief:
                added |= callback.added_logs
                callback.has_set_a_rate, callback.has_evaluated, callback.added_logs = False, False, {}
            # The current ones: later callbacks may have changed them.
            rates = rates_of(self._optimizers) if has_set_a_rate else None
            told = rates, has_evaluated, added, [attributes_of(callback) for callback in self._of_chief]
        gathered = self._backend.all_gather_object(call, (bool(self.model.stop_training), told, worked))
        self.model.stop_training = any(stop for stop, _, _ in gathered)
        if told is None and gathered[0][1] is not None:
            rates, has_evaluated, added, attributes = gathered[0][1]
            if rates is not None:
                set_rates(self._optimizers, rates)
            if has_evaluated:  # an evaluation begins to count anew, and `fit` continues where it has ended
                weights.reset_totals(self.model)
            if isinstance(logs, dict):
                logs.update(added)
            if len(attributes) == len(self._of_chief):  # a script may give its callbacks to the chief only
                for callback, values in zip(self._of_chief, attributes, strict=True):
                    vars(callback.callback).update(values)
        if self._stopwatch is not None:
            self._stopwatch.synchronized(worked, tf.constant([worked for _, _, worked in gathered]))


class BatchSynchronizer(Synchronizer):
    """Also synchronizes between batches, for callbacks that may stop training there."""

    async_safe = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if any(_acts_before_batches(callback) for callback in self._callbacks):
            self._synchronize(f"model.fit (before batch {batch + 1})")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._synchronize(f"model.fit (after batch {batch + 1})")


def with_synchronizers(
    callbacks: Sequence[Any], backend: Backend, optimizers: Sequence[Any], stopwatch: Stopwatch | None
) -> list[Any]:
    """Returns the callbacks of `fit` on this rank with those that synchronize the ranks."""
    names = [type(inner_of(callback)).__name__ for callback in callbacks]
    busy = [name for name, callback in zip(names, callbacks, strict=True) if acts_between_batches(callback)]
    places = ["the chief" if isinstance(callback, ChiefOnly) else "every rank" for callback in callbacks]
    described = [f"{name} on {place}" for name, place in zip(names, places, strict=True)]
    logger().debug("callbacks: %s", ", ".join(described) or "none")
    logger().debug("the ranks synchronize after each %s", f"batch, for {', '.join(busy)}" if busy else "epoch")
    synchronizer = BatchSynchronizer if busy else Synchronizer
    arranged = [*callbacks, synchronizer(backend, optimizers, callbacks, stopwatch)]
    if not any(_saves_between_batches(callback) for callback in callbacks):
        return arranged

    def combine(batch: int, logs: Any) -> None:
        """Combines what the ranks have collected after each batch, before callbacks that save there."""
        weights.synchronize(first.model, optimizers, backend, f"model.fit (state after batch {batch + 1})")

    first = keras.callbacks.LambdaCallback(on_train_batch_end=combine)
    return [first, *arranged]


def as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def on_chief(callback: Any) -> Any:
    """Returns the callback itself, or, if it writes files, one that is active on the chief only."""
    checkpoint.make_atomic(inner_of(callback))
    return ChiefOnly(callback) if is_writer(callback) else callback


def is_writer(callback: Any) -> bool:
    return isinstance(callback, _WRITERS)


def sees_batches(callbacks: Any) -> bool:
    """True if one of the callbacks of `fit` or `evaluate` gets the logs of batches."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return True
    return any(acts_between_batches(callback) or _looks_at_batches(callback) for callback in as_list(callbacks))


def _looks_at_batches(callback: Any) -> bool:
    inner = inner_of(callback)
    if isinstance(inner, keras.callbacks.TensorBoard):
        return bool(inner.update_freq != "epoch")
    return not isinstance(inner, keras.callbacks.ProgbarLogger) and defines(inner, "on_test_batch_end")


def acts_between_batches(callback: Any) -> bool:
    """True if a callback may stop training or save between batches."""
    inner = inner_of(callback)
    if isinstance(inner, keras.callbacks.ProgbarLogger | keras.callbacks.TensorBoard | Timing):
        return False
    if isinstance(inner, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
        return _saves_between_batches(callback)
    acts_after = any(defines(inner, hook) for hook in ("on_train_batch_end", "on_batch_end"))
    return acts_after or _acts_before_batches(callback)


def needs_single_steps(callback: Any) -> bool:
    """True if a callback may stop the training, save or change a rate before or after a batch."""
    if isinstance(callback, keras.callbacks.CallbackList):
        return True
    is_own = not keras_model.is_kerass(type(callback)) and not isinstance(callback, Timing)
    sets_before = any(defines(callback, hook) for hook in ("on_train_batch_begin", "on_batch_begin"))
    return acts_between_batches(callback) or (is_own and sets_before)


def _acts_before_batches(callback: Any) -> bool:
    """True for a user's callback that runs before every batch on the chief only, and may set a learning rate."""
    if not isinstance(callback, ChiefOnly) or is_writer(callback.callback):
        return False
    return any(defines(callback.callback, hook) for hook in ("on_train_batch_begin", "on_batch_begin"))


def _saves_between_batches(callback: Any) -> bool:
    return bool(getattr(inner_of(callback), "save_freq", "epoch") != "epoch")
