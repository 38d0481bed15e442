"""A callback that runs on the chief only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.step.optimizer import variable_of

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only, where it sees an ordinary model that is not distributed.

    Use it for callbacks that write files or talk to a server. If the callback calls `save`, `evaluate` or
    `predict`, only the chief does the work. A learning rate or `stop_training` that it sets in `fit` is sent to all
    ranks before the next step. So are the numbers that it adds to an epoch's logs, and its own attributes that are
    numbers or text, such as `ModelCheckpoint.best`. Weights that it sets are not sent: the ranks' weights then differ
    and training stops.

    `fit` itself wraps Keras's `ModelCheckpoint`, `BackupAndRestore`, `TensorBoard`, `CSVLogger`, `RemoteMonitor`,
    `OrbaxCheckpoint` and `ProgbarLogger`.

    Args:
        callback: A `keras.callbacks.Callback`.

    Example:

    ```python
    model.fit(..., callbacks=[kd.callbacks.ChiefOnly(UploadToMyServer())])
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.callback = callback
        self.local: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # `fit` sets it
        self.is_active = True
        self.optimizers: Sequence[Any] = ()  # those whose learning rate is sent to all ranks
        self.has_set_a_rate = False
        self.added_logs: dict[str, Any] = {}
        # Define only the hooks that the callback defines: Keras skips a batch hook that no callback has.
        for name in _HOOKS:
            if defines(callback, name):
                setattr(self, name, self._hook(name))

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self.is_active:
            with self.local():
                self.callback.set_model(model)

    def _hook(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            if not self.is_active:
                return
            before = rates_of(self.optimizers)
            with self.local(), self._noting_logs(name, kwargs.get("logs", args[-1] if args else None)):
                getattr(self.callback, name)(*args, **kwargs)
            self.has_set_a_rate |= rates_of(self.optimizers) != before

        return hook

    @contextlib.contextmanager
    def _noting_logs(self, hook: str, logs: Any) -> Iterator[None]:
        """Notes what is added to the logs of an epoch in this context: the history of all ranks has them."""
        if hook != "on_epoch_end" or not isinstance(logs, dict):
            yield
            return
        given = dict(logs)
        yield
        arrays = np.ndarray | tf.Tensor | tf.Variable | keras.Variable
        added = {name: log for name, log in logs.items() if log is not given.get(name)}
        added = {name: np.asarray(log)[()] if isinstance(log, arrays) else log for name, log in added.items()}
        added = {name: log for name, log in added.items() if isinstance(log, _PLAIN | np.ndarray)}
        logs.update(added)  # of a variable, the value that it has now: all ranks keep the same
        self.added_logs.update(added)


def take_added_logs(callback: ChiefOnly) -> dict[str, Any]:
    """Returns the numbers that a callback has added to logs since the last call."""
    added, callback.added_logs = callback.added_logs, {}
    return added


def attributes_of(callback: ChiefOnly) -> dict[str, Any]:
    """Returns the public attributes of a callback that are numbers or text."""
    public = {name: value for name, value in vars(callback.callback).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if isinstance(value, _PLAIN)}


_PLAIN = bool | int | float | str | np.generic | None


def inner_of(callback: Any) -> Any:
    """Returns the callback in a `ChiefOnly`, any other one itself."""
    return callback.callback if isinstance(callback, ChiefOnly) else callback


def defines(callback: Any, hook: str) -> bool:
    """True if a callback defines a hook. A LambdaCallback has its hooks on the instance."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def rates_of(optimizers: Sequence[Any]) -> list[float | None]:
    """Returns the learning rates of optimizers; `None` for a schedule, which cannot be set."""
    variables = [variable_of(optimizer) for optimizer in optimizers]
    return [None if variable is None else float(variable) for variable in variables]


def set_rates(optimizers: Sequence[Any], rates: Sequence[float | None]) -> None:
    """Sets the learning rates that `rates_of` returned on another rank."""
    for optimizer, rate in zip(optimizers, rates, strict=True):
        if rate is not None:
            optimizer.learning_rate = rate
