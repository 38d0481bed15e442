"""What makes a step on a share a part of the step on the whole batch.

The denominators of its losses and the statistics of layers are those of the whole batch, and its random numbers are
others than those of other shares.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_losses, keras_optimizers, keras_random, tf_graphs
from keras_dist.compat.keras_random import layers_that_mix_examples
from keras_dist.step import agreement, losses
from keras_dist.step import step as step_module
from keras_dist.step.assigned import checked_assignments
from keras_dist.step.draws import whole_draws
from keras_dist.step.gathering import Exchange
from keras_dist.step.metrics import counted_by_share
from keras_dist.step.whole_layers import whole_layers
from keras_dist.step.xla import compiled_layers


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
        backend: The backend.
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
        stack.enter_context(whole_losses(backend, prepare))
        statistics = functools.partial(sum_statistics, backend.all_reduce_exact)
        stack.enter_context(keras_losses.batch_statistics(statistics, of_all=exact))
        stack.enter_context(keras_losses.weighted_scalars(step_module.current_part))
        stack.enter_context(keras_losses.added_losses(step_module.weight_of_sum))
        stack.enter_context(keras_layers.padded_texts(functools.partial(_greatest, backend)))
        if model is not None:
            stack.enter_context(counted_by_share(backend, model))
            stack.enter_context(whole_layers(backend, model, layers_that_mix_examples(model) if exact else ()))
            stack.enter_context(checked_assignments(model))
            stack.enter_context(compiled_layers(model, backend.topology.is_chief))
        yield


def agree_on_condition(backend: Backend, condition: Any) -> Any:
    """Returns a bool tensor, or fails on all replicas if it differs between them."""
    if (step := step_module.current()) is None:
        return condition
    condition = tf.convert_to_tensor(condition)
    number = backend.all_reduce_exact(tf.cast(condition, tf.float64), step.next_name("condition"))
    return agreement.check_condition(number, backend.num_replicas, condition)


def _greatest(exchange: Exchange, number: Any) -> Any:
    if (step := step_module.current()) is None:
        return number
    return tf.reduce_max(exchange.all_gather(number[None], step.next_name("width")))


def _replica() -> Any:
    step = step_module.current()
    return None if step is None else step.replica


@contextlib.contextmanager
def whole_losses(exchange: Exchange, prepare: Callable[[Any], Any] = lambda values: values) -> Iterator[None]:
    """Makes the losses of a share those of the global batch, in this context. `prepare` as in `whole_batch`."""
    rescale = functools.partial(losses.rescale, exchange.all_reduce_exact)
    on_whole_batch = functools.partial(losses.on_whole_batch, exchange)
    with keras_losses.wrapped_losses(on_whole_batch), keras_losses.rescaled_losses(rescale, prepare):
        yield


def sum_statistics(sum_over_replicas: Callable[[Any, str], Any], numbers: Any) -> Any:
    """Sums the statistics of a layer over the replicas, for `BatchNormalization(synchronized=True)`.

    Gradients flow back to all replicas. A replica's gradient is weighted by its share when gradients are reduced. But
    the gradient of this sum comes from the losses of all replicas, so it is weighted by their shares here, unless the
    losses were.

    Args:
        sum_over_replicas: Sums a tensor over the replicas, under a name.
        numbers: Float tensor of the same shape on all replicas.

    Returns:
        The sum; outside of a distributed step, `numbers` itself.
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
