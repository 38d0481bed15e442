"""Private names of Keras: what a step assigns to variables. Keras 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

_ASSIGN = "_direct_assign"  # what `Variable.assign` calls outside of a `StatelessScope`


@contextlib.contextmanager
def observed(observe: Callable[[Any], None]) -> Iterator[None]:
    """Calls `observe(variable)` before each assignment to a Keras variable, in this context."""
    plain = getattr(keras.Variable, _ASSIGN)

    def assign(variable: Any, value: Any) -> None:
        observe(variable)
        plain(variable, value)

    _OBSERVERS.append(observe)
    try:
        with _assigned_by(assign):
            yield
    finally:
        _OBSERVERS.pop()


_OBSERVERS: list[Callable[[Any], None]] = []


def announce_assignments(variables: Iterable[Any]) -> None:
    """Tells the observers that a traced function, whose assignments they don't see, is about to assign variables."""
    for observe in _OBSERVERS:
        for variable in variables:
            observe(variable)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Assignments in this context are those of an update that is the same for all replicas."""
    with _assigned_by(_PLAIN):
        yield


_PLAIN = getattr(keras.Variable, _ASSIGN)


@contextlib.contextmanager
def _assigned_by(function: Callable[[Any, Any], None]) -> Iterator[None]:
    before = getattr(keras.Variable, _ASSIGN)
    setattr(keras.Variable, _ASSIGN, function)
    try:
        yield
    finally:
        setattr(keras.Variable, _ASSIGN, before)
