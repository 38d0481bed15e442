"""How metrics that a user has written count a share of a batch, and how the logs of a step are computed.

The states of a metric are summed over the shares. That is right if the graph of an update proves that it adds a sum
over the examples to its variables. If it adds a number for each batch (a mean, and 1 to a count), the share's number
is weighted by the share. All other metrics are updated with the rows of the whole batch. If such an update adds to its
state (a root of a mean, Dice), every replica counts its part of what is added; if not (a maximum, state in Python), one
replica keeps the result.

Within a step a metric has counted the shares of one replica only. So logs that depend on results only are computed
again from the metrics of all replicas. All other logs are averaged over the replicas, weighted by the number of
examples.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, keras_strategy, tf_graphs
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Arguments, Kind, Proof, traced
from keras_dist.step.gathering import gather
from keras_dist.step.step import Step

# How each variable counts, by the types of the arguments, or why an update does not add to it.
_Kinds = list[str] | NotSupportedError
_KINDS: weakref.WeakKeyDictionary[Any, dict[str, _Kinds]] = weakref.WeakKeyDictionary()


def counted_by_share(backend: Backend, model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Weighs what a step's share adds to the metrics that a user has written, in this context.

    The step raises `NotSupportedError` if the states of such a metric cannot be combined over the shares.
    """
    metrics = [metric for metric in keras_model.flat_metrics(model) if keras_model.has_own_update(metric)]
    for metric in metrics:
        if held := [name for name, value in vars(metric).items() if isinstance(value, tf.Variable)]:
            raise _state_elsewhere(metric, f"its attribute {held[0]!r} is a tf.Variable")
    return keras_model.attached_to(
        metrics, "update_state", lambda metric, plain: functools.partial(_update, backend, metric, plain)
    )


def _update(backend: Backend, metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step, arguments = step_module.current(), Arguments((args, kwargs))
    if step is None:
        return plain(*args, **kwargs)
    kinds = _kinds_of(metric, plain, arguments)
    if isinstance(kinds, NotSupportedError):
        adds_up = all(variable.aggregation == "sum" for variable in metric.variables)
        # State in Python works only where updates run eagerly, in a process with one replica.
        has_python = tf.executing_eagerly() and backend.topology.size == backend.num_replicas
        is_kept = has_python or not isinstance(kinds, _StateElsewhere)
        if not (backend.keeps_metrics and adds_up and _can_gather(arguments) and is_kept):
            raise kinds
        counted = _kept_by_one_replica(backend, step, metric.variables)
    else:
        weighed = [variable for variable, kind in zip(metric.variables, kinds, strict=True) if kind != "sum"]
        counted = step.weighing(weighed)
    if isinstance(kinds, NotSupportedError) or "whole" in kinds:
        logger().debug("metric %s is updated with the rows of the whole batch", metric.name)
        args, kwargs = arguments.with_rows(
            [gather(backend, step, rows, all_compute_the_same=True).rows for rows in arguments.rows]
        )
    with counted, step_module.entered(None):
        return plain(*args, **kwargs)


@contextlib.contextmanager
def _kept_by_one_replica(backend: Backend, step: Step, variables: Sequence[Any]) -> Iterator[None]:
    """Keeps what is assigned in this context on the chief's first replica; in one process, on the last replica.

    The other replicas keep the state after a reset, so the sum of all states is that of this one. Why these replicas:
    in `train_on_batch` the chief's metrics hold the totals of all ranks, and within one process only the last
    replica's share is never empty.
    """
    keras_strategy.assign_of_batch(variables)
    before = [tf.identity(variable.value) for variable in variables]
    yield
    is_kept = tf.equal(step.replica, 0 if backend.topology.size > 1 else backend.num_replicas - 1)
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(is_kept, variable.value, old))
    step.whole.update({id(variable): variable for variable in variables})


def _can_gather(arguments: Arguments) -> bool:
    """True if all tensors have rows that can be sent. A single number of the share tells nothing of the whole batch."""
    tensors = [leaf for leaf in arguments.leaves if tf.is_tensor(leaf)]
    return len(arguments.rows) == len(tensors) and all(rows.dtype != tf.string for rows in tensors)


def _kinds_of(metric: Any, update: Callable[..., Any], arguments: Arguments) -> _Kinds:
    """Returns how each variable of a metric counts a share: as a `"sum"`, a `"mean"`, or by the `"whole"` batch.

    If one call of a metric has to be kept by one replica, all later ones are too.
    """
    types = str([(leaf.shape, leaf.dtype) if tf.is_tensor(leaf) else type(leaf) for leaf in arguments.leaves])
    known = _KINDS.setdefault(metric, {})
    if types not in known:
        errors = [kinds for kinds in known.values() if isinstance(kinds, NotSupportedError)]
        known[types] = errors[0] if errors else _found(metric, update, arguments)
    return known[types]


def _found(metric: Any, update: Callable[..., Any], arguments: Arguments) -> _Kinds:
    attributes = keras_model.Attributes([metric])
    held, changed = attributes.now(), list[str]()

    def inspect(rows: Sequence[Any]) -> list[str]:
        scalars = [leaf for leaf in arguments.leaves if tf.is_tensor(leaf) and leaf.shape.rank == 0]
        numbers = [(leaf, tf.identity(leaf)) for leaf in scalars]
        # A number is a mean over the examples, or counts them.
        kinds = {number.name: Kind.MEAN if number.dtype.is_floating else Kind.COUNT for _, number in numbers}
        args, kwargs = arguments.with_leaves([*zip(arguments.rows, rows, strict=True), *numbers])
        for _ in range(2):  # what is set once only is not state
            before = _in_python(metric)
            given = [(variable, tf.identity(variable.value)) for variable in metric.variables]
            with keras.StatelessScope(given, initialize_variables=False) as scope:
                olds = [scope.get_current_value(variable) for variable in metric.variables]
                update(*args, **kwargs)
            news = [scope.get_current_value(variable) for variable in metric.variables]
        changed.extend(name for name, value in _in_python(metric).items() if not _is_same(value, before.get(name)))
        proof = Proof(rows, kinds)
        return [_kind_of(*each, proof) for each in zip(metric.variables, olds, news, strict=True)]

    try:
        kinds = traced(arguments, inspect)
    except Exception as error:
        if isinstance(error, NotSupportedError):
            return error
        return NotSupportedError(
            "keras_dist can't tell what this metric counts: `update_state` can't be traced, nor see the whole batch.",
            f"metric {metric.name!r} ({type(metric).__name__}): {error!r:.300}",
            "Write `update_state` with operations of Keras or TensorFlow, or compute the metric from `model.predict`.",
        )
    finally:
        attributes.set(held)
    if changed:
        return _state_elsewhere(metric, f"update_state changes its attribute {changed[0]!r}")
    if "whole" in kinds:
        kinds = ["whole" if kind != "none" and _can_gather(arguments) else "none" for kind in kinds]
    if "none" not in kinds:
        return kinds
    return NotSupportedError(
        "The states of this metric cannot be combined over the shares of a batch: an update does not add to its "
        "state, or counts in integers what is no sum over examples.",
        f"metric {metric.name!r} ({type(metric).__name__}), variable {metric.variables[kinds.index('none')].path!r}",
        "Let `update_state` add to variables: `self.total.assign_add(...)`, `self.count.assign_add(1.0)`, in floats. "
        "What is no sum, such as a maximum, can be computed from `model.predict`.",
    )


def _kind_of(variable: Any, old: Any, new: Any, proof: Proof) -> str:
    """Returns how a variable counts what an update adds to its old value; `"none"` if it does not add."""
    added = proof.added(new, old)
    if variable.aggregation != "sum" or (added is not None and added <= {Kind.SUM, Kind.COUNT}):
        return "sum"  # or what the variable says
    if added is None or not keras.backend.is_float_dtype(variable.dtype):
        return "none"
    return "mean" if added <= {Kind.MEAN, Kind.CONSTANT} else "whole"


def _in_python(metric: Any) -> dict[str, Any]:
    """Returns for each attribute a value that changes if its state in plain Python changes."""
    plain = vars(keras.metrics.Metric(name="plain"))
    found = {name: value for name, value in vars(metric).items() if name not in plain}
    for name, value in found.items():
        if isinstance(value, list | dict | set) or hasattr(value, "appendleft"):
            found[name] = len(value)
        elif isinstance(value, np.ndarray):
            found[name] = value.tobytes()
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float | bytes):
        return one == other
    return not tf.is_tensor(one) or (one is other and not tf.is_symbolic_tensor(one))


class _StateElsewhere(NotSupportedError):
    """Each process has a state of its own, and in a traced step it is not updated at all."""


def _state_elsewhere(metric: Any, how: str) -> NotSupportedError:
    return _StateElsewhere(
        "A metric keeps state outside of Keras variables, which cannot be combined over the replicas.",
        f"metric {metric.name!r} ({type(metric).__name__}): {how}",
        "Create its state by `self.add_variable(shape, initializer, name=...)` in `__init__`.",
    )


class Logs:
    """Traces from which metrics the logs of a model's steps come. The chief reports logs that come from no metric."""

    def __init__(self, model: keras.Model, is_chief: bool) -> None:
        self._model = model
        self._is_chief = is_chief
        # How to compute logs again, of each kind of step; `None` of logs that Keras itself takes from the metrics.
        self._known: dict[str, dict[str, Callable[[], Any] | None]] = {"train": {}, "test": {}}
        self._results: list[tuple[Any, Callable[[], Any]]] = []  # tensors, and how to compute them again
        self._reported: set[str] = set()
        self.is_frozen = False  # True where the logs have been noted for good

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the results of the model's metrics. A step is run in this context."""
        self._results = []
        with keras_model.attached_to(keras_model.flat_metrics(self._model), "result", self._recorded):
            yield
        self._results = []

    def _recorded(self, metric: Any, plain: Callable[[], Any]) -> Callable[[], Any]:
        def part_of(key: str | None) -> Any:
            value = plain()
            return value if key is None else value[key]

        def result() -> Any:
            value = plain()
            parts = value if isinstance(value, dict) else {None: value}
            self._results += [(part, functools.partial(part_of, key)) for key, part in parts.items()]
            return value

        return result

    def note(self, kind: str, logs: Any) -> Any:
        """Notes, as a `"train"` or `"test"` step is recorded, what its logs are computed from. Returns a flat dict."""
        if not isinstance(logs, dict):
            return logs
        if self.is_frozen:
            return {name: tensor_of(value) for name, value in flat(logs).items()}
        are_metrics = set(logs) == set(self._model.get_metrics_result())
        logs = flat(logs)
        if are_metrics:  # then Keras shows the metrics, whatever the logs are
            self._known[kind] = dict.fromkeys(logs)
            return logs
        sources = {name: self._source(value) for name, value in logs.items()}
        self._known[kind] = {name: source for name, source in sources.items() if source is not None}
        unknown = [name for name, value in logs.items() if sources[name] is None and tf.is_tensor(value)]
        new = [name for name in unknown if name not in self._reported]
        self._reported.update(new)
        if new and self._is_chief:
            logger().warning(
                "%s of %s_step %s not computed from results of metrics alone: averaged over the shares of the last "
                "batch, by the number of examples.",
                ", ".join(f"logs[{name!r}]" for name in new), kind, "is" if len(new) == 1 else "are",
            )  # fmt: skip
        return {name: tensor_of(value) for name, value in logs.items()}

    def _source(self, value: Any) -> Callable[[], Any] | None:
        if isinstance(value, keras.Variable):  # such as a learning rate
            return lambda: tensor_of(value)
        for result, source in self._results:
            if value is result:
                return source
        results = [(result, source) for result, source in self._results if tf.is_tensor(result)]
        found = tf_graphs.function_of(value, [result for result, _ in results])
        if found is None:
            return None
        function, indices = found
        return lambda: function(*[results[index][1]() for index in indices])

    def is_known(self, kind: str, name: str) -> bool:
        return name in self._known[kind]

    def results(self, kind: str) -> dict[str, Any]:
        """Returns the logs that depend on results of metrics only, computed from what the metrics have counted now."""
        known = self._known[kind]
        by_name = flat(self._model.get_metrics_result()) if None in known.values() else {}
        return {name: by_name[name] if source is None else source() for name, source in known.items()}

    def exact(self, kind: str, logs: Any) -> Any:
        """Returns logs of a step with the current results of the metrics."""
        if not isinstance(logs, dict):
            return logs
        logs = flat(logs)
        return {**logs, **{name: value for name, value in self.results(kind).items() if name in logs}}


def flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs without nested dicts, as Keras passes them to callbacks."""
    result: dict[str, Any] = {}
    for key, value in sorted(logs.items()):
        result.update(flat(value) if isinstance(value, dict) else {key: value})
    return result


def tensor_of(value: Any) -> Any:
    """Returns the value of a Keras variable, or of a variable of several cores, which NumPy can't read."""
    is_unread = isinstance(value, keras.Variable | tf.distribute.DistributedValues)
    return tf.convert_to_tensor(value) if is_unread else value


def as_number(log: Any) -> Any:
    """Returns a log as a float, or as an array for a metric of several numbers."""
    array = np.asarray(log)
    return array if array.ndim else float(array)
