"""XLA in a step that exchanges numbers: the layers are compiled, forward and backward; the rest of the step is not.

XLA cannot compile an operation that waits for other processes. Keras compiles a whole step. Here the outermost layer
that a step calls, most often the model, is one compiled function, and so is its gradient. What meets the other replicas
stays outside: the reduction of gradients, losses and metrics of the whole batch.

A layer that does so itself in its forward pass (synchronized BatchNormalization, `kd.gather`) cannot be compiled. It
is computed without XLA then, and in its place the layers inside it are compiled, as in any layer around it. One line
names it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_layers, keras_model, keras_strategy
from keras_dist.compat.keras_layers import Outside
from keras_dist.compat.keras_model import attached
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module


def explain_compilation(error: BaseException) -> BaseException:
    """Returns the error for an operation that XLA doesn't have, or `error` itself."""
    is_of_tensorflow = isinstance(error, tf.errors.OpError)
    found = re.search(r"unsupported operations when .* on XLA_\w+: (.*)", str(error)) if is_of_tensorflow else None
    if found is None:
        return error
    return NotSupportedError(
        "XLA cannot compile an operation of the model, in one process neither.",
        f"jit_compile=True, and {found[1]}",
        "Leave `jit_compile` out of `compile`, or use another operation. A layer that XLA can't compile should set "
        "`supports_jit = False`: Keras then turns XLA off for the model.",
    )


@contextlib.contextmanager
def compiled_layers(model: keras.Model, is_chief: bool) -> Iterator[None]:
    """Compiles the layers that a step calls, in this context, if the model was compiled with XLA."""
    compiler = _Compiler(is_chief)
    parts = keras_model.flatten_layers(model) if keras_layers.is_compiled(model) else []
    with contextlib.ExitStack() as stack:
        for layer in {id(layer): layer for layer in parts}.values():
            stack.enter_context(attached(layer, "call", functools.partial(compiler.call, layer, layer.call)))
        yield


class _Compiler:
    def __init__(self, is_chief: bool) -> None:
        self._is_chief = is_chief
        self._outside = 0  # layers that are not compiled

    def call(self, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if keras_layers.is_compiling() or tf.executing_eagerly() or keras_layers.is_symbolic():
            return plain(*args, **kwargs)
        try:
            return _Call(layer, plain, (args, kwargs))()
        except Outside as error:
            before, reason = self._outside, str(error)
        outputs = plain(*args, **kwargs)
        if self._outside == before:  # not only because of a layer inside it
            self._outside += 1
            step = step_module.current()
            # Not in a step that is only compared with the one on the ranks, where a layer may have another reason.
            if self._is_chief and (step is None or not step.is_plain):
                _tell(layer.name, reason)
        return outputs


@functools.cache
def _tell(name: str, reason: str) -> None:
    logger().warning(
        "jit_compile: XLA cannot compile the layer %r, which %s. It runs without XLA; the others are compiled.",
        name, reason,
    )  # fmt: skip


class _Call:
    """One call of a layer, as a pure function of its arguments and variables.

    So it does not matter where the variables are, and what the layer does is done by the step itself.
    """

    def __init__(self, layer: Any, plain: Callable[..., Any], arguments: Any) -> None:
        self._layer = layer
        self._plain = plain
        self._arguments = arguments
        self._leaves = keras.tree.flatten(arguments)
        self._places = [index for index, leaf in enumerate(self._leaves) if tf.is_tensor(leaf)]
        self._variables = keras_layers.variables_of(layer)

    def __call__(self) -> Any:
        tensors = [self._leaves[index] for index in self._places]
        values = [keras_layers.current_value(variable) for variable in self._variables]
        inputs = [tensors, keras_layers.masks_of(tensors), values]
        compiled = tf.function(self._pure, jit_compile=True, autograph=False)
        graph = compiled.get_concrete_function(*inputs).graph
        results = _with_loops(compiled, graph, inputs) if keras_layers.has_loop(graph) else compiled(*inputs)
        outputs, masks, losses, assigned = results
        # What the layer has done, in the step itself.
        keras_layers.set_masks(outputs, masks)
        for variable, value in zip(self._assigned, assigned, strict=True):
            variable.assign(value)
        for owner, loss in zip(self._owners, losses, strict=True):
            owner.add_loss(loss)
        following = iter(outputs)
        return keras.tree.map_structure(lambda leaf: next(following) if tf.is_tensor(leaf) else leaf, self._outputs)

    def _pure(self, tensors: Sequence[Any], masks: Mapping[int, Any], values: Sequence[Any]) -> Any:
        """Returns the outputs, their masks, the losses, and what is assigned."""
        keras_layers.set_masks(tensors, masks)
        leaves = list(self._leaves)
        for index, tensor in zip(self._places, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, leaves)
        scope = keras_layers.PureScope(self._layer, self._variables, values)
        with keras_strategy.initialized_at_once(), keras_layers.compiling(), scope:
            self._outputs = self._plain(*args, **kwargs)
            losses, self._owners = scope.take_losses()
        self._assigned = list(scope.assigned.values())
        outputs = [leaf for leaf in keras.tree.flatten(self._outputs) if tf.is_tensor(leaf)]
        assigned = [scope.get_current_value(variable) for variable in self._assigned]
        return outputs, keras_layers.masks_of(outputs), losses, assigned


def _with_loops(function: Callable[..., Any], graph: Any, inputs: Any) -> Any:
    """Calls a compiled function with loops. Its gradient is one compiled function too, which computes it once more.

    XLA does not return what a loop keeps of each iteration for its gradient.
    """
    captured = [outer for outer, _ in graph.captures if outer.dtype.is_floating]
    if captured:
        raise Outside(f"has a loop that uses {captured[0].name!r}, which is no argument of the layer")
    structure: list[Any] = []

    def called(tensors: Sequence[Any]) -> list[Any]:
        structure[:] = [function(*tf.nest.pack_sequence_as(inputs, tensors, expand_composites=True))]
        return tf.nest.flatten(structure, expand_composites=True)

    @tf.function(jit_compile=True, autograph=False)
    def gradients(tensors: Sequence[Any], upstream: Sequence[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(floats := [tensor for tensor in tensors if tensor.dtype.is_floating])
            outputs = called(tensors)
        pairs = [pair for pair in zip(outputs, upstream, strict=True) if pair[0].dtype.is_floating]
        targets, given = zip(*pairs, strict=True)
        found = iter(tape.gradient(list(targets), floats, list(given)))
        return [next(found) if tensor.dtype.is_floating else None for tensor in tensors]

    @tf.custom_gradient
    def pure(*tensors: Any) -> Any:
        return called(tensors), lambda *upstream: gradients(tensors, upstream)

    results = pure(*tf.nest.flatten(inputs, expand_composites=True))
    return tf.nest.pack_sequence_as(structure, results, expand_composites=True)[0]
