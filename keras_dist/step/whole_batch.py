"""What makes a step on a share a part of the step on the whole batch.

The denominators of its losses and the statistics of layers are those of the whole batch, and its random numbers are
others than those of other shares. What it assigns to variables by hand is combined over the shares:

- A value that does not depend on the share (a moving average of weights, a count of steps) is the same on all replicas.
- A value from the share is combined by the variable's `aggregation`: the changes are summed, or averaged by examples.
- Without an `aggregation` nobody can know how, and it is refused. Keras's own normalizations are averaged.

A layer of the user's that collects state, or adds a loss that is no mean over its examples (a codebook, a queue, a
running mean), gets the inputs of all shares. So every replica computes what one process would, and returns the outputs
for its own share. What a layer does is read from the graph of its `call`, which is traced once more for that.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_losses, keras_optimizers, keras_random, tf_graphs
from keras_dist.compat.keras_model import attached
from keras_dist.compat.keras_random import layers_that_mix_examples
from keras_dist.data.shares import static_length
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import agreement, losses
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Arguments, Proof, same_length, traced
from keras_dist.step.gathering import gather_masked, take_rows, whole_draws
from keras_dist.step.metrics import counted_by_share
from keras_dist.step.step import Step
from keras_dist.step.xla import compiled_layers

COMBINED = ("sum", "mean")


def _assign(variable: Any, plain: Callable[[Any], Any], value: Any) -> Any:
    value, step = plain(value), step_module.current()
    if step is None:
        return value
    is_unknown = tf.executing_eagerly() or step.data is None
    if variable.aggregation in COMBINED:  # a static number of examples is a constant: it does not show in the graph
        step.own[id(variable)] = variable
    elif not is_unknown and not _depends_on(step, value) and not _counts(step, value):
        step.whole[id(variable)] = variable
    elif variable.aggregation == "none" and not is_unknown:
        raise NotSupportedError(
            "A step assigns a variable what it computes from its share of the batch. How the values of all shares make "
            "that of the whole batch can't be seen.",
            f"variable {variable.path!r} with aggregation='none'",
            "Assign it in the `call` of a layer, which then sees the whole batch; or create it with aggregation='sum' "
            "if the changes of the shares add up (a count), 'mean' if their mean over the examples is right.",
        )
    return value


def _depends_on(step: Step, value: Any) -> bool:
    """True if a value depends on the examples of the share, or it can't be seen in the step's own graph."""
    leaves = [leaf for leaf in tf.nest.flatten(step.data, expand_composites=True) if tf.is_tensor(leaf)]
    return any(leaf.graph is not value.graph for leaf in leaves) or not Proof(leaves).is_constant(value)


def _counts(step: Step, value: Any) -> bool:
    """True if a value is another one plus the number of examples in the share, which is a constant if it is static.

    If the share has one example, more likely steps are counted.
    """
    length = static_length(step.data)
    if length in (None, 1) or value.op.type not in ("Add", "AddV2"):
        return False
    return any(tf_graphs.constant_of(part) == length for part in value.op.inputs if part.shape.rank == 0)


@contextlib.contextmanager
def combined_assignments(exchange: Backend, model: keras.Model, step: Step) -> Iterator[None]:
    """Combines what the replicas assign to variables with an `aggregation`, at the end of this context."""
    variables = [variable for variable in keras_layers.own_state(model) if variable.aggregation in COMBINED]
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, old in zip(variables, before, strict=True):
        if id(variable) in step.own:
            change = change_of(old, variable.value, step.dtype)
            weight = step.part if variable.aggregation == "mean" else tf.cast(step.count > 0, step.dtype)
            change = exchange.all_reduce_exact(tf.math.multiply_no_nan(change, weight), step.next_name("assigned"))
            variable.assign(old + tf.cast(tf.round(change) if old.dtype.is_integer else change, old.dtype))
            step.whole[id(variable)] = variable


def change_of(before: Any, after: Any, dtype: Any = tf.float64) -> Any:
    """Returns what was added to a value; nothing if both are infinite."""
    change = tf.cast(after, dtype) - tf.cast(before, dtype)
    return tf.where(after == before, tf.zeros_like(change), change)


# Layers that need no more than their share, and the arguments, such as `training`, with which this was found.
_Known = MutableMapping[keras.layers.Layer, set[Any]]
_known_eagerly: _Known = weakref.WeakKeyDictionary()  # what a step that runs eagerly need not find out each time


def _call(
    exchange: Backend, layer: Any, plain: Any, effects_of: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    step = step_module.current()
    arguments = Arguments((args, kwargs))
    if step is None or not arguments.rows:
        return plain(*args, **kwargs)
    effects = effects_of(arguments)
    if effects is None or effects is _UNTRACED:
        adds = contextlib.nullcontext() if effects is None else attached(layer, "add_loss", _adds_loss)
        with contextlib.suppress(_AddsLoss), adds:
            return plain(*args, **kwargs)
        effects = _UNKNOWN
    logger().debug("the layer %r computes on the whole batch", layer.name)
    gathered = [gather_masked(exchange, step, rows) for rows in arguments.rows]
    step.whole.update({id(variable): variable for variable in effects.assigned})
    whole_args, whole_kwargs = arguments.with_rows([whole for whole, _ in gathered])
    with step_module.entered(None):
        outputs = plain(*whole_args, **whole_kwargs)
    leaves = keras.tree.flatten(outputs)
    have_rows = effects.have_rows or [tf.is_tensor(leaf) and same_length(leaf, gathered[0].rows) for leaf in leaves]
    for index, (leaf, has_rows) in enumerate(zip(leaves, have_rows, strict=True)):
        if has_rows:  # for all examples, each one equally many
            each = tf.shape(leaf)[0] // tf.maximum(tf.shape(gathered[0].rows)[0], 1)
            leaves[index] = take_rows(leaf, gathered[0].start * each, tf.shape(arguments.rows[0])[0] * each)
    return keras.tree.pack_sequence_as(outputs, leaves)


class _Effects(NamedTuple):
    """Why a layer must see the whole batch."""

    assigned: list[Any]  # variables that it assigns
    have_rows: list[bool] | None  # whether each of its outputs has rows for the examples; `None` if it can't be traced
    are_shared: bool  # what it assigns and adds is the same for all shares, or a mean


_UNKNOWN = _Effects([], None, False)
_UNTRACED = _Effects([], None, False)  # unknown, but it has no state: it matters only if it adds a loss


class _AddsLoss(Exception):
    """A layer that could not be traced adds a loss: it is called again, on the whole batch."""


def _adds_loss(loss: Any) -> None:
    raise _AddsLoss


def _effects(known: _Known, layer: Any, plain: Any, has_state: bool, arguments: Arguments) -> _Effects | None:
    """Returns what a layer does, `None` if it need not see the whole batch."""
    if not has_state and arguments.settings in known.get(layer, ()):
        return None
    adds = False

    def inspect(rows: Sequence[Any]) -> _Effects:
        nonlocal adds
        args, kwargs = arguments.with_rows(rows)
        with keras_layers.recorded(layer) as record:
            try:
                outputs = keras.tree.flatten(plain(*args, **kwargs))
            finally:
                adds = bool(record.losses)
        proof = Proof([*rows, *filter(_has_rows, record.outputs)])
        assigned = [variable for variable, value in record.assigned if not proof.is_constant(value)]
        are_shared = not assigned and all(proof.is_mean(loss) for loss in record.losses)
        harmless = [(part, Arguments(given)) for part, given in record.called if part not in record.adding]
        for part, given in harmless + [(layer, arguments)] * (not adds):
            known.setdefault(part, set()).add(given.settings)
        return _Effects(assigned, [_has_rows(output) for output in outputs], are_shared)

    try:
        effects = traced(arguments, inspect)
    except Exception as error:  # an eager layer: on the whole batch any layer is right
        logger().debug("the layer %r cannot be traced: %s", layer.name, error)
        return _UNKNOWN if adds or has_state else _UNTRACED
    return None if effects.are_shared else effects


def _has_rows(output: Any) -> bool:
    return isinstance(output, tf.Tensor) and bool(output.shape.rank) and output.shape[0] is None


@contextlib.contextmanager
def whole_batch(
    backend: Backend,
    prepare_optimizer: Callable[[Any], None],
    model: keras.Model | None = None,
    prepare: Callable[[Any], Any] = lambda values: values,
    exact: bool = False,
) -> Iterator[None]:
    """Makes the losses, gradients and statistics of a share those of the global batch, and its noise its own.

    Args:
        prepare_optimizer: Distributes an optimizer that the step applies and that is not distributed yet.
        model: The model whose step runs, `None` in a custom training loop.
        prepare: Takes the losses of single entries before the reduction and returns those to use.
        exact: True if noise and the moments of every BatchNormalization are those of the global batch too. The steps
            must know where their share starts.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_optimizers.found_optimizers(prepare_optimizer))
        if not backend.combines_means:
            stack.enter_context(keras_optimizers.scaled_losses(step_module.weigh_loss))
        stack.enter_context(tf_graphs.checked_conditions(functools.partial(agree_on_condition, backend)))
        stack.enter_context(whole_draws(backend) if exact else keras_random.replica_streams(_replica))
        stack.enter_context(keras_random.replica_operations(_replica))
        stack.enter_context(keras_losses.wrapped_losses(functools.partial(losses.on_whole_batch, backend)))
        rescale = functools.partial(losses.rescale, backend.all_reduce_exact)
        stack.enter_context(keras_losses.rescaled_losses(rescale, prepare))
        statistics = functools.partial(sum_statistics, backend.all_reduce_exact)
        stack.enter_context(keras_losses.batch_statistics(statistics, of_all=exact))
        stack.enter_context(keras_losses.weighted_scalars(step_module.current_part))
        stack.enter_context(keras_losses.added_losses(step_module.weight_of_sum))
        stack.enter_context(keras_layers.padded_texts(functools.partial(_greatest, backend)))
        if model is not None:
            stack.enter_context(counted_by_share(backend, model))
            # Lets layers that must see the whole batch do so; those that mix examples see it whatever they do.
            others = layers_that_mix_examples(model) if exact else ()
            known = _known_eagerly if tf.executing_eagerly() else weakref.WeakKeyDictionary()
            layers = [(layer, layer.call, has_state) for layer, has_state in keras_layers.own_layers(model)]
            for layer, plain, has_state in layers:
                effects = functools.partial(_effects, known, layer, plain, has_state)
                stack.enter_context(attached(layer, "call", functools.partial(_call, backend, layer, plain, effects)))
            for layer in others:
                call = functools.partial(_call, backend, layer, layer.call, lambda arguments: _UNKNOWN)
                stack.enter_context(attached(layer, "call", call))
            # Refuses assignments of which nobody knows how to combine them. It sees those in a graph.
            for variable in keras_layers.own_state(model):
                stack.enter_context(attached(variable, "assign", functools.partial(_assign, variable, variable.assign)))
            stack.enter_context(compiled_layers(model, backend.topology.is_chief))
        yield


def agree_on_condition(backend: Backend, condition: Any) -> Any:
    """Returns a bool tensor, or fails on all replicas if it differs between them."""
    if (step := step_module.current()) is None:
        return condition
    condition = tf.convert_to_tensor(condition)
    number = backend.all_reduce_exact(tf.cast(condition, tf.float64), step.next_name("condition"))
    return agreement.check_condition(number, backend.num_replicas, condition)


def _greatest(exchange: Backend, number: Any) -> Any:
    if (step := step_module.current()) is None:
        return number
    return tf.reduce_max(exchange.all_gather(number[None], step.next_name("width")))


def _replica() -> Any:
    step = step_module.current()
    return None if step is None else step.replica


def sum_statistics(sum_over_replicas: Callable[[Any, str], Any], numbers: Any) -> Any:
    """Sums the statistics of a layer over the replicas, for `BatchNormalization(synchronized=True)`.

    Gradients flow back to all replicas. A replica's gradient is weighted by its share when gradients are reduced. But
    the gradient of this sum comes from the losses of all replicas, so it is weighted by their shares here, unless the
    losses were. Outside of a distributed step `numbers` stay as they are.
    """
    step = step_module.current()
    if step is None:
        return numbers
    name = step.next_name("statistics")

    @tf.custom_gradient
    def total(numbers: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            part = tf.cast(step.part, upstream.dtype)
            if step.weighs_losses_of:
                part = tf.cast(step.count > 0, upstream.dtype)
            weighted_sum = sum_over_replicas(tf.math.multiply_no_nan(upstream, part), f"{name}_gradient")
            return tf.math.divide_no_nan(weighted_sum, part)

        # The single row of an empty share does not count.
        counted = tf.where(step.count > 0, numbers, tf.zeros_like(numbers))
        return sum_over_replicas(counted, name), gradient

    return total(numbers)
