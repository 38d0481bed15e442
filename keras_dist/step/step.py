"""The step that is being traced or run, the weight of this rank's share in it, and how long ranks wait in it.

All ranks start to work when a collective ends, and each measures how long it works until the next one. These durations
are sent with that collective: the slowest rank's minus its own is how long a rank has waited, without network time and
without synchronized clocks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.compat import keras_layers, tf_graphs
from keras_dist.data.shares import Share


class Stopwatch:
    """Measures how long one rank waits, in steps and between them."""

    def __init__(self) -> None:
        with tf.device("CPU:0"), tf.init_scope():
            self._started = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_started")
            self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="keras_dist_waited")

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


class Place(NamedTuple):
    """Where the rows of a share are in the batch."""

    start: Any  # int32 scalar, the index of the share's first row
    total: Any  # int, or int32 scalar: the number of all rows, with filler rows (TPU)


@dataclasses.dataclass
class Step:
    """One step of one rank."""

    count: Any  # int32 scalar, the number of examples in this rank's share
    total: Any  # int32 scalar, the number of examples in the global batch
    fingerprint: Any  # float32 scalar, the hash of the global batch
    stopwatch: Stopwatch | None = None  # measures how long this rank waits in the step, if a callback asks for it
    reductions: int = 0  # so far in this step, for their names
    rows: Any = None  # float vector: 1 for each real row of the share, 0 for a filler row (TPU); `None`: all are real
    dtype: Any = tf.float64  # of weights and denominators
    replica: Any = 0  # index of the rank or replica, an int or an integer scalar
    shares: Any = None  # how many meet in a reduction, an integer scalar; `None` if that is the number of replicas
    data: Any = None  # the share
    place: Place | None = None  # `None` unless random numbers are drawn for the whole batch
    whole: dict[int, Any] = dataclasses.field(default_factory=dict)  # variables assigned what the whole batch gives
    own: dict[int, Any] = dataclasses.field(default_factory=dict)  # what this share gives, and have an `aggregation`
    # Ids of optimizers whose losses were weighted before their gradients were computed.
    weighs_losses_of: set[int] = dataclasses.field(default_factory=set)
    reduced: list[Any] = dataclasses.field(default_factory=list)  # indices of sparse gradients, by `kd.all_reduce`
    is_plain: bool = False  # a step on the whole batch in this process: nothing is exchanged, see `trial.py`
    # Gets for each update the optimizer, the gradients of the whole batch, and the variables or `None`.
    applied: list[Any] | None = None
    has_gathered: bool = False  # `kd.gather` was called, so that tensors may have the rows of all shares

    @classmethod
    def of(cls, share: Share, replica: int, stopwatch: Stopwatch | None = None) -> Step:
        return cls(share.count, share.total, share.fingerprint, stopwatch, replica=replica, data=share.data)

    @property
    def position(self) -> Any:
        """The index of this share among those that are gathered."""
        return self.replica

    @property
    def part(self) -> Any:
        """This share's fraction of the global batch, a scalar."""
        return tf.math.divide_no_nan(tf.cast(self.count, self.dtype), tf.cast(self.total, self.dtype))

    def weigh(self, gradients: Sequence[Any]) -> list[Any]:
        """Weights means over this share, so that the sum over the shares is the mean over the global batch.

        Integers and `None` stay as they are.
        """
        weight = tf.cast(self.count, self.dtype) / tf.cast(self.total, self.dtype)
        return [_weighted(gradient, weight) for gradient in gradients]

    def weigh_gradients(self, gradients: Sequence[Any], is_loss_weighted: bool) -> list[Any]:
        """Weights gradients, unless they are of a weighted loss."""
        if not is_loss_weighted:
            return self.weigh(gradients)
        if tf.get_static_value(self.count):  # never empty
            return list(gradients)
        counts = tf.cast(self.count > 0, self.dtype)
        return [_weighted(gradient, counts) for gradient in gradients]

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
        keras_layers.note_reduction()
        tried = "" if self.applied is None else "tried_"
        name = f"keras_dist_{tried}{kind}_{self.reductions}"
        self.reductions += 1
        return name


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
    """Returns by what to multiply a sum over the share's examples: a share's loss counts as a mean.

    `losses` with other rows than the examples' are no sum over them.
    """
    step = current()
    if step is None:
        return None
    weight = tf.math.divide_no_nan(tf.cast(step.total, step.dtype), tf.cast(step.count, step.dtype))
    return tf.where(tf.shape(losses)[0] == step.count, weight, tf.ones_like(weight))


_OUTSIDE = "outside"  # nothing says what is computed on: a share, or a whole batch
_CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("keras_dist_step", default=_OUTSIDE)


@contextlib.contextmanager
def entered(step: Step | None) -> Iterator[Step | None]:
    """Makes `step` the current one; `None` for what is computed on the whole batch."""
    token = _CURRENT.set(step)
    try:
        yield step
    finally:
        _CURRENT.reset(token)


def current() -> Step | None:
    """Returns the step that is being traced or run, `None` outside of one."""
    return None if is_outside() else _CURRENT.get()


def is_outside() -> bool:
    """True outside of a step, and of what is computed on a whole batch."""
    return _CURRENT.get() is _OUTSIDE


def current_part() -> Any:
    """Returns the fraction of the batch in the current share, `None` outside of a step."""
    step = current()
    return None if step is None else step.part
