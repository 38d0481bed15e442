"""How metrics that a user has written count a share of a batch.

The states of a metric are summed over the shares. That is right if updates with two parts of a batch add the same to
its variables as one update with the whole batch: the metric adds up examples. A metric that adds one number for each
batch (a mean, and 1 to a count) is right if what a share adds is weighted by the share. A metric that adds anything
else (a root of a mean, Dice) sees the whole batch on each replica. What does not add to its state (a maximum), keeps it
in Python, or could not be tried out, is updated with the whole batch, and one replica keeps the result.

Which of these a metric does is tried out on a small made-up batch when a step is traced. Keras's own are known.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.differences import epsilon
from keras_dist.step.gathering import Exchange, gather_masked
from keras_dist.step.step import Step

_EXAMPLES, _FIRST = 5, 3  # of the made-up batch, and of its first share
_MOST_NUMBERS = 5_000_000  # of an argument
_STATES = (0.0, 100.0, -100.0)
# For each variable how it counts, or why that is not known.
_Kinds = list[str] | NotSupportedError
_KINDS: weakref.WeakKeyDictionary[Any, dict[str, _Kinds]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def counted_by_share(backend: Backend, model: keras.Model) -> Iterator[None]:
    """Weighs what a step's share adds to the metrics that a user has written, in this context.

    Args:
        backend: How the replicas gather the batch.
        model: The model.

    Raises:
        NotSupportedError: In the step, if the states of such a metric cannot be combined over the shares.
    """
    metrics = [metric for metric in keras_model.flat_metrics(model) if keras_model.has_own_update(metric)]
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            _refuse_tensorflow_variables(metric)
            update = functools.partial(_update, backend, metric, metric.update_state)
            stack.enter_context(keras_model.attached(metric, "update_state", update))
        yield


def _update(backend: Backend, metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step, variables = step_module.current(), metric.variables
    kinds = _kinds_of(metric, plain, (args, kwargs))
    if step is None:
        return plain(*args, **kwargs)
    if isinstance(kinds, _NotTriedOut) and not backend.keeps_metrics:
        logger().debug("metric %s is taken for a sum: %s", metric.name, kinds)
        kinds = ["sum"] * len(variables)
    if isinstance(kinds, NotSupportedError):
        _check_one_can_keep(backend, metric, args, kwargs, kinds)
        args, kwargs = _whole(backend, step, (args, kwargs))
        with _kept_by_one_replica(backend, step, variables), step_module.entered(None):
            return plain(*args, **kwargs)
    is_whole = "whole" in kinds
    if is_whole:  # the replicas of one process meet here, so what they add is looked at afterwards
        args, kwargs = _whole(backend, step, (args, kwargs))
    weighted = [variable for variable, kind in zip(variables, kinds, strict=True) if kind != "sum"]
    with step.weighing(weighted), step_module.entered(None if is_whole else step):
        return plain(*args, **kwargs)


def _check_one_can_keep(backend: Backend, metric: Any, args: Any, kwargs: Any, error: NotSupportedError) -> None:
    """Raises the error if no replica can keep the state of a metric."""
    tensors = [leaf for leaf in tf.nest.flatten((args, kwargs)) if tf.is_tensor(leaf)]
    adds_up = all(variable.aggregation == "sum" for variable in metric.variables)
    can_gather = all(isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.dtype != tf.string for leaf in tensors)
    # State in Python is kept where an update runs as it is written, in a process that has no other replica.
    has_python = tf.executing_eagerly() and backend.topology.size == backend.num_replicas
    is_kept = has_python or not isinstance(error, _StateElsewhere)
    if not (backend.keeps_metrics and adds_up and can_gather and is_kept):
        raise error
    logger().debug("metric %s: one replica updates it with the rows of all", metric.name)


@contextlib.contextmanager
def _kept_by_one_replica(backend: Backend, step: Step, variables: Sequence[Any]) -> Iterator[None]:
    """Keeps what is assigned in this context on the chief; of replicas in one process, on the last one.

    The states of the others stay as after a reset, so the sum of all states is that of this one. In `train_on_batch`
    the chief's metrics hold the totals of all ranks. Of the replicas of one process only the last one's share is never
    empty.
    """
    before = [tf.identity(variable.value) for variable in variables]
    yield
    is_kept = tf.equal(step.replica, 0 if backend.topology.size > 1 else backend.num_replicas - 1)
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(is_kept, variable.value, old))
    step.whole.update({id(variable): variable for variable in variables})


def _whole(exchange: Exchange, step: Step, arguments: Any) -> Any:
    """Returns the arguments of an update with those of all shares."""
    leaves = tf.nest.flatten(arguments)
    pairs = zip(leaves, _have_examples(leaves), strict=True)

    def of_all(rows: Any) -> Any:
        return gather_masked(exchange, step, rows, all_compute_the_same=True).rows

    return tf.nest.pack_sequence_as(arguments, [of_all(leaf) if has else leaf for leaf, has in pairs])


def _kinds_of(metric: Any, update: Callable[..., Any], arguments: Any) -> _Kinds:
    """Returns for each variable of a metric whether updates with two shares add up to that of a batch, or average.

    If one call of a metric has to be kept by one replica, all later ones are too.
    """
    leaves = tf.nest.flatten(arguments)
    shapes = str([(leaf.shape, leaf.dtype) if tf.is_tensor(leaf) else type(leaf) for leaf in leaves])
    known = _KINDS.setdefault(metric, {})
    if shapes not in known:
        errors = [kinds for kinds in known.values() if isinstance(kinds, NotSupportedError)]
        known[shapes] = errors[0] if errors else _try_out(metric, update, arguments)
    return known[shapes]


def _try_out(metric: Any, update: Callable[..., Any], arguments: Any) -> _Kinds:
    leaves = tf.nest.flatten(arguments)

    def changes(start: int, stop: int, state: float = 0.0) -> list[np.ndarray]:
        args, kwargs = tf.nest.pack_sequence_as(arguments, [share(start, stop) for share in shares])
        return _changes(metric, functools.partial(update, *args, **kwargs), stop - start, state)

    try:
        with tf.init_scope(), tf.device("CPU:0"), keras_model.kept_collections(metric):
            shares = _shares(leaves)
            parts = changes(0, _FIRST), changes(_FIRST, _EXAMPLES)
            attributes = _attributes(metric)  # what an update sets once is no state
            whole = [changes(0, _EXAMPLES, state) for state in _STATES]
            changed = _changed(metric, attributes)
    except _TooLarge as error:
        logger().warning("metric %s was not tried out, so it is taken for a sum over examples: %s", metric.name, error)
        return ["sum"] * len(metric.variables)
    except Exception as error:
        return _not_tried_out(metric, error)
    if changed is not None:
        return _state_elsewhere(metric, f"update_state changes its attribute {changed!r}")
    kinds = [
        _kind_of(variable, [values[index] for values in whole], [values[index] for values in parts])
        for index, variable in enumerate(metric.variables)
    ]
    if "whole" in kinds:
        has_numbers = any(tf.is_tensor(leaf) and leaf.shape.rank == 0 for leaf in leaves)  # those of the share
        kinds = ["none" if kind == "none" or has_numbers else "whole" for kind in kinds]
    if "none" in kinds:
        return _cannot_be_combined(metric, metric.variables[kinds.index("none")])
    return kinds


def _changes(metric: Any, update: Callable[[], Any], count: int, state: float) -> list[np.ndarray]:
    """Returns what an update with a share changes in the variables of a metric, if all of them have the same value."""
    given = [(variable, tf.cast(tf.fill(variable.shape, state), variable.dtype)) for variable in metric.variables]
    with _Trial.entered(count), keras.StatelessScope(given, initialize_variables=False) as scope:
        update()
        after = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in metric.variables]
    pairs = zip(after, given, strict=True)
    return [np.asarray(new, np.float64) - np.asarray(old, np.float64) for new, (_, old) in pairs]


class _Trial(Step):
    """A step on a share of the made-up batch, which cannot be reduced."""

    @classmethod
    def entered(cls, count: int) -> contextlib.AbstractContextManager[Step | None]:
        return step_module.entered(cls(tf.constant(count), tf.constant(_EXAMPLES), tf.constant(0.0)))

    def next_name(self, kind: str) -> str:
        raise ValueError(f"reduces {kind}")


def _kind_of(variable: Any, whole: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> str:
    """Returns how the states of a variable can be combined: `"sum"`, `"mean"`, `"whole"` or `"none"`.

    Args:
        variable: The variable.
        whole: What the whole batch changes, in each of `_STATES`.
        parts: What two shares change.
    """
    is_float, precision = keras.backend.is_float_dtype(variable.dtype), 64 * epsilon(variable.dtype)
    close = functools.partial(np.allclose, rtol=precision, atol=precision, equal_nan=True)
    if variable.aggregation != "sum":
        return "sum"  # or what the variable says
    first, second = parts
    if all(np.allclose(whole[0], other, precision, precision * max(_STATES), equal_nan=True) for other in whole[1:]):
        if close(whole[0], first + second):
            return "sum"
        if is_float:
            mean = (first * _FIRST + second * (_EXAMPLES - _FIRST)) / _EXAMPLES
            return "mean" if close(whole[0], mean) else "whole"
    return "none"


def _cannot_be_combined(metric: Any, variable: Any) -> NotSupportedError:
    return NotSupportedError(
        "The states of this metric cannot be combined over the shares of a batch: an update does not add the same to "
        "any state, or counts in integers what is no sum over examples.",
        f"metric {metric.name!r} ({type(metric).__name__}), variable {variable.path!r}",
        "Let `update_state` add to variables: `self.total.assign_add(...)`, `self.count.assign_add(1.0)`, in floats. "
        "What is no sum, such as a maximum, can be computed from `model.predict`.",
    )


class _NotTriedOut(NotSupportedError):
    """An update fails for made-up rows."""


def _not_tried_out(metric: Any, error: Exception) -> NotSupportedError:
    return _NotTriedOut(
        "What this metric counts can't be told: `update_state` fails for made-up rows. Nor can it see the whole batch.",
        f"metric {metric.name!r} ({type(metric).__name__}): {error!r:.300}",
        "Let `update_state` accept any numbers of the right shape, or compute the metric from `model.predict`.",
    )


# --- The made-up batch ---


class _TooLarge(ValueError):
    """The made-up batch would take too much memory."""


def _shares(leaves: Sequence[Any]) -> list[Callable[[int, int], Any]]:
    """Returns for each argument of an update a function that returns a share of it, made up."""
    random = np.random.RandomState(0)
    return [_share_of(leaf, has, random) for leaf, has in zip(leaves, _have_examples(leaves), strict=True)]


def _have_examples(leaves: Sequence[Any]) -> list[bool]:
    """Returns which arguments have a row for each example: those that are as long as the first tensor."""
    ranked = [tf.is_tensor(leaf) and bool(leaf.shape.rank) for leaf in leaves]
    length = next((leaf.shape[0] for leaf, is_ranked in zip(leaves, ranked, strict=True) if is_ranked), None)
    return [is_ranked and leaf.shape[0] == length for leaf, is_ranked in zip(leaves, ranked, strict=True)]


def _share_of(leaf: Any, has_examples: bool, random: np.random.RandomState) -> Callable[[int, int], Any]:
    if not tf.is_tensor(leaf):
        return lambda start, stop: leaf
    if not isinstance(leaf, tf.Tensor):
        raise ValueError(f"no examples of {type(leaf).__name__}")
    shape, dtype = leaf.shape.as_list(), leaf.dtype
    dtype = tf.float32 if dtype.is_floating and dtype.size < 4 else dtype  # for the comparison
    sizes = [2 if size is None else size for size in (shape[1:] if has_examples else shape)]
    if np.prod(sizes) * _EXAMPLES > _MOST_NUMBERS:
        raise _TooLarge(f"an argument has the shape {shape}")
    values: np.ndarray
    if dtype.is_floating:
        values = random.uniform(0.1, 0.9, [_EXAMPLES, *sizes])
    elif dtype.is_integer or dtype.is_bool:
        values = random.randint(0, 2, [_EXAMPLES, *sizes])
    elif dtype == tf.string:
        values = random.randint(0, 2, [_EXAMPLES, *sizes]).astype(str)
    else:
        raise ValueError(f"no examples of {dtype}")

    def share(start: int, stop: int) -> Any:
        if has_examples:
            return tf.constant(values[start:stop], dtype)
        if shape:
            return tf.constant(values[0], dtype)
        # A scalar is a mean over examples, or their number.
        return tf.constant(values[start:stop].mean() if dtype.is_floating else stop - start, dtype)

    return share


# --- State outside Keras variables ---


def _attributes(metric: Any) -> dict[str, Any]:
    plain = vars(keras.metrics.Metric(name="plain"))
    return {name: _fixed(value) for name, value in vars(metric).items() if name not in plain}


def _fixed(value: Any) -> Any:
    """Returns something that changes if a state in plain Python does."""
    if isinstance(value, list | dict | set) or hasattr(value, "appendleft"):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value if isinstance(value, int | float) else _Held(value) if tf.is_tensor(value) else None


class _Held:
    """Equals what holds the same object. Its `id` alone may be that of a later object, once it is gone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value is self.value


def _changed(metric: Any, before: dict[str, Any]) -> str | None:
    """Returns the name of an attribute that has changed."""
    return next((name for name, value in _attributes(metric).items() if value != before.get(name)), None)


def _refuse_tensorflow_variables(metric: Any) -> None:
    for name, value in vars(metric).items():
        if isinstance(value, tf.Variable):
            raise _state_elsewhere(metric, f"its attribute {name!r} is a tf.Variable")


class _StateElsewhere(NotSupportedError):
    """Each process has a state of its own, and in a traced step it is not updated at all."""


def _state_elsewhere(metric: Any, how: str) -> NotSupportedError:
    return _StateElsewhere(
        "A metric keeps state outside of Keras variables, which cannot be combined over the replicas.",
        f"metric {metric.name!r} ({type(metric).__name__}): {how}",
        "Create its state by `self.add_variable(shape, initializer, name=...)` in `__init__`.",
    )
