"""What can't be done with the same numbers as in one process, and so is refused at once. The whole list."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from keras_dist.compat import keras_model
from keras_dist.errors import ConfigurationError, NotSupportedError, other_keras_backend
from keras_dist.logging import logger


def check_keras_backend() -> None:
    """Raises `ConfigurationError` if Keras computes with JAX, PyTorch or NumPy."""
    if (name := keras.backend.backend()) != "tensorflow":
        raise other_keras_backend(f"Keras on {name!r}")


def refuse_jit() -> None:
    """Raises: a collective can't be inside of what XLA compiles."""
    raise NotSupportedError(
        "XLA can't compile a step with a reduction over the ranks in it.",
        "jit_compile=True",
        "Leave `jit_compile` out of `compile`: it is off in distributed training.",
    )


def note_jit(model: keras.Model, asked: bool | str, is_chief: bool) -> None:
    """Says what has become of XLA: in the log, and aloud where Keras by itself would have turned it on."""
    logger().debug("jit_compile=%r is off: XLA can't hold a reduction over the ranks", asked)
    if asked == "auto" and keras_model.would_jit(model):
        note_jit_is_off(is_chief)


@functools.cache
def note_jit_is_off(is_chief: bool) -> None:
    """Says once, on the chief, that Keras would have turned XLA on. Without a GPU it never does by itself."""
    if is_chief:
        logger().warning(
            "jit_compile='auto' is off in distributed training: XLA can't compile a step with a reduction over the "
            "ranks in it."
        )


def check_model(model: keras.Model) -> None:
    """Raises if the model depends on the size or the order of the batches that one process sees.

    Raises:
        NotSupportedError: If a layer keeps state from batch to batch for each example (a stateful RNN), or an
            input has a fixed batch size: each rank sees a part of the batch only.
    """
    for layer in keras_model.flatten_layers(model):
        if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
            raise NotSupportedError(
                "A stateful RNN keeps a state for each place in the batch, which splitting the batch would mix up.",
                f"layer {layer.name!r} with stateful=True",
                "Make it stateful=False, or train it in one process.",
            )
    for tensor in _inputs(model):
        if tensor.shape and tensor.shape[0] is not None:
            raise NotSupportedError(
                "The model's input has a fixed batch size, but each rank gets only its share of a batch.",
                f"input {tensor.name!r} with batch_shape={tuple(tensor.shape)}",
                "Give the input's shape without the batch: keras.Input(shape=(...)).",
            )


def refuse_bare_function(source: Any) -> None:
    """Raises `ConfigurationError` for a data set function that `kd.shard` hasn't seen."""
    if inspect.isroutine(source):
        raise ConfigurationError(
            "A function that returns a data set has to go through kd.shard, which tells it whose part to read.",
            f"the function {source.__qualname__}",
            f"Pass kd.shard({source.__name__}).",
        )


def _inputs(model: keras.Model) -> list[Any]:
    return list(getattr(model, "inputs", None) or [])
