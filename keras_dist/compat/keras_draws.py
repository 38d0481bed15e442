"""Keras's random functions, where its layers and `keras.random` find them. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import random as functions

# Those whose first argument is the shape of what they return.
OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")


@contextlib.contextmanager
def replaced(replacements: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Calls other functions in place of Keras's, in this context.

    Args:
        replacements: By the name of the function. Each gets the plain one as its first argument.
    """
    plain = {name: getattr(functions, name) for name in replacements}

    def calling(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: replacements[name](plain[name], *args, **kwargs)

    for name in replacements:
        setattr(functions, name, calling(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(functions, name, function)


def layers_that_mix_examples(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of Keras that pair random examples of a batch."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, _MIXING)]


_MIXING = tuple(getattr(keras.layers, name) for name in ("MixUp", "CutMix") if hasattr(keras.layers, name))
