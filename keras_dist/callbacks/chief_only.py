"""A callback that runs on the chief only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_dist.step import learning_rate

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only, where it sees an ordinary model that is not distributed.

    Use it for callbacks that write files or talk to a server. If the callback calls `save`, `evaluate` or
    `predict`, only the chief does the work. A learning rate or `stop_training` that it sets in `fit` is sent to all
    ranks before the next step. Weights that it sets are not sent: the ranks' weights then differ and training stops.

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
            with self.local():
                getattr(self.callback, name)(*args, **kwargs)
            self.has_set_a_rate |= rates_of(self.optimizers) != before

        return hook


def inner_of(callback: Any) -> Any:
    """Returns the callback in a `ChiefOnly`, any other one itself."""
    return callback.callback if isinstance(callback, ChiefOnly) else callback


def defines(callback: Any, hook: str) -> bool:
    """True if a callback defines a hook. A LambdaCallback has its hooks on the instance."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def rates_of(optimizers: Sequence[Any]) -> list[float | None]:
    """Returns the learning rates of optimizers; `None` for a schedule, which cannot be set."""
    variables = [learning_rate.variable_of(optimizer) for optimizer in optimizers]
    return [None if variable is None else float(variable) for variable in variables]


def set_rates(optimizers: Sequence[Any], rates: Sequence[float | None]) -> None:
    """Sets the learning rates that `rates_of` returned on another rank."""
    for optimizer, rate in zip(optimizers, rates, strict=True):
        if rate is not None:
            optimizer.learning_rate = rate
