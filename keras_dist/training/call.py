"""A call of a model's method, whose arguments can be read and changed, positional or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
        try:
            bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        except TypeError:
            return self.kwargs.get(name)
        bound.apply_defaults()
        return bound.arguments.get(name, bound.arguments.get("kwargs", {}).get(name))

    def is_given(self, name: str) -> bool:
        """True if the script passed this argument."""
        return name in inspect.signature(self.function).bind_partial(*self.args, **self.kwargs).arguments

    def takes(self, name: str) -> bool:
        """True if the method accepts this argument."""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """Replaces an argument by `change(argument)`."""
        positional = [
            parameter.name
            for parameter in inspect.signature(self.function).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if name in positional[: len(self.args)]:
            index = positional.index(name)
            self.args = (*self.args[:index], change(self.args[index]), *self.args[index + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: change(self.kwargs.get(name))}

    def set(self, name: str, value: Any) -> None:
        """Replaces an argument."""
        self.change(name, lambda _: value)
