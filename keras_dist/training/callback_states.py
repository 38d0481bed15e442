"""The state of the callbacks of `fit`: what they have changed of themselves since the training began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_dist.compat import keras_fit
from keras_dist.logging import logger
from keras_dist.state import attributes

State = dict[str, Any]


class CallbackStates:
    """Takes the states of callbacks, and gives them back to the callbacks of another run.

    Settings, such as a patience, are those of the script. What a callback changes is its state.

    Args:
        callbacks: The script's callbacks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        names = [type(callback).__name__ for callback in callbacks]
        numbers = [names[:index].count(name) for index, name in enumerate(names)]
        self._callbacks = {
            f"{name} {number + 1}" if number else name: callback
            for name, number, callback in zip(names, numbers, callbacks, strict=True)
        }
        self._initial: dict[str, State] = {}

    def begin(self) -> None:
        """Called when all callbacks have begun, and have changed nothing else yet."""
        self._initial = self._attributes()

    def take(self) -> dict[str, State]:
        """Returns what has changed since then, by the name of the callback's class."""
        now = self._attributes()
        return {name: attributes.changed(self._initial[name], state) for name, state in now.items()}

    def restore(self, states: dict[str, State]) -> None:
        """Gives the callbacks what `take` has returned."""
        for name, callback in self._callbacks.items():
            keras_fit.choose_direction(callback)
            attributes.restore(callback, states.get(name, {}))
            keras_fit.write_at_step(callback)
        if lost := [name for name, state in states.items() if state and name not in self._callbacks]:
            logger().warning("the commit has the state of callbacks that are not there now: %s", ", ".join(lost))

    def _attributes(self) -> dict[str, State]:
        return {name: attributes.attributes_of(callback) for name, callback in self._callbacks.items()}


def history_with(history: Any, epoch: int, logs: Any) -> State:
    """Returns the state of a `History`, with the logs of an epoch that has ended, which it gets last."""
    state = attributes.attributes_of(history)
    state.pop("params", None)
    if logs:
        state["epoch"] = [*state["epoch"], epoch]
        state["history"] = {name: [*state["history"].get(name, []), value] for name, value in logs.items()}
    return state
