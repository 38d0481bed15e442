"""The state of Python objects, such as callbacks: those of their attributes that are plain data."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PLAIN = (type(None), bool, int, float, str, np.ndarray, np.generic)


def attributes_of(target: Any, largest: int | None = None) -> dict[str, Any]:
    """Returns copies of the attributes of an object that are plain data.

    These are numbers, text, arrays in memory, the states of random generators, and lists, tuples, sets and dicts of
    them.

    Args:
        target: The object.
        largest: Bytes of the largest array that is copied; `None` for no limit.
    """
    found = {}
    for name, value in vars(target).items():
        if largest is not None and getattr(value, "nbytes", 0) > largest:
            continue
        try:
            is_variable = isinstance(value, tf.Variable | keras.Variable)
            found[name] = np.array(value) if is_variable else _copy(value)
        except TypeError:  # a model, a function, a file
            continue
    return found


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that have changed: they are state, the others are settings of the script."""
    return {name: value for name, value in now.items() if name not in before or not are_equal(before[name], value)}


def restore(target: Any, attributes: dict[str, Any]) -> None:
    """Sets attributes of an object."""
    for name, value in attributes.items():
        existing = getattr(target, name, None)
        if isinstance(existing, tf.Variable | keras.Variable):
            existing.assign(value)
        elif isinstance(existing, np.random.Generator):
            existing.bit_generator.state = value
        elif isinstance(existing, np.random.RandomState):
            existing.set_state(value)
        elif isinstance(existing, random.Random):
            existing.setstate(value)
        else:
            setattr(target, name, _copy(value))


def _copy(value: Any) -> Any:
    if isinstance(value, tf.Variable | keras.Variable):
        raise TypeError  # in a list: it would be replaced, and not assigned
    if tf.is_tensor(value):
        return np.array(value)
    if isinstance(value, np.random.Generator):
        return _copy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or isinstance(value, np.memmap):
            raise TypeError
        return value.copy()
    if type(value) in _PLAIN or isinstance(value, np.generic):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_copy(item) for item in value)
    if type(value) is dict:
        return {_copy(key): _copy(item) for key, item in value.items()}
    raise TypeError


def are_equal(one: Any, other: Any) -> bool:
    """True if two attributes, or dicts of attributes, are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    return bool(one == other) or (one != one and other != other)  # both are NaN
