"""Arguments of a call that a wrapper looks at or changes, however they are passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def argument_of(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the value of an argument of a call, however it is passed, or its default."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except TypeError:
        return kwargs.get(name)
    bound.apply_defaults()
    return bound.arguments.get(name, bound.arguments.get("kwargs", {}).get(name))


def takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function can be called with a keyword argument."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def with_argument(
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with one argument changed, however it was passed."""
    positional = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if name in positional[: len(args)]:
        index = positional.index(name)
        return (*args[:index], change(args[index]), *args[index + 1 :]), kwargs
    return args, {**kwargs, name: change(kwargs.get(name))}
