"""Broadcasts the chief's weights, compares the weights and constants of all ranks, combines metrics and statistics."""

import contextlib
import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableSet, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, tf_graphs
from keras_dist.data.shares import static_length
from keras_dist.errors import MismatchError, NotSupportedError, check_alike
from keras_dist.logging import logger
from keras_dist.step.optimizer import accumulators_of, variables_of
from keras_dist.step.step import Fingerprints, check_seen, differing_ranks

_COMPARED = ("loss", "loss_weights", "metrics", "weighted_metrics", "steps_per_execution", "run_eagerly")
_NOT_COMPARED = ("name", "dtype", "seed", "filepath", "vocabulary")  # Keras numbers names, the chief's seeds are sent


def describe(model: keras.Model) -> list[str]:
    """Returns a line for each argument of `compile` that is not `None`, such as `metrics=[MeanIoU(num_classes=3)]`."""
    arguments = keras_model.compile_arguments(model)
    return [f"{name}={_text(arguments[name])}" for name in _COMPARED if arguments.get(name) is not None]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in sorted(value.items(), key=str)) + "}"
    if isinstance(value, type) or not hasattr(value, "get_config"):  # the repr of an object may be its address
        return str(getattr(value, "__qualname__", type(value).__name__))
    try:
        config = value.get_config()
    except Exception:  # a custom `get_config`, or none
        return f"{type(value).__name__}()"
    if isinstance(value, keras.losses.Loss):  # some configurations lack the arguments of the loss function
        for item in vars(value).values():
            config = {**config, **item} if isinstance(item, dict) else config
    plain = {key: item for key, item in config.items() if isinstance(item, str | bool | int | float)}
    arguments = [f"{key}={item!r}" for key, item in sorted(plain.items()) if key not in _NOT_COMPARED]
    return f"{type(value).__name__}({', '.join(arguments)})"


_TABLES = (
    tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable,
)  # fmt: skip


def of_step(model: keras.Model, share: Any) -> list[tuple[str, str, str]]:
    """Returns name, type and hash of each constant of the step that is being traced, and of each table of a layer.

    An eager step has none: it is made again for each batch. A mean over the share has the static length of the share in
    a number. So numbers have other types in a step on a share of another length.
    """
    if tf.executing_eagerly():
        return []
    length = static_length(share)
    of_length = "" if length is None else f" in a step on {length} rows"
    constants = tf_graphs.constants_of(tf.compat.v1.get_default_graph())
    typed = [(name, kind + of_length if kind.endswith("()") else kind, value) for name, kind, value in constants]
    return typed + [
        (f"the vocabulary of layer {layer.name!r}", "table", _hash(table))
        for layer in keras_model.flatten_layers(model)
        for table in vars(layer).values()
        if isinstance(table, _TABLES)
    ]


def _hash(table: Any) -> str:
    with tf.init_scope():
        pairs = zip(*[part.numpy().tolist() for part in table.export()], strict=True)
        return hashlib.sha256(repr(sorted(pairs)).encode()).hexdigest()[:16]


_NOTHING = Fingerprints()


def checksums(variables: Sequence[Any]) -> np.ndarray:
    """Returns one int64 per variable, which depends on every bit of it, and is 0 for zeros."""
    return np.array([_checksum(variable.value) for variable in variables], np.int64)


def _checksum(value: Any) -> int:
    numbers = _array(value).reshape(-1).view(np.uint8)
    return int.from_bytes(hashlib.sha256(numbers.data).digest()[:8], signed=True) if numbers.any() else 0


def broadcast_state(
    model: keras.Model, optimizers: Sequence[Any], backend: Backend, call: str, plan: dict[str, Any] | None = None
) -> None:
    """Gives all ranks the chief's weights, optimizer state and initial epoch.

    Raises `MismatchError` if the ranks' models, optimizers or plans (numbers of epochs and steps) differ.
    """
    variables: list[Any] = [(v.path.split("/")[-1], tuple(v.shape), v.dtype) for v in model.variables]
    structure: list[tuple[str, list[Any]]] = [(type(model).__name__, variables)]
    structure += [(type(optimizer).__name__, []) for optimizer in optimizers]
    layers = [layer for layer in keras_model.flatten_layers(model) if not isinstance(layer, keras.Model)]
    structure += [("layers", [_text(layer) for layer in layers if keras_model.is_kerass(type(layer))])]
    structure += [("trained", [f"a trained variable of {tuple(v.shape)}" for v in model.trainable_variables])]
    structure += [("compile", describe(model))]
    are_built, epoch = [optimizer.built for optimizer in optimizers], getattr(model, keras_fit.INITIAL_EPOCH)
    gathered = backend.all_gather_object(call, (structure, plan, are_built, epoch))
    check_alike(
        "The ranks would train for different numbers of epochs or steps, and some would wait forever.",
        [plan for _, plan, _, _ in gathered],
        "Pass the same arguments, and data of the same size, to `fit` on every rank.",
    )
    _check_structures([structure for structure, _, _, _ in gathered])
    _, _, chiefs_built, chiefs_epoch = gathered[0]
    # The chief may have loaded an optimizer's state, while the other ranks have no variables for it yet.
    variables = [*model.variables]
    for optimizer in itertools.compress(optimizers, chiefs_built):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables += variables_of(optimizer)
    if backend.topology.size > 1:  # else do not copy what may be a large table
        arrays = backend.broadcast_arrays(values_of(variables))
        assign(variables, arrays)
    _keep_on_chief(accumulators_of(optimizers), backend)
    logger().debug("%s: broadcast the chief's %d variables, initial epoch: %s", call, len(variables), chiefs_epoch)
    keras_model.attach(model, keras_fit.INITIAL_EPOCH, chiefs_epoch)


def _check_structures(structures: Sequence[Any]) -> None:
    if all(structure == structures[0] for structure in structures):
        return
    rank = next(rank for rank, structure in enumerate(structures) if structure != structures[0])
    first, other = ([part for key, parts in one for part in (key, *parts)] for one in (structures[0], structures[rank]))
    differences = [
        f"rank 0 has {ours!r} where rank {rank} has {theirs!r}"
        for ours, theirs in zip(first, other, strict=False)
        if ours != theirs
    ] or [f"rank 0 has {len(first)} parts, rank {rank} has {len(other)}"]
    raise MismatchError(
        "The ranks have different models.",
        differences[0],
        "Build and compile the same model on every rank. Only files and printing belong under `if kd.is_chief():`.",
    )


def synchronize(
    model: keras.Model, optimizers: Sequence[Any], backend: Backend, call: str, extra: Any = None,
    seen: Fingerprints = _NOTHING,
) -> list[Any]:  # fmt: skip
    """Compares the trained weights of all ranks, and averages statistics such as moving averages.

    What the ranks have accumulated of a gradient is summed up on the chief, so that its files contain all of it.
    Returns the `extra` of all ranks. Raises `MismatchError` if the trained weights differ, or what the ranks have
    `seen`.
    """
    statistics, accumulators = keras_model.statistics_of(model), accumulators_of(optimizers)
    table, extras = compare(model, backend, call, seen, [*statistics, *accumulators], extra)
    of_statistics, of_accumulators = np.split(table, [len(statistics)], axis=1)
    averaged = [variable for variable, sums in zip(statistics, of_statistics.T, strict=True) if np.any(sums != sums[0])]
    if averaged:
        by_rank = backend.all_gather_object("the averaging of statistics", values_of(averaged))
        for variable, *values in zip(averaged, *by_rank, strict=True):
            variable.assign(mean_of(values))
    if np.any(of_accumulators[1:]):  # else all is on the chief already, or nothing is left
        with backend.in_call(call):
            for index, variable in enumerate(accumulators):
                variable.assign(backend.all_reduce_exact(variable.value, f"keras_dist_accumulated_{index}"))
        _keep_on_chief(accumulators, backend)
    return extras


def compare(
    model: keras.Model, backend: Backend, call: str, seen: Fingerprints, others: Sequence[Any] = (), extra: Any = None
) -> tuple[np.ndarray, list[Any]]:
    """Compares the trained weights of all ranks, and what they have `seen`, as `synchronize`. Nothing is changed.

    Returns a row of checksums of `others` for each rank, and the `extra` of all ranks.
    """
    trained = model.trainable_variables
    check_copies(trained, backend)
    if backend.topology.size == 1:
        return np.zeros([1, len(others)]), [extra]
    gathered = backend.all_gather_object(call, (checksums([*trained, *others]), extra, seen))
    check_seen([Fingerprints(*seen) for _, _, seen in gathered])
    table = np.stack([sums for sums, _, _ in gathered])
    check_weights(trained, table[:, : len(trained)])
    return table[:, len(trained) :], [extra for _, extra, _ in gathered]


def check_copies(variables: Sequence[Any], backend: Backend) -> None:
    """Raises `MismatchError` if the devices of this process have different weights."""
    by_device = backend.copies(variables).items()
    sums = {device: [_checksum(copy.read_value()) for copy in copies] for device, copies in by_device}
    first = next(iter(sums.values()), [])
    for device, others in sums.items():
        different = [variable for variable, one, other in zip(variables, first, others, strict=True) if one != other]
        if different:
            raise MismatchError(
                "The devices have different weights, so they no longer train the same model.",
                f"{device} differs from the first device in {_named(different)}",
                "Usual causes: a tf.function that assigns weights and was traced before the first step, tf.raw_ops on "
                "variables, or an optimizer that draws numbers by tf.random. Assign with `variable.assign`.",
            )


def _keep_on_chief(accumulators: Sequence[Any], backend: Backend) -> None:
    """Drops the other ranks' copies of what the next update sums over the ranks."""
    if not backend.topology.is_chief:
        for variable in accumulators:
            variable.assign(tf.zeros_like(variable.value))


def _named(variables: Sequence[Any]) -> str:
    more = f" and {len(variables) - 5} more" if len(variables) > 5 else ""
    return ", ".join(variable.path for variable in variables[:5]) + more


def check_weights(variables: Sequence[Any], table: np.ndarray) -> None:
    """Raises `MismatchError`, the same on every rank, if the rows of a `(ranks, variables)` table differ."""
    different = [index for index, sums in enumerate(table.T) if np.any(sums != sums[0])]
    if not different:
        return
    raise MismatchError(
        "The ranks have different weights, so they no longer train the same model.",
        f"{differing_ranks(table[:, different[0]])} differ(s) in {_named([variables[index] for index in different])}",
        "Usual causes: a callback or loop that assigns weights on one rank only, or a step that changes weights by "
        "the gradients of its share, without a Keras optimizer (SAM). Assign weights on every rank, and call "
        "kd.all_reduce(gradients) before a step uses gradients itself.",
    )


def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean of the ranks' values of a variable of floats, the chief's value of any other."""
    if not keras.backend.is_float_dtype(values[0].dtype.name):
        return values[0]
    return np.mean([value.astype(np.float64) for value in values], axis=0).astype(values[0].dtype)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The counts of Keras's loss metric in an epoch."""

    mean: float  # over the examples
    examples: float  # their number, or the sum of their weights


def loss_of(model: keras.Model) -> Loss | None:
    found = (each for each in model.metrics if each.name == "loss" and isinstance(each, keras.metrics.Mean))
    return next((Loss(float(metric.result()), float(metric.count)) for metric in found), None)


def synchronize_metrics(
    model: keras.Model, optimizers: Sequence[Any], backend: Backend, call: str, logs: dict[str, Any], weight: float,
    seen: Fingerprints,
) -> dict[str, Any]:  # fmt: skip
    """Synchronizes the weights, combines the states of the metrics, and averages other logs.

    Returns the averages over the ranks, by `weight`, of the `logs` that a custom step returned besides results of
    metrics. Values that are not numbers are the chief's.
    """
    own, resets = _own(model, logs, weight)
    return _combine(model, synchronize(model, optimizers, backend, call, own, seen), resets)


@contextlib.contextmanager
def of_all_ranks(
    model: keras.Model, backend: Backend, call: str, logs: dict[str, Any], weight: float
) -> Iterator[dict[str, Any]]:
    """In this context the metrics have the counts of all ranks. Yields averages of the other logs."""
    own, resets = _own(model, logs, weight)
    try:
        yield _combine(model, backend.all_gather_object(call, own), resets)
    finally:
        for metric, values in zip(model.metrics, own[0], strict=True):
            assign(metric.variables, values)


def _own(model: keras.Model, logs: dict[str, Any], weight: float) -> tuple[tuple[Any, Any, float], Any]:
    metrics, resets = metric_states(model)
    return (metrics, {name: np.asarray(value) for name, value in logs.items()}, weight), resets


def _combine(model: keras.Model, gathered: Sequence[Any], resets: Any) -> dict[str, Any]:
    combine_metrics(model, [states for states, _, _ in gathered], resets)
    names = sorted({name for _, logs, _ in gathered for name in logs})
    return {name: _average([(logs[name], weight) for _, logs, weight in gathered if name in logs]) for name in names}


def metric_states(model: keras.Model) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Returns the state of each metric, and its state after a reset: only what was counted since is summed."""
    states, resets = [values_of(metric.variables) for metric in model.metrics], []
    metrics = keras_model.flat_metrics(model)
    if all(keras_model.is_kerass(type(metric)) for metric in metrics):  # they begin at zero
        return states, [[np.zeros_like(value) for value in values] for values in states]
    attributes = keras_model.Attributes(metrics)
    held = attributes.now()  # a reset drops what they keep in Python too
    for metric, values in zip(model.metrics, states, strict=True):
        metric.reset_state()
        resets.append(values_of(metric.variables))
        assign(metric.variables, values)
    attributes.set(held)
    return states, resets


def values_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns the current values of variables; of a variable on several cores, the value over all of them.

    On a CPU nothing is copied: a variable whose value is in use gets other memory for its next value.
    """
    return [_array(variable.value) for variable in variables]


def _array(value: Any) -> np.ndarray:
    tensor = tf.convert_to_tensor(value)
    # `numpy()` copies, but without it NumPy can't make an array of a single bfloat16.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def combine_metrics(
    model: keras.Model, by_rank: Sequence[list[list[np.ndarray]]], resets: list[list[np.ndarray]]
) -> None:
    """Sets the metrics to what all ranks have counted; `by_rank` and `resets` as `metric_states` returns them."""
    for index, metric in enumerate(model.metrics):
        combined = []
        for position, variable in enumerate(metric.variables):
            values = [states[index][position] for states in by_rank]
            combined.append(combine_states(values, resets[index][position], variable.aggregation, variable.path))
        assign(metric.variables, combined)


# Models whose metrics have the counts of all ranks. Before they count on they are reset, which Keras may not have done,
# as between two steps of `fit` or `train_on_batch`.
WITH_TOTALS: MutableSet[keras.Model] = weakref.WeakSet()


def reset_totals(model: keras.Model) -> None:
    """Resets what metrics have counted, which the next sum over the ranks would count once more for this one."""
    for metric, values in zip(model.metrics, metric_states(model)[1], strict=True):
        for variable, value in zip(metric.variables, values, strict=True):
            if variable.aggregation == "sum":
                variable.assign(value)


def combine_states(values: Sequence[np.ndarray], reset: np.ndarray, aggregation: str, name: str) -> np.ndarray:
    """Combines the ranks' values of one variable of a metric. Its value after a reset is counted once."""
    dtype = reset.dtype
    # Sum float32 values in float64, then round once.
    wide = np.float64 if np.issubdtype(dtype, np.floating) else dtype
    if aggregation == "only_first_replica":
        return values[0]
    if aggregation == "sum":
        base = reset.astype(wide)
        return (base + sum(value.astype(wide) - base for value in values)).astype(dtype)
    if aggregation == "mean":
        return np.mean([value.astype(np.float64) for value in values], axis=0).astype(dtype)
    raise not_additive(aggregation, name)


def not_additive(aggregation: str, name: str) -> NotSupportedError:
    return NotSupportedError(
        "The state of a metric cannot be combined over the ranks, so its value would be wrong.",
        f"variable {name!r} with aggregation={aggregation!r}",
        "If the variable is a sum over examples, create it with add_variable(..., aggregation='sum').",
    )


def _average(weighted: Sequence[tuple[np.ndarray, float]]) -> Any:
    first, total = weighted[0][0], sum(weight for _, weight in weighted)
    if not total or first.dtype.kind in "OSU" or all(np.array_equal(first, value) for value, _ in weighted):
        return first
    mean = np.sum([value.astype(np.float64) * (weight / total) for value, weight in weighted if weight], axis=0)
    return mean if first.dtype.kind in "biu" else mean.astype(first.dtype)
