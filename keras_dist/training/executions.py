"""Several steps in one execution: returning to Python after each step can take longer than the step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_dist.callbacks.chief_only import defines
from keras_dist.callbacks.commit import Commit
from keras_dist.compat import keras_model, keras_strategy
from keras_dist.logging import logger
from keras_dist.training.synchronizer import acts_between_batches, as_list

_MOST = 32


def number_of(steps: int | None, exactly: Sequence[int | None] = ()) -> int:
    """Returns how many steps to put into one execution.

    Args:
        steps: Steps of an epoch, `None` if unknown.
        exactly: Numbers of steps that it must divide, since data may be endless.

    Example:

    >>> number_of(100), number_of(97), number_of(None, [100, 10]), number_of(5)
    (25, 32, 10, 5)
    """
    common = math.gcd(*(number for number in exactly if number))
    limit = min(_MOST, steps or _MOST)
    divisors = [number for number in range(1, limit + 1) if (common or steps or 0) % number == 0]
    if common or (steps and divisors[-1] > limit // 2):
        return divisors[-1]
    return limit


class Executions:
    """Lets `fit` put several steps into one execution, if the script leaves their number to Keras.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._made: dict[int, dict[str, Any]] = {}
        self.compiled(False)

    def compiled(self, is_given: bool) -> None:
        """Notes that the model was compiled, and whether the script passed `steps_per_execution`."""
        self._made.clear()
        self.asked: int = getattr(self._model, "steps_per_execution", None) or 1
        self._is_open = not is_given and self.asked == 1

    @property
    def may_choose(self) -> bool:
        """True if the script leaves the number of steps to Keras."""
        return self._is_open and not self._model.run_eagerly

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Puts `number` steps into one execution, in this context."""
        before = self._model.steps_per_execution
        self.set(number)
        try:
            yield
        finally:
            self.set(before)

    def set(self, number: int) -> None:
        """Puts `number` steps into one execution from now on. The functions for other numbers are kept."""
        model, before = self._model, self._model.steps_per_execution
        if number == before:
            return
        self._made[before] = keras_strategy.functions_of(model)
        keras_strategy.set_functions(model, self._made.pop(number, {}))
        model.steps_per_execution = number


@functools.cache
def report(number: int) -> None:
    """Logs once how many steps one execution has."""
    if number > 1:
        logger().warning(
            "%d steps in one execution: no callback acts between batches. compile(steps_per_execution=1) turns it off.",
            number,
        )


def act_between_batches(callbacks: Any) -> bool:
    """True if a callback of `fit` or `evaluate` may act between batches."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return True
    return any(_acts_between_batches(callback) for callback in as_list(callbacks))


def _acts_between_batches(callback: Any) -> bool:
    if isinstance(callback, Commit):
        return not callback.at_epochs
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch" or callback.write_steps_per_second)
    hooks = ("on_train_batch_begin", "on_batch_begin", "on_epoch_begin")  # stopping there stops after one batch
    is_own = not keras_model.is_kerass(type(callback))
    return acts_between_batches(callback) or (is_own and any(defines(callback, hook) for hook in hooks))
