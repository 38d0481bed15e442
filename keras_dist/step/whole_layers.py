"""Layers that must see the whole batch: they collect state from it, or add a loss that is no mean over its examples.

Such a layer of the user's (a codebook, a queue, a counter of examples, a running mean) gets the inputs of all shares.
So every replica computes what one process would, and returns the outputs for its own share. What a layer does is read
from the graph of its `call`, which is traced once more for that: the outermost layer of the script tells about those in
it. BatchNormalization normalizes over a share, and is left out.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dist.compat import keras_layers
from keras_dist.compat.keras_model import attached
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Arguments, Proof, same_length, traced
from keras_dist.step.gathering import Exchange, gather_masked, take_rows

# Layers that need no more than their share, and the arguments, such as `training`, with which this was found.
_Known = MutableMapping[keras.layers.Layer, set[Any]]
_known_eagerly: _Known = weakref.WeakKeyDictionary()  # what a step that runs eagerly need not find out each time


class Layer(NamedTuple):
    """A layer of the user's.

    Args:
        layer: The layer.
        plain: Its `call`.
        has_state: True if it has variables that the user's code assigns.
    """

    layer: keras.layers.Layer
    plain: Callable[..., Any]
    has_state: bool


@contextlib.contextmanager
def whole_layers(exchange: Exchange, model: keras.Model, others: Sequence[keras.layers.Layer] = ()) -> Iterator[None]:
    """Lets layers of a model that must see the whole batch do so, in this context.

    Args:
        exchange: How the replicas gather the batch.
        model: The model.
        others: Further layers, which see it whatever they do.
    """
    layers = [Layer(layer, layer.call, has_state) for layer, has_state in keras_layers.own_layers(model)]
    effects = functools.partial(_effects, _known_eagerly if tf.executing_eagerly() else weakref.WeakKeyDictionary())
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attached(layer.layer, "call", functools.partial(_call, exchange, layer, effects)))
        for other in others:
            call = functools.partial(_call, exchange, Layer(other, other.call, False), lambda *_: _UNKNOWN)
            stack.enter_context(attached(other, "call", call))
        yield


def _call(
    exchange: Exchange, layer: Layer, effects_of: Callable[..., _Effects | None], *args: Any, **kwargs: Any
) -> Any:
    step = step_module.current()
    arguments = Arguments((args, kwargs))
    if step is None or not arguments.rows:
        return layer.plain(*args, **kwargs)
    effects = effects_of(layer, arguments)
    if effects is None or effects is _UNTRACED:
        adds = contextlib.nullcontext() if effects is None else attached(layer.layer, "add_loss", _adds_loss)
        with contextlib.suppress(_AddsLoss), adds:
            return layer.plain(*args, **kwargs)
        effects = _UNKNOWN
    logger().debug("the layer %r computes on the whole batch", layer.layer.name)
    gathered = [gather_masked(exchange, step, rows) for rows in arguments.rows]
    step.whole.update({id(variable): variable for variable in effects.assigned})
    whole_args, whole_kwargs = arguments.with_rows([whole for whole, _ in gathered])
    with step_module.entered(None):
        outputs = layer.plain(*whole_args, **whole_kwargs)
    leaves = keras.tree.flatten(outputs)
    have_rows = effects.have_rows or [tf.is_tensor(leaf) and same_length(leaf, gathered[0][0]) for leaf in leaves]
    own = [
        _own_rows(leaf, arguments.rows[0], *gathered[0]) if has_rows else leaf
        for leaf, has_rows in zip(leaves, have_rows, strict=True)
    ]
    return keras.tree.pack_sequence_as(outputs, own)


def _own_rows(output: Any, own: Any, whole: Any, start: Any) -> Any:
    """Returns the rows of this share from an output with rows for all examples, each one equally many."""
    each = tf.shape(output)[0] // tf.maximum(tf.shape(whole)[0], 1)
    return take_rows(output, start * each, tf.shape(own)[0] * each)


class _Effects(NamedTuple):
    """Why a layer must see the whole batch.

    Args:
        assigned: Variables that it assigns.
        have_rows: For each of its outputs whether it has rows for the examples; `None` if it can't be traced.
        are_shared: True if what it assigns and adds is the same for all shares, or a mean.
    """

    assigned: list[Any]
    have_rows: list[bool] | None
    are_shared: bool


_UNKNOWN = _Effects([], None, False)
_UNTRACED = _Effects([], None, False)  # unknown, but it has no state: it matters only if it adds a loss


class _AddsLoss(Exception):
    """A layer that could not be traced adds a loss: it is called again, on the whole batch."""


def _adds_loss(loss: Any) -> None:
    raise _AddsLoss


def _effects(known: _Known, layer: Layer, arguments: Arguments) -> _Effects | None:
    """Returns what a layer does, `None` if it need not see the whole batch."""
    if not layer.has_state and arguments.settings in known.get(layer.layer, ()):
        return None
    adds = False

    def inspect(rows: Sequence[Any]) -> _Effects:
        nonlocal adds
        args, kwargs = arguments.with_rows(rows)
        with keras_layers.recorded(layer.layer) as record:
            try:
                outputs = keras.tree.flatten(layer.plain(*args, **kwargs))
            finally:
                adds = bool(record.losses)
        proof = Proof([*rows, *filter(_has_rows, record.outputs)])
        assigned = [variable for variable, value in record.assigned if not proof.is_constant(value)]
        are_shared = not assigned and all(proof.is_mean(loss) for loss in record.losses)
        harmless = [(part, Arguments(given)) for part, given in record.called if part not in record.adding]
        for part, given in harmless + [(layer.layer, arguments)] * (not adds):
            known.setdefault(part, set()).add(given.settings)
        return _Effects(assigned, [_has_rows(output) for output in outputs], are_shared)

    try:
        effects = traced(arguments, inspect)
    except Exception as error:  # an eager layer: on the whole batch any layer is right
        logger().debug("the layer %r cannot be traced: %s", layer.layer.name, error)
        return _UNKNOWN if adds or layer.has_state else _UNTRACED
    return None if effects.are_shared else effects


def _has_rows(output: Any) -> bool:
    return isinstance(output, tf.Tensor) and bool(output.shape.rank) and output.shape[0] is None
