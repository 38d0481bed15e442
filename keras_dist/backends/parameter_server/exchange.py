"""Batches on the coordinator, and what the coordinator and the workers tell each other about a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist.compat import tf_graphs
from keras_dist.data import shares
from keras_dist.data.shares import Share, Shares
from keras_dist.errors import NotSupportedError
from keras_dist.logging import warn_once
from keras_dist.step.step import Step
from keras_dist.training.trial import as_tensors, epsilon

NO_FINGERPRINT = 0.0  # of a share: there is one reader, whose data nobody compares


def cut(batch: Any, size: int) -> list[Share]:
    """Cuts a batch into a share for each of `size` replicas; some may be empty."""
    is_cut = isinstance(batch, Shares)  # by the dataset
    parts = batch.parts if is_cut else [shares.cut(batch, index, size) for index in range(size)]
    if bool(parts[0].is_whole):
        warn_once(shares.UNCUT)
    return [part._replace(count=int(part.count), total=int(part.total)) for part in parts]


def spec_of(iterator: Any) -> Any:
    """Returns what Keras would trace a step for, `None` where there is no dataset."""
    spec = getattr(iterator, "element_spec", None)
    spec = spec.parts[0].data if isinstance(spec, Shares) else spec
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)


def type_of(leaf: Any) -> Any:
    """Returns the specification of a tensor, `None` of `None`."""
    return None if leaf is None else tf.type_spec_from_value(leaf)


def without_optionals(batch: Any) -> Any:
    """Returns a batch of tensors with `None` where Keras's datasets hold an empty `Optional`."""
    optional = tf.experimental.Optional
    return as_tensors(tf.nest.map_structure(lambda leaf: None if isinstance(leaf, optional) else leaf, batch))


Logs = dict[str, Any]


class Known(NamedTuple):
    """What earlier runs of a step have told the coordinator."""

    gathered: tuple[Any, ...]  # what the shares have told each other, in their order; empty in the first run
    kept: tuple[Any, ...]  # for each phase that was applied the values that the step needs again

    def of_any_shape(self) -> Known:
        """Returns these specifications with any number of shares and examples, of any length."""
        specs = [tf.TensorSpec([None] * spec.shape.rank, spec.dtype) for spec in self.gathered]
        return self._replace(gathered=tuple(specs))


class Outputs(NamedTuple):
    """What a worker returns of a step."""

    logs: Logs  # what the step has returned, except for what is computed from the metrics
    metrics: Sequence[Any]  # their states; they start from a reset
    seeds: Sequence[Any]  # the random states after the step
    # Values of what else it has assigned, such as BatchNormalization's moving averages. In training they are put
    # together for each server, as the gradients are.
    statistics: Sequence[Any]
    gradients: Sequence[Any] = ()  # for each call of `apply` what this share counts in those of the batch
    told: Sequence[Any] = ()  # what this share has told the others, for what must see the whole batch


@dataclasses.dataclass
class ShareStep(Step):
    """A step on a share. Shares can't meet within it: the coordinator gathers what they tell, between two runs."""

    index: Any = 0  # of the share among those that are not empty
    shares: Any = 1  # how many meet in a reduction
    # What all shares have told in the run before; empty in the first run, for which this share is the only one.
    gathered: Sequence[Any] = ()
    told: list[Any] = dataclasses.field(default_factory=list)  # by this share in this run

    def __post_init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()

    @property
    def position(self) -> Any:
        return self.index if self.gathered else 0

    def all_gather(self, tensor: Any, name: str) -> Any:
        check_graph(self._graph, "gathers what all shares compute", name)
        self.told.append(tensor)
        if not self.gathered:
            return tensor
        rows = self.gathered[len(self.told) - 1]
        # What is told in later runs may have another shape than in this one, where the batch is not known yet.
        fits = tf.reduce_all(tf.shape(rows)[1:] == tf.shape(tensor)[1:])
        rows = tf.cond(fits, lambda: rows, lambda: tensor)
        rows.set_shape([None, *tensor.shape[1:]])
        return rows

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return tf.reduce_sum(self.all_gather(numbers[None], name), 0)

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        """See `Backend`. Of sparse gradients the rows of all shares are gathered."""
        results = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                values, indices = self.all_gather(gradient.values, name), self.all_gather(gradient.indices, name)
                results.append(tf.IndexedSlices(values, indices, gradient.dense_shape))
            else:
                results.append(self.all_reduce_exact(gradient, name))
        return results, row[None, :]

    def weigh_once(self, gradients: Sequence[Any], is_loss_weighted: bool) -> list[Any]:
        """Weights gradients, as `weigh`. Rows of all shares, of `kd.all_reduce`, come from one share only."""
        weighed = self.weigh(gradients, is_loss_weighted)
        for index, rows in enumerate(gradients):
            if self.is_reduced(rows):
                count = tf.where(tf.equal(self.position, 0), tf.size(rows.indices), 0)
                weighed[index] = tf.IndexedSlices(rows.values[:count], rows.indices[:count], rows.dense_shape)
        return weighed


def check_graph(graph: Any, what: str, received: str) -> None:
    """Raises `NotSupportedError` for what a step does in an inner graph: nothing of it can be returned."""
    if tf.compat.v1.get_default_graph() is not graph:
        raise NotSupportedError(
            f"The step {what} inside `tf.cond`, `tf.while_loop`, `tf.map_fn` or a `tf.function`. With parameter "
            "servers the step itself must do so.",
            received,
            "Do it in the step itself, which `fit` compiles: `variable.assign(tf.where(condition, value, variable))`.",
        )


def teller(told: Sequence[Any], data: Any, position: Any) -> Callable[[Any, Any], list[Any]] | None:
    """Returns a function of a share's data and position that computes what the share tells in its first run.

    `None` if something of it depends on more: on weights, or random numbers. In later runs it may depend on what the
    others have told before: the caller compares.
    """
    found = [tf_graphs.function_of(tensor, _leaves(data, position)) for tensor in told]
    functions = [each for each in found if each is not None]

    def tell(data: Any, position: Any) -> list[Any]:
        leaves = _leaves(data, position)
        return [function(*[leaves[index] for index in used]) for function, used in functions]

    return tell if len(functions) == len(found) else None


def _leaves(data: Any, position: Any) -> list[Any]:
    leaves: list[Any] = tf.nest.flatten((data, position), expand_composites=True)
    return leaves


def of_all_shares(told: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Returns the tensors of all shares, one share after the other; one that fits none if their shapes differ yet."""
    return tuple(
        tf.concat(parts, 0)
        if len({tuple(part.shape[1:]) for part in parts}) == 1
        else tf.zeros([0] * parts[0].shape.rank, parts[0].dtype)
        for parts in zip(*told, strict=True)
    )


def first_change(told: Any, before: Any) -> tuple[Any, Any] | None:
    """Returns the first tensor that the shares have told otherwise than in the run before, and what that was."""
    pairs = zip(tf.nest.flatten(told), tf.nest.flatten(before), strict=True)
    return next((pair for pair in pairs if _bits(pair[0]) != _bits(pair[1])), None)


def _bits(tensor: Any) -> Any:
    array = tensor.numpy()
    return array.shape, array.tolist() if array.dtype == object else array.tobytes()  # strings; NaN equals NaN


def is_rounding(one: Any, other: Any) -> bool:
    """True if two tensors differ as little as results of two workers, or of a GPU. Random numbers differ by more."""
    if one.shape != other.shape or not one.dtype.is_floating:
        return False
    wide, before = tf.cast(one, tf.float64).numpy(), tf.cast(other, tf.float64).numpy()
    scale = np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide))
    return np.allclose(wide, before, rtol=0, atol=scale * epsilon(one.dtype) ** 0.5, equal_nan=True)
