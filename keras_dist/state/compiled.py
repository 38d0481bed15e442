"""The arguments of `compile` as text, to compare them between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_dist.compat import keras_model

_COMPARED = ("loss", "loss_weights", "metrics", "weighted_metrics", "steps_per_execution", "run_eagerly")
_NOT_COMPARED = ("name", "dtype")  # Keras numbers the names of all objects, including those of one rank only


def describe(model: keras.Model) -> list[str]:
    """Returns a line for each argument of `compile` that is not `None`.

    Example:

    >>> describe(model)
    ["loss='mse'", "metrics=[MeanIoU(num_classes=3)]", ...]
    """
    arguments = keras_model.compile_arguments(model)
    return [f"{name}={_text(arguments[name])}" for name in _COMPARED if arguments.get(name) is not None]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in sorted(value.items(), key=str)) + "}"
    if isinstance(value, type) or not hasattr(value, "get_config"):  # the repr of an object may be its address
        return str(getattr(value, "__qualname__", type(value).__name__))
    return f"{type(value).__name__}({_arguments(value)})"


def _arguments(value: Any) -> str:
    """Returns the arguments that are plain values, as text."""
    try:
        config = value.get_config()
    except Exception:  # a custom `get_config`, or none
        return ""
    if isinstance(value, keras.losses.Loss):  # some configurations lack the arguments of the loss function
        for item in vars(value).values():
            config = {**config, **item} if isinstance(item, dict) else config
    plain = {key: item for key, item in config.items() if isinstance(item, str | bool | int | float)}
    return ", ".join(f"{key}={item!r}" for key, item in sorted(plain.items()) if key not in _NOT_COMPARED)
