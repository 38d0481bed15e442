"""A callback that runs on the chief only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_dist.step import learning_rate

if TYPE_CHECKING:
    from keras_dist.training.strategy import Strategy

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only, with the model as an ordinary one of the chief's.

    For callbacks that write files or talk to a server. `model.save`, `evaluate` and `predict` that it calls are
    done by the chief alone. A learning rate that it sets in `fit`, and `stop_training`, go to all ranks before the
    next step; weights that it sets don't: the ranks' weights are compared, and training stops.

    `fit` wraps Keras's own writers (`ModelCheckpoint`, `BackupAndRestore`, `TensorBoard`, `CSVLogger`,
    `RemoteMonitor`, `OrbaxCheckpoint`) in this by itself.

    Args:
        callback: A Keras callback.

    Example:

    ```python
    model.fit(..., callbacks=[kd.callbacks.ChiefOnly(UploadToMyServer())])
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.callback = callback
        self.strategy: Strategy | None = None
        self.is_active = True
        self.optimizers: Sequence[Any] = ()  # whose learning rates it may set for all ranks
        self.has_set_a_rate = False
        # Hooks that the callback doesn't define stay undefined here: Keras then needs not call them each batch.
        for name in _HOOKS:
            if defines(callback, name):
                setattr(self, name, self._hook(name))

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self.is_active:
            with self._local():
                self.callback.set_model(model)

    def _hook(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            if not self.is_active:
                return
            before = rates_of(self.optimizers)
            with self._local():
                getattr(self.callback, name)(*args, **kwargs)
            self.has_set_a_rate |= rates_of(self.optimizers) != before

        return hook

    def _local(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.strategy is None else self.strategy.local()


def defines(callback: Any, hook: str) -> bool:
    """True if a callback does something in a hook. A LambdaCallback has its hooks on itself."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def rates_of(optimizers: Sequence[Any]) -> list[float | None]:
    """Returns the learning rates of optimizers, `None` where it is a schedule, which can't be set."""
    variables = [learning_rate.variable_of(optimizer) for optimizer in optimizers]
    return [None if variable is None else float(variable) for variable in variables]


def set_rates(optimizers: Sequence[Any], rates: Sequence[float | None]) -> None:
    """Sets what `rates_of` has returned on another rank."""
    for optimizer, rate in zip(optimizers, rates, strict=True):
        if rate is not None:
            optimizer.learning_rate = rate
