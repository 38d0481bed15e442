"""`kd.all_reduce`: gradients of the global batch, for a step that changes them itself before the update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.step import step as step_module
from keras_dist.step import tables
from keras_dist.step.step import Step


def all_reduce(backend: Backend, gradients: Any) -> Any:
    """See `kd.all_reduce`.

    The optimizer reduces dense gradients once more. That changes nothing: the weights of the shares sum to 1. Rows of
    sparse ones would be there twice, for which some optimizers compute something else: it knows them by their indices.

    Raises:
        ConfigurationError: If there are several replicas and no step runs.
    """
    if backend.num_replicas == 1:
        return gradients
    step = step_of("kd.all_reduce()")
    if step.is_plain:
        return gradients
    leaves = tf.nest.flatten(gradients)
    present = [index for index, leaf in enumerate(leaves) if leaf is not None]
    shares = [leaves[index] for index in present]
    shares = shares if backend.combines_means else step.weigh_gradients(shares, _are_losses_weighted(step))
    # The row has no news: the optimizer's own reduction compares the ranks' data.
    sums, _ = backend.all_reduce(shares, tf.zeros([1]), step.next_name("all_reduce"))
    count = backend.num_replicas if step.shares is None else step.shares
    for index, total in zip(present, sums, strict=True):
        whole = tables.add_rows(total, count, lookup=leaves[index])
        # Replicas of one process get the same tensors. Each goes on with its own, on its device.
        leaves[index] = tf.nest.map_structure(tf.identity, whole, expand_composites=True)
    step.reduced += [leaf.indices for leaf in leaves if isinstance(leaf, tf.IndexedSlices)]
    return tf.nest.pack_sequence_as(gradients, leaves)


def _are_losses_weighted(step: Step) -> bool:
    """True if the losses were weighted before the gradients were computed. The optimizer weights them from now on."""
    if len(step.weighs_losses_of) > 1:
        raise NotSupportedError(
            "kd.all_reduce() can't tell whose gradients it gets: several LossScaleOptimizers have scaled a loss.",
            f"{len(step.weighs_losses_of)} optimizers with scaled losses",
            "Scale one loss in a step, or let the optimizers clip: clipnorm, clipvalue or global_clipnorm.",
        )
    are_weighted = bool(step.weighs_losses_of)
    step.weighs_losses_of.clear()
    return are_weighted


def step_of(call: str) -> Step:
    """Returns the current step.

    Raises:
        ConfigurationError: If `call` is made outside of a step, where the replicas' shares are not known.
    """
    step = step_module.current()
    if step is None:
        raise outside_of_a_step(call)
    return step


def outside_of_a_step(call: str) -> ConfigurationError:
    """Returns the error for a loop of the script's own in which nothing is shared."""
    return ConfigurationError(
        "A reduction outside of a step: nothing says which part of the batch this replica has.",
        f"{call} outside of kd.run and `fit`",
        "Put it into the function of kd.run, and iterate over kd.shard(dataset): "
        "`for batch in kd.shard(dataset): kd.run(step, (batch,))`. Or use `fit` and `train_step`.",
    )
