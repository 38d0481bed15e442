"""What a model was compiled with, in words that can be compared between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_dist.compat import keras_model

_COMPARED = ("loss", "loss_weights", "metrics", "weighted_metrics", "steps_per_execution", "run_eagerly")
_NOT_COMPARED = ("name", "dtype")  # Keras numbers names on, also those of objects that a rank alone has made


def describe(model: keras.Model) -> list[str]:
    """Returns a line for each argument of `compile` that is something.

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
    if isinstance(value, type) or not hasattr(value, "get_config"):  # an object's own text may be its address
        return str(getattr(value, "__qualname__", type(value).__name__))
    return f"{type(value).__name__}({_arguments(value)})"


def _arguments(value: Any) -> str:
    """Returns the plain ones: what can't be told in words can't be compared in words either."""
    try:
        config = value.get_config()
    except Exception:  # the user's own, or none for this class
        return ""
    if isinstance(value, keras.losses.Loss):  # the configuration of some leaves out what their function gets
        for item in vars(value).values():
            config = {**config, **item} if isinstance(item, dict) else config
    plain = {key: item for key, item in config.items() if isinstance(item, str | bool | int | float)}
    return ", ".join(f"{key}={item!r}" for key, item in sorted(plain.items()) if key not in _NOT_COMPARED)
