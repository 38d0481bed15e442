"""Keras's random functions, where its layers and `keras.random` find them. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import random as functions

# Those whose first argument is the shape of what they return.
OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")


@contextlib.contextmanager
def replaced(replacements: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Calls other functions in place of Keras's, in this context. Variables are initialized by Keras's own.

    Args:
        replacements: By the name of the function. Each gets the plain one as its first argument.
    """
    plain = {name: getattr(functions, name) for name in replacements}

    def calling(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _INITIALIZING.get():
                return plain[name](*args, **kwargs)
            return replacements[name](plain[name], *args, **kwargs)

        return call

    def initializing(plain_method: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            token = _INITIALIZING.set(True)
            try:
                return plain_method(*args, **kwargs)
            finally:
                _INITIALIZING.reset(token)

        return initialize

    methods = {name: getattr(keras.Variable, name) for name in _INITIALIZE}
    for name in replacements:
        setattr(functions, name, calling(name))
    for name, method in methods.items():
        setattr(keras.Variable, name, initializing(method))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(functions, name, function)
        for name, method in methods.items():
            setattr(keras.Variable, name, method)


# True while a variable gets its first value: what a step creates is the same on all replicas.
_INITIALIZING: contextvars.ContextVar[bool] = contextvars.ContextVar("keras_dist_initializing", default=False)
_INITIALIZE = ("_initialize_with_initializer", "_deferred_initialize")


def layers_that_mix_examples(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of Keras that pair random examples of a batch."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, _MIXING)]


_MIXING = tuple(getattr(keras.layers, name) for name in ("MixUp", "CutMix") if hasattr(keras.layers, name))
