"""The callback that `fit` adds at the end of the list, to keep the ranks in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import state
from keras_dist.backends.base import Backend
from keras_dist.callbacks.chief_only import ChiefOnly
from keras_dist.logging import logger

_SEED_OFFSET = 1_000_003


class InStep(keras.callbacks.Callback):
    """Starts all ranks alike, and lets them stop together.

    Args:
        backend: How the ranks talk.
        optimizers: The model's optimizers, whose state is the chief's at the start.
    """

    async_safe = True  # it defines no batch hook

    def __init__(self, backend: Backend, optimizers: Sequence[Any]) -> None:
        super().__init__()
        self._backend = backend
        self._optimizers = optimizers

    def on_train_begin(self, logs: Any = None) -> None:
        # The last callback of the list: by now the chief's BackupAndRestore has loaded what it has.
        plan = {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
        state.start_alike(self.model, self._optimizers, self._backend, "model.fit (start)", plan)
        state.shift_seeds(self.model, self._backend.topology.rank * _SEED_OFFSET)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_together(f"model.fit (end of epoch {epoch + 1})")

    def on_train_end(self, logs: Any = None) -> None:
        state.shift_seeds(self.model, -self._backend.topology.rank * _SEED_OFFSET)

    def _stop_together(self, call: str) -> None:
        """One rank that wants to stop stops all: otherwise the others would wait for it in the next step."""
        self.model.stop_training = any(self._backend.exchange(call, bool(self.model.stop_training)))


class InStepEachBatch(InStep):
    """Also lets the ranks stop together between batches: for lists with callbacks that may stop there."""

    async_safe = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._saves_between_batches:
            state.settle(self.model, self._backend, f"model.fit (after batch {batch + 1})")
        self._stop_together(f"model.fit (after batch {batch + 1})")

    def __init__(self, backend: Backend, optimizers: Sequence[Any], saves_between_batches: bool) -> None:
        super().__init__(backend, optimizers)
        self._saves_between_batches = saves_between_batches


def arrange(callbacks: Any, backend: Backend, replica: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Returns the callbacks of `fit` for this rank: writers on the chief only, ours at the end."""
    arranged = [_for_this_rank(callback, backend, replica) for callback in _as_list(callbacks)]
    busy = [_name(callback) for callback in arranged if _acts_between_batches(callback)]
    logger().debug("callbacks: %s", ", ".join(_described(callback) for callback in arranged) or "none")
    logger().debug("the ranks meet after each %s", f"batch, for {', '.join(busy)}" if busy else "epoch")
    if busy:
        saves = any(_saves_between_batches(callback) for callback in arranged)
        return [*arranged, InStepEachBatch(backend, optimizers, saves)]
    return [*arranged, InStep(backend, optimizers)]


def arrange_for_evaluation(callbacks: Any, backend: Backend, replica: Any) -> list[Any]:
    """Returns the callbacks of `evaluate` and `predict` for this rank."""
    return [_for_this_rank(callback, backend, replica) for callback in _as_list(callbacks)]


def _described(callback: Any) -> str:
    return f"{_name(callback)} on {'the chief' if isinstance(callback, ChiefOnly) else 'every rank'}"


def _name(callback: Any) -> str:
    return type(callback.callback if isinstance(callback, ChiefOnly) else callback).__name__


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _writers() -> tuple[type, ...]:
    names = (
        "ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "RemoteMonitor", "OrbaxCheckpoint",
        "ProgbarLogger",
    )  # fmt: skip
    return tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))


def _for_this_rank(callback: Any, backend: Backend, replica: Any) -> Any:
    if isinstance(callback, _writers()):
        callback = ChiefOnly(callback)
    if isinstance(callback, ChiefOnly):
        callback.replica = replica
        callback.is_active = backend.topology.is_chief
    return callback


def _acts_between_batches(callback: Any) -> bool:
    """True if a callback runs after every batch, and so might stop training there."""
    inner = callback.callback if isinstance(callback, ChiefOnly) else callback
    if isinstance(inner, keras.callbacks.ProgbarLogger | keras.callbacks.TensorBoard):
        return False
    if isinstance(inner, keras.callbacks.ModelCheckpoint):
        return _saves_between_batches(callback)
    if isinstance(inner, keras.callbacks.BackupAndRestore):
        return bool(inner.save_freq != "epoch")
    if isinstance(inner, keras.callbacks.LambdaCallback):
        # It defines the hook on itself, if the user gave one.
        return "on_train_batch_end" in vars(inner) or "on_batch_end" in vars(inner)
    base = keras.callbacks.Callback
    return any(getattr(type(inner), name) is not getattr(base, name) for name in ("on_train_batch_end", "on_batch_end"))


def _saves_between_batches(callback: Any) -> bool:
    inner = callback.callback if isinstance(callback, ChiefOnly) else callback
    return getattr(inner, "save_freq", "epoch") != "epoch"
