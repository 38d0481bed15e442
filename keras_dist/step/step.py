"""The step that is being traced or run: the weight of this rank's share, what the ranks compare, how long they wait.

Each rank sends the fingerprint of its global batch and its learning rate along with the gradients, so comparing them
costs no communication. If they differ, the step stops on all ranks before it updates anything, and the error names rank
and cause. An evaluation or prediction sends nothing in its steps, so its fingerprints are compared before it returns.

All ranks start to work when a collective ends, and each measures how long it works until the next one. These durations
are sent with that collective: the slowest rank's minus its own is how long a rank has waited, without network time and
without synchronized clocks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist.compat import tf_compat, tf_graphs
from keras_dist.data.shares import Share, row_count
from keras_dist.errors import MismatchError, NotSupportedError


class Stopwatch:
    """Measures how long one rank waits, in steps and between them."""

    # How many steps of others came between a step's reading of weights and its update: a `keras.metrics.Mean`, `None`
    # unless workers are asynchronous.
    staleness: Any = None

    def __init__(self) -> None:
        self._started = tf_compat.host_variable(0.0, "started", dtype=tf.float64)
        self._waited = tf_compat.host_variable(0.0, "waited", dtype=tf.float64)

    def restart(self) -> None:
        """Resets the waiting time. Called just after a collective."""
        self._waited.assign(0.0)
        self._started.assign(tf.timestamp())

    def waited(self) -> float:
        """Returns for how many seconds this rank has waited for others since `restart`."""
        return float(self._waited.numpy())

    def worked(self, after: Sequence[Any] = ()) -> Any:
        """Returns for how many seconds this rank has worked since the last collective, once `after` is computed."""
        values = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in after]
        with tf.device("CPU:0"):
            # One number of each is copied to the host, which waits until a GPU has computed it.
            on_host = [tf.identity(tf.reshape(value, [-1])[:1]) for value in values]
            with tf.control_dependencies(on_host):
                return tf.cast(tf.timestamp() - self._started, tf.float32)

    def synchronized(self, worked: Any, by_rank: Any) -> None:
        """Notes that a collective has ended, in which all ranks sent what `worked` returned."""
        with tf.device("CPU:0"), tf.control_dependencies([by_rank]):
            self._waited.assign_add(tf.cast(tf.reduce_max(by_rank) - worked, tf.float64))
            self._started.assign(tf.timestamp())


WHOLE = "keras_dist_whole_batch"  # name of tensors that are gathered: the same on all replicas


class RowRange(NamedTuple):
    """Where the rows of a share are in the batch."""

    start: Any  # int32 scalar, the index of the share's first row
    total: Any  # int, or int32 scalar: the number of all rows, with filler rows (TPU)


@dataclasses.dataclass
class Step:
    """One step of one rank."""

    shares = None  # how many meet in a reduction, an integer scalar; `None` if that is the number of replicas

    count: Any  # int32 scalar, the number of examples in this rank's share
    total: Any  # int32 scalar, the number of examples in the global batch
    fingerprint: Any  # float32 scalar, the hash of the global batch
    stopwatch: Stopwatch | None = None  # measures how long this rank waits in the step, if a callback asks for it
    reductions: int = 0  # so far in this step, for their names
    replica: Any = 0  # index of the rank or replica, an int or an integer scalar
    data: Any = None  # the share
    examples: Any = ()  # of it, as a step of `kd.run` gets them
    place: RowRange | None = None  # `None` unless random numbers are drawn for the whole batch
    whole: dict[int, Any] = dataclasses.field(default_factory=dict)  # variables assigned what the whole batch gives
    own: dict[int, Any] = dataclasses.field(default_factory=dict)  # what this share gives, and have an `aggregation`
    # Ids of optimizers whose losses were weighted before their gradients were computed.
    weighs_losses_of: set[int] = dataclasses.field(default_factory=set)
    # The same on all replicas: what `kd.all_reduce` and `kd.gather` have returned.
    reduced: list[Any] = dataclasses.field(default_factory=list)
    means: list[Any] = dataclasses.field(default_factory=list)  # what losses of Keras have returned
    gradients: list[Any] = dataclasses.field(default_factory=list)  # of the share, in a step of `kd.run`
    is_plain: bool = False  # a step on the whole batch in this process: nothing is exchanged, see `trial.py`
    # Gets for each update the optimizer, the gradients of the whole batch, and the variables or `None`.
    applied: list[Any] | None = None
    looked_up: list[Any] = dataclasses.field(default_factory=list)  # eagerly: distinct ids of lookups by sparse inputs
    has_gathered: bool = False  # `kd.gather` was called, so that tensors may have the rows of all shares

    @classmethod
    def of(cls, share: Share, replica: int, stopwatch: Stopwatch | None = None) -> Step:
        return cls(share.count, share.total, share.fingerprint, stopwatch, replica=replica, data=share.data)

    @property
    def dtype(self) -> tf.DType:
        """The type of weights and denominators."""
        return tf.float64

    @property
    def position(self) -> Any:
        """The index of this share among those that are gathered."""
        return self.replica

    @property
    def part(self) -> Any:
        """This share's fraction of the global batch, a scalar."""
        return ratio(self.count, self.total, self.dtype)

    @property
    def part_of_gradients(self) -> Any:
        """By what gradients of this share's loss are weighted when they are reduced, unless the loss was."""
        return tf.cast(self.count > 0, self.dtype) if self.weighs_losses_of else self.part

    @property
    def rows_of_share(self) -> Any:
        """The number of rows of this share, an int32 scalar: fillers count too."""
        return self.count if self.data is None else row_count(self.data)

    def mean_over_examples(self, loss: Any) -> Any:
        """Returns the mean of a loss over the examples of this share, from the mean over its rows."""
        return loss

    def denominators(self, summands: Any) -> tuple[Any, Any]:
        """Returns the sum of a weight over all entries of this share, and over those of examples only.

        The single row of an empty share counts in neither.
        """
        total = tf.reduce_sum(summands)
        total = tf.where(self.count > 0, total, tf.zeros_like(total))
        return total, total

    def check_concatenated(self, rows: Any) -> None:
        """Raises `NotSupportedError` if no numbers can be drawn for shares that the step has concatenated."""

    def weigh(self, gradients: Sequence[Any], is_loss_weighted: bool = False) -> list[Any]:
        """Weights means over this share, so that the sum over the shares is the mean over the global batch.

        Gradients of a loss that was weighted stay as they are, unless the share is empty; so do integers and `None`.
        """
        if is_loss_weighted and tf.get_static_value(self.count):  # never empty
            return list(gradients)
        weight = tf.cast(self.count > 0, self.dtype) if is_loss_weighted else self.part
        return [_weighted(gradient, weight) for gradient in gradients]

    @contextlib.contextmanager
    def weighing(self, variables: Sequence[Any]) -> Iterator[None]:
        """Weights what is added to variables in this context."""
        before = [tf.identity(variable.value) for variable in variables]
        yield
        for variable, old in zip(variables, before, strict=True):
            (change,) = self.weigh([variable.value - old])
            variable.assign(old + change)

    def is_reduced(self, gradient: Any) -> bool:
        """True if a gradient has the rows of all replicas, perhaps clipped."""
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return is_sparse and any(gradient.indices is indices for indices in self.reduced)

    def next_name(self, kind: str) -> str:
        """Returns a name for the next reduction of this step, the same on every rank."""
        tf_graphs.note_reduction()
        tried = "" if self.applied is None else "tried_"
        name = f"keras_dist_{tried}{kind}_{self.reductions}"
        self.reductions += 1
        return name


def ratio(numerator: Any, denominator: Any, dtype: Any) -> Any:
    """Returns a fraction of two numbers, 0 where the denominator is 0."""
    return tf.math.divide_no_nan(tf.cast(numerator, dtype), tf.cast(denominator, dtype))


def _weighted(gradient: Any, weight: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(gradient.values, weight), gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return gradient
    # Not 0 × NaN: an empty share has no gradient, whatever its loss was.
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def weigh_loss(optimizer: Any, loss: Any) -> Any:
    """Weights the scaled loss of the current step's share.

    The gradients then have the magnitudes of those of the whole batch. Else in float16 a share's could overflow alone.
    """
    step = current()
    if step is None:
        return loss
    step.weighs_losses_of.add(id(optimizer))
    return loss * tf.cast(step.part, loss.dtype)


def weight_of_sum(losses: Any) -> Any:
    """Returns the factor of a sum over the share's examples, as a share's loss counts as a mean.

    `losses` whose rows are not the examples are not a sum over them.
    """
    step = current()
    if step is None:
        return None
    weight = ratio(step.total, step.count, step.dtype)
    return tf.where(tf.shape(losses)[0] == step.count, weight, tf.ones_like(weight))


_OUTSIDE = "outside"  # nothing says what is computed on: a share, or a whole batch
_CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("keras_dist_step", default=_OUTSIDE)


def entered(step: Step | None) -> contextlib.AbstractContextManager[None]:
    """Makes `step` the current one; `None` for what is computed on the whole batch."""
    return tf_compat.context_value(_CURRENT, step)


def current() -> Step | None:
    """Returns the step that is being traced or run, `None` outside of one."""
    return None if is_outside() else _CURRENT.get()


def is_outside() -> bool:
    """True if neither a step nor a computation on a whole batch is running."""
    return _CURRENT.get() is _OUTSIDE


_MARK = "keras_dist: the ranks disagree"
_CONDITION = "keras_dist: replicas differ in the condition of an update"
_SHAPES = "keras_dist: the shares of a batch have predictions of different shapes"


@functools.cache
def consistency_check_of(size: int) -> ConsistencyCheck:
    """Returns the one check of this process: models may share optimizers."""
    return ConsistencyCheck(size)


class ConsistencyCheck:
    """Compares the rows of all ranks inside a step, and explains afterwards what differed."""

    def __init__(self, size: int) -> None:
        self._rows = tf_compat.host_variable([[0.0, 0.0]] * size, "rows")

    def check(self, rows: Any, tensors: Sequence[Any]) -> list[Any]:
        """Returns `tensors`, or fails if the rows differ: the fingerprint of a rank's batch, and its learning rate."""
        are_equal = tf.reduce_all(tf.equal(rows, rows[:1]) | (tf.math.is_nan(rows) & tf.math.is_nan(rows[:1])))
        text = f"{_MARK} (a row per rank: fingerprint of its batch, learning rate)"

        with tf.control_dependencies([self._rows.assign(tf.where(are_equal, self._rows, rows))]):
            # A custom training loop raises this text; `fit` explains it.
            check = stop_unless(are_equal, [text, rows])
        with tf.control_dependencies([check]):
            return tf.nest.map_structure(tf.identity, list(tensors), expand_composites=True)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the `MismatchError` behind an error of a step, or the error itself."""
        if not isinstance(error, tf.errors.InvalidArgumentError) or _MARK not in str(error):
            return error
        fingerprints, rates = self._rows.numpy().T
        if np.all((fingerprints == fingerprints[0]) | (np.isnan(fingerprints) & np.isnan(fingerprints[0]))):
            return MismatchError(
                "The ranks have different learning rates.",
                ", ".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates)),
                "Set the learning rate on every rank, not only on the chief (take it out of `if kd.is_chief():`), "
                "and from values that are the same on all ranks.",
            )
        return _different_data(fingerprints)


def check_shapes(shapes: Any, rows: Any) -> Any:
    """Returns `rows`, or fails unless `shapes`, a row for each share with its predictions' shape, are the same."""
    return _checked(rows, tf.reduce_all(shapes == shapes[:1]), _SHAPES, shapes)


def check_condition(number: Any, replicas: int, condition: Any) -> Any:
    """Returns a bool tensor, or fails unless `number`, of the replicas on which it is true, is 0 or all."""
    return _checked(condition, (number == 0) | (number == replicas), _CONDITION, number)


def _checked(tensor: Any, is_right: Any, text: str, numbers: Any) -> Any:
    with tf.control_dependencies([stop_unless(is_right, [text, numbers])]):
        return tf.identity(tensor)


def stop_unless(condition: Any, data: Sequence[Any]) -> Any:
    """Returns an operation that fails unless a condition holds.

    `tf.debugging.Assert` puts it into a `tf.cond`: more to trace, and TensorFlow's optimizer warns of each.
    """
    return tf.raw_ops.Assert(condition=condition, data=data, summarize=-1)


def explain_check(error: BaseException) -> BaseException:
    """Returns the error behind one of `check_shapes` or `check_condition`, or the error itself."""
    text = str(error) if isinstance(error, tf.errors.InvalidArgumentError) else ""
    if _SHAPES in text:
        shapes = re.search(re.escape(_SHAPES) + r"\W*?(\[\[[\d\s\[\]]*\]\])", text)
        return NotSupportedError(
            "The predictions for the shares of a batch have different shapes, so they cannot be put together.",
            "shapes of an example's prediction, by share: " + (" ".join(shapes[1].split()) if shapes else "different"),
            "Let the shape not depend on the other examples of the batch: pad to a fixed length. Or predict on one "
            "rank, with a copy of the model that is not distributed.",
        )
    if _CONDITION in text:
        return MismatchError(
            "Some ranks would make an update and others would skip it, so some would wait forever.",
            "a tf.cond around the update of an optimizer, whose condition is true on some ranks only",
            "Compute the condition from what is the same on all ranks: from `kd.all_reduce(gradients)`, from the "
            "number of steps. keras.optimizers.LossScaleOptimizer skips steps with infinite gradients by itself.",
        )
    return error


class Fingerprints(NamedTuple):
    """What the steps of a rank have computed with since the last comparison."""

    data: int = 0  # the fingerprint of all batches
    constants: Sequence[tuple[str, str, str]] = ()  # of the steps that were traced, see `tf_graphs.constants_of`


def check_seen(by_rank: Sequence[Fingerprints]) -> None:
    """Raises `MismatchError`, the same on every rank, if their data or constants differ."""
    if any(seen.data != by_rank[0].data for seen in by_rank):
        raise _different_data(np.asarray([seen.data for seen in by_rank]))
    all_constants = [seen.constants for seen in by_rank]
    # Only types that occur equally often on every rank: the chief's step may also print or write summaries.
    types = [Counter(kind for _, kind, _ in constants) for constants in all_constants]
    common = {kind for kind, count in types[0].items() if all(counts[kind] == count for counts in types)}
    hashes = [Counter((kind, value) for _, kind, value in constants if kind in common) for constants in all_constants]
    if all(values == hashes[0] for values in hashes):
        return
    rank, others = next((rank, values) for rank, values in enumerate(hashes) if values != hashes[0])
    unknown = hashes[0] - others
    names = [f"{name} ({kind})" for name, kind, value in all_constants[0] if (kind, value) in unknown]
    raise MismatchError(
        "The ranks compute with different constants, so they no longer train the same model.",
        f"rank 0 and rank {rank} differ in {', '.join(itertools.islice(names, 3))}",
        "Usual causes: random numbers without a seed, or the order of a Python `set`, in a layer, a loss or a "
        "vocabulary. Make the constant the same on every rank (`sorted(...)`, a seed, kd.broadcast), or a weight.",
    )


def _different_data(fingerprints: np.ndarray) -> MismatchError:
    return MismatchError(
        "The ranks read different data, but every rank must pass the same data.",
        f"{differing_ranks(fingerprints)} of {len(fingerprints)} read a different batch than the rest "
        f"(fingerprints {', '.join(f'{int(value):06x}' for value in fingerprints)})",
        "Usual causes: a shuffle, augmentation or generator without the same seed on all ranks, an extra random "
        "operation on one rank, `deterministic=False`, files listed in a different order, data that depend on time "
        "or host. Set the seed, or let the chief read for all ranks: kd.distribute(model, data='chief'). If each rank "
        "reads its own shard, as after `dataset.shard(kd.size(), kd.rank())`: kd.distribute(model, data='sharded').",
    )


def differing_ranks(values: Sequence[Any] | np.ndarray) -> str:
    """Names the ranks whose value is not the most frequent one."""
    listed = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
    usual = max(listed, key=listed.count)
    ranks = [str(rank) for rank, value in enumerate(listed) if value != usual]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks)
