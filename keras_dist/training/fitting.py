"""What `fit` does for a distributed model beside its training: it commits, goes on, and puts steps together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.training.auto_executions import AutoExecutions
from keras_dist.training.resuming import Resuming
from keras_dist.training.training_data import Distribute


class Fitting:
    """What is around each call of `fit` of one model.

    Args:
        model: The model.
        backend: The backend.
        optimizers: Returns the model's optimizers.
        auto: Chooses how many steps one execution has, `None` if nobody asks for it.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        optimizers: Callable[[], Sequence[Any]],
        auto: AutoExecutions | None,
    ) -> None:
        self._resuming = Resuming(model, backend, optimizers)
        self._auto = auto

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """The context of a call of `fit`."""
        with self._resuming.fit(), contextlib.nullcontext() if self._auto is None else self._auto.fit():
            yield

    def arrange(self, given: Any, arranged: Any) -> Any:
        """Returns the callbacks of `fit`, with those that are needed here.

        Args:
            given: The script's callbacks.
            arranged: These, and those that synchronize the ranks.
        """
        arranged = self._resuming.arrange(given, arranged)
        return arranged if self._auto is None else self._auto.arrange(given, arranged)

    def ordered(self, source: Any) -> Any:
        """Returns the training data as they have to be read. Called after `arrange`."""
        return self._resuming.ordered(source)

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with each iterator over data of the model, before it is used. See `Resuming.watch`."""
        self._resuming.watch(epoch_iterator, dataset, distribute)
        if self._auto is not None:
            self._auto.watch(epoch_iterator)
