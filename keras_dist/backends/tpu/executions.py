"""Several steps in one execution: on a TPU going back to Python after each step can take longer than the step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_dist.callbacks.chief_only import defines
from keras_dist.compat import keras_strategy
from keras_dist.logging import logger
from keras_dist.training.synchronizer import acts_between_batches

_MOST = 32


def number_of(steps: int | None, exactly: Sequence[int | None] = ()) -> int:
    """Returns how many steps to put into one execution.

    Args:
        steps: Steps of an epoch, `None` if that isn't known.
        exactly: Numbers of steps that must not be overstepped, as data may go on for ever: it divides them.

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
    """Lets `fit` put several steps into one execution, where the script has left that to Keras.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._made: dict[int, dict[str, Any]] = {}
        self.compiled(False)

    def compiled(self, is_given: bool) -> None:
        """The model was compiled, with `steps_per_execution` given by the script or not."""
        self._made.clear()
        self.asked: int = getattr(self._model, "steps_per_execution", None) or 1
        self._is_open = not is_given and self.asked == 1

    @property
    def may_choose(self) -> bool:
        """True if the script has left the number of steps to Keras."""
        return self._is_open and not self._model.run_eagerly

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Puts so many steps into one execution, while this is entered. What was traced for another number is kept."""
        model, before = self._model, self._model.steps_per_execution
        if number == before:
            yield
            return
        self._made[before] = keras_strategy.functions_of(model)
        keras_strategy.set_functions(model, self._made.get(number, {}))
        model.steps_per_execution = number
        try:
            yield
        finally:
            self._made[number] = keras_strategy.functions_of(model)
            keras_strategy.set_functions(model, self._made.pop(before))
            model.steps_per_execution = before


@functools.cache
def say(number: int) -> None:
    """Says it, once."""
    if number > 1:
        logger().warning(
            "%d steps in one execution: nothing looks between batches. compile(steps_per_execution=1) stops that.",
            number,
        )


def look_between_batches(callbacks: Any) -> bool:
    """True if a callback of `fit` or `evaluate` runs between batches, so that it matters where they end."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return True
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    return any(_looks_between_batches(callback) for callback in listed)


def _looks_between_batches(callback: Any) -> bool:
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch" or callback.write_steps_per_second)
    hooks = ("on_train_batch_begin", "on_batch_begin", "on_epoch_begin")  # whoever stops there stops after one batch
    is_own = type(callback).__module__.split(".")[0] != "keras"
    return acts_between_batches(callback) or (is_own and any(defines(callback, hook) for hook in hooks))

