"""A layer's call as a pure function, which XLA can compile apart from the rest of a step. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_xla.py` fails when one of the private names changes, or TensorFlow no longer needs the split.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import set_keras_mask

from keras_dist.compat import keras_layers, keras_placement, keras_random
from keras_dist.compat.keras_model import attached, mask_of

# Loops. Their gradient reads lists of tensors that the forward pass has filled, and XLA returns no such list.
_LOOPS = ("While", "StatelessWhile")


class Outside(Exception):
    """What a layer does cannot be a part of a pure function."""


_IS_COMPILING: contextvars.ContextVar[bool] = contextvars.ContextVar("keras_dist_xla", default=False)


def is_compiling() -> bool:
    """True inside of a layer that XLA is to compile."""
    return _IS_COMPILING.get()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """The context of a layer that XLA is to compile."""
    token = _IS_COMPILING.set(True)
    try:
        yield
    finally:
        _IS_COMPILING.reset(token)


def note_reduction() -> None:
    """Called before each reduction: XLA can't compile it.

    Raises:
        Outside: Inside of a layer that XLA is to compile.
    """
    if is_compiling():
        raise Outside("exchanges numbers with the other replicas")


@contextlib.contextmanager
def plain_functions(model: keras.Model) -> Iterator[None]:
    """Keeps Keras from compiling whole steps with XLA, in this context, in which it makes their functions."""
    with attached(model, "_jit_compile", False):
        yield


@contextlib.contextmanager
def without_strategy(model: keras.Model) -> Iterator[None]:
    """In this context Keras resolves `jit_compile="auto"` as in one process: with a strategy it turns XLA off."""
    with attached(model, "_distribute_strategy", None):
        yield


def is_compiled(model: keras.Model) -> bool:
    """True if a model was compiled with XLA, by the script or by Keras's own choice."""
    return bool(getattr(model, "compiled", False) and model._jit_compile and not model.run_eagerly)


def variables_of(layer: keras.layers.Layer) -> list[Any]:
    """Returns the variables that a call of a layer may use: its own, and the state of the global random generator."""
    generator = keras_random.global_seed_generator()
    return [*layer.variables, *([] if generator is None else [generator.state])]


def current_value(variable: Any) -> Any:
    """Returns a variable's value in this step, without the cast of mixed precision."""
    scope = keras_placement.stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(keras_placement.backing(variable) if value is None else value)


class PureScope(keras.StatelessScope):
    """Keeps to itself what a layer assigns and which losses it adds. Layers without an effect of their own may do so.

    Args:
        layer: The layer.
        variables: Those that have a value here.
        values: Tensors.

    Raises:
        Outside: If something else is assigned than statistics, random states and metrics: a weight that is trained
            (SpectralNormalization), or the state of a layer of the script's own.
    """

    def __init__(self, layer: keras.layers.Layer, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update({id(variable): value for variable, value in zip(variables, values, strict=True)})
        self.assigned: dict[int, Any] = {}
        self._layer = layer
        self._own = {id(variable) for variable in keras_layers.own_state(layer)}
        self._outer = keras_placement.stateless_scope()

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if variable.trainable or id(variable) in self._own:
            raise Outside(f"assigns {variable.path!r}")
        self.assigned[id(variable)] = variable
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value

    def take_losses(self) -> tuple[list[Any], list[Any]]:
        """Returns the losses that were added, and the layers that have added them."""
        losses: list[Any] = []
        owners: list[Any] = []
        for layer in self._layer._flatten_layers():
            own = [loss for loss in self.losses if id(loss) in layer._loss_ids]
            layer._loss_ids.difference_update(map(id, own))  # they are no losses of the step: their copies will be
            losses += own
            owners += [layer] * len(own)
        return losses, owners


def masks_of(tensors: Sequence[Any]) -> dict[int, Any]:
    """Returns the masks that layers have attached to tensors, by the index of the tensor."""
    masks = {index: mask_of(tensor) for index, tensor in enumerate(tensors)}
    return {index: mask for index, mask in masks.items() if mask is not None}


def set_masks(tensors: Sequence[Any], masks: Mapping[int, Any]) -> None:
    """Attaches masks to tensors, as `masks_of` returns them."""
    for index, mask in masks.items():
        set_keras_mask(tensors[index], mask)


def has_loop(graph: Any) -> bool:
    """True if a graph, or a function in it, has a loop."""
    proto = graph.as_graph_def()
    nodes = [*proto.node, *(node for function in proto.library.function for node in function.node_def)]
    return any(node.op in _LOOPS for node in nodes)
