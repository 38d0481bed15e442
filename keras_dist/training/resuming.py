"""Lets `fit` commit its state, and go on from the newest commit: what `kd.callbacks.Commit` asks for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.callbacks.commit import Commit
from keras_dist.comm.backend import Backend
from keras_dist.errors import ConfigurationError
from keras_dist.training.committed_run import CommittedRun
from keras_dist.training.interrupts import interrupts_of
from keras_dist.training.synchronizer import as_list
from keras_dist.training.training_data import Distribute

_complete: set[Path] = set()  # the folders of the calls of `fit` that have ended in this process


class Resuming:
    """What `fit` of one model does for a `Commit` in its list of callbacks.

    Args:
        model: The model.
        backend: The backend.
        optimizers: Returns the model's optimizers.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        optimizers: Callable[[], Sequence[Any]],
    ) -> None:
        self._new_run = functools.partial(CommittedRun, model, backend, optimizers)
        self._interrupts = interrupts_of(backend)
        self._run: CommittedRun | None = None
        self._of_fit = contextlib.ExitStack()

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """The context of a call of `fit`."""
        with contextlib.ExitStack() as self._of_fit:
            yield

    def arrange(self, given: Any, arranged: Any) -> Any:
        """Returns the callbacks of `fit` with those that commit and restore, if there is a `Commit`.

        Args:
            given: The script's callbacks.
            arranged: These, and those that synchronize the ranks.
        """
        callbacks = as_list(given)
        found = next((callback for callback in callbacks if isinstance(callback, Commit)), None)
        if found is None:
            return arranged
        _refuse_second_fit(found)
        self._run = run = self._new_run(found, callbacks)
        self._of_fit.callback(self._end, found, run)
        self._of_fit.enter_context(self._interrupts.terminable())
        found.is_arranged = True
        return [_Before(run), *as_list(arranged), _After(run)]

    def _end(self, settings: Commit, run: CommittedRun) -> None:
        self._run, settings.is_arranged = None, False
        run.close()

    def ordered(self, source: Any) -> Any:
        """Returns the training data with an order that can be made again, if there is a `Commit`. Called after it."""
        return source if self._run is None else self._run.data.ordered(source)

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with each iterator over data of the model, before it is used. The first is that of the training.

        Args:
            epoch_iterator: Keras's iterator.
            dataset: What Keras has made of the script's data, before it was distributed.
            distribute: Distributes another dataset as this one was; `None` if that can't be done.
        """
        if self._run is not None:
            self._run.watch(epoch_iterator, dataset, distribute)


class _Before(keras.callbacks.Callback):
    """The first callback in the list."""

    def __init__(self, run: CommittedRun) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:
        self._run.load()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._run.begin_epoch(epoch)


class _After(keras.callbacks.Callback):
    """The last callback in the list."""

    def __init__(self, run: CommittedRun) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:
        self._run.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._run.epoch_has_begun()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._run.end_batches(batch, logs)
        self._run.exit_if_terminated(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._run.end_epoch(logs)
        self._run.exit_if_terminated(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._run.end()
        _complete.add(self._run.directory)


def _refuse_second_fit(settings: Commit) -> None:
    if settings.commits.directory in _complete:
        raise ConfigurationError(
            "A call of `fit` with these commits has ended in this process, so another one would find nothing to do.",
            f"directory={settings.directory!r}",
            "Give each call of `fit` a directory of its own, such as Commit('commits/warmup') and "
            "Commit('commits/finetune'). To train anew, delete the folder and start again.",
        )
