"""A callback that runs on the chief only."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from keras_dist.replica import Replica

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only, with the model as an ordinary one of the chief's.

    For callbacks that write files or talk to a server. `model.save`, `evaluate` and `predict` that it calls are
    done by the chief alone. `fit` wraps Keras's own writers (`ModelCheckpoint`, `BackupAndRestore`,
    `TensorBoard`, `CSVLogger`, `RemoteMonitor`, `OrbaxCheckpoint`) in this by itself.

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
        self.replica: Replica | None = None
        self.is_active = True
        # Hooks that the callback doesn't define stay undefined here: Keras then needs not call them each batch.
        for name in _HOOKS:
            if getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name):
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
            if self.is_active:
                with self._local():
                    getattr(self.callback, name)(*args, **kwargs)

        return hook

    def _local(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.replica is None else self.replica.local()
