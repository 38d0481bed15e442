"""A call of a model's method, whose arguments can be read and changed, positional or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras_dist.compat import keras_fit


class Call:
    """A call that a wrapper can inspect and change before it makes it.

    Args:
        name: Name of the method.
        function: The plain method.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Makes the call."""
        return self.function(*self.args, **self.kwargs)

    def get(self, name: str) -> Any:
        """Returns the value of an argument, or its default."""
        if name in (given := self._given()):
            return given[name]
        default = self._named.get(name, inspect.Parameter.empty)
        return None if default is inspect.Parameter.empty else default

    def is_given(self, name: str) -> bool:
        """True if the script passed this argument."""
        return name in self._given()

    def takes(self, name: str) -> bool:
        """True if the method accepts this argument."""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """Replaces an argument by `change(argument)`."""
        if name in self._positional[: len(self.args)]:
            index = self._positional.index(name)
            self.args = (*self.args[:index], change(self.args[index]), *self.args[index + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: change(self.kwargs.get(name))}

    def set(self, name: str, value: Any) -> None:
        """Replaces an argument."""
        self.change(name, lambda _: value)

    def _given(self) -> dict[str, Any]:
        return {**dict(zip(self._positional, self.args, strict=False)), **self.kwargs}

    @functools.cached_property
    def _named(self) -> dict[str, Any]:
        """The arguments that have a name, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @functools.cached_property
    def _positional(self) -> list[str]:
        """The names of the arguments by position. What `*args` takes goes on to Keras's own method."""
        parameters = inspect.signature(self.function).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        passes_on = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return own + keras_fit.argument_names(self.name)[len(own) :] if passes_on else own
