"""The state of a training as arrays and plain data: variables, attributes of Python objects, random states."""

import contextlib
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, keras_random
from keras_dist.environment import Topology
from keras_dist.errors import MismatchError
from keras_dist.state.weights import WITH_TOTALS, assign, combine_metrics, mean_of, metric_states, values_of
from keras_dist.step.optimizer import accumulators_of, variables_of

_PLAIN = (type(None), bool, int, float, str, np.ndarray, np.generic)


def attributes_of(target: Any, largest: int | None = None) -> dict[str, Any]:
    """Returns copies of the attributes of an object that are plain data, without arrays of more than `largest` bytes.

    These are numbers, text, arrays in memory, the states of random generators, and lists, tuples, sets and dicts of
    them.
    """
    found = {}
    for name, value in vars(target).items():
        if largest is not None and getattr(value, "nbytes", 0) > largest:
            continue
        with contextlib.suppress(TypeError):  # a model, a function, a file
            found[name] = np.array(value) if isinstance(value, tf.Variable | keras.Variable) else _copy(value)
    return found


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that have changed: they are state, the others are settings of the script."""
    return {name: value for name, value in now.items() if name not in before or not are_equal(before[name], value)}


def restore(target: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        existing = getattr(target, name, None)
        if isinstance(existing, tf.Variable | keras.Variable):
            existing.assign(value)
        elif isinstance(existing, np.random.Generator):
            existing.bit_generator.state = value
        elif isinstance(existing, np.random.RandomState):
            existing.set_state(value)
        elif isinstance(existing, random.Random):
            existing.setstate(value)
        else:
            setattr(target, name, _copy(value))


def _copy(value: Any) -> Any:
    if isinstance(value, tf.Variable | keras.Variable):
        raise TypeError  # in a list: it would be replaced, and not assigned
    if tf.is_tensor(value):
        return np.array(value)
    if isinstance(value, np.random.Generator):
        return _copy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or isinstance(value, np.memmap):
            raise TypeError
        return value.copy()
    if type(value) in _PLAIN or isinstance(value, np.generic):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_copy(item) for item in value)
    if type(value) is dict:
        return {_copy(key): _copy(item) for key, item in value.items()}
    raise TypeError


def are_equal(one: Any, other: Any) -> bool:
    """True if two attributes, or dicts of attributes, are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    return bool(one == other) or (one != one and other != other)  # both are NaN


def agree(backend: Backend, seed: int | None) -> str:
    """Gives the random generators of Python, NumPy, TensorFlow and Keras the same state on all ranks.

    Those that already have the same state, since the script seeds them, are kept. The others get the chief's seed.
    Returns what was done, for the log.
    """
    keras_random.draw_alike(None)
    if seed is not None:
        keras.utils.set_random_seed(seed)
        return f"seeded with {seed}"
    if backend.topology.size == 1:
        return "unchanged"
    local: dict[str, Any] = {
        "python": _hash(random.getstate()),
        "numpy": _hash(np.random.get_state()),
        "tensorflow": keras_random.tensorflow_seed(),
        "keras": keras_random.global_seed(),
    }
    gathered = backend.all_gather_object("kd.init() (random states)", (local, random.SystemRandom().getrandbits(31)))
    states, chiefs_seed = [state for state, _ in gathered], gathered[0][1]
    different = [name for name in local if any(state[name] != states[0][name] for state in states)]
    backend.drawn_seed = chiefs_seed
    seeds = {"python": random.seed, "numpy": np.random.seed, "tensorflow": tf.random.set_seed}
    seeds["keras"] = lambda seed: keras_random.set_global_state([seed, 0])
    for name in different:
        seeds[name](chiefs_seed)
    if "tensorflow" not in different and local["tensorflow"] is None:  # then it seeds itself from the clock
        keras_random.draw_alike(chiefs_seed)
        different.append("tensorflow")
    kept = [name for name in local if name not in different]
    return f"kept: {', '.join(kept) or 'none'}; given the chief's seed: {', '.join(different) or 'none'}"


def states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "keras": keras_random.global_seed()}


def set_states(of_generators: Mapping[str, Any]) -> None:
    random.setstate(of_generators["python"])
    np.random.set_state(of_generators["numpy"])
    if isinstance(of_generators["keras"], list):
        keras_random.set_global_state(of_generators["keras"])


def _hash(state: Any) -> str:
    plain = [part.tolist() if isinstance(part, np.ndarray) else part for part in state]
    return hashlib.sha256(repr(plain).encode()).hexdigest()


_SHARED = "variables"


def take(model: keras.Model, optimizers: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns the weights, statistics and seeds of a model, and the state of its optimizers, as they are now."""
    named = _named(model, optimizers)
    return dict(zip(named, values_of(named.values()), strict=True))


def put(arrays: Mapping[str, np.ndarray], model: keras.Model, optimizers: Sequence[Any]) -> None:
    """Sets the variables, which exist, to what `take` returned. Raises `MismatchError` if that is of another model."""
    variables = _named(model, optimizers)
    saved = {name: array.shape for name, array in arrays.items() if name.startswith(_SHARED)}
    current = {name: tuple(variable.shape) for name, variable in variables.items()}
    if saved != current:
        name = next(name for name in {**saved, **current} if saved.get(name) != current.get(name))
        raise MismatchError(
            "The commit is of another model or optimizer, so training can't resume from it.",
            f"{name}: shape {saved.get(name, 'none')} in the commit, {current.get(name, 'none')} now",
            "Build and compile the model as before, or pass another directory to kd.callbacks.Commit.",
        )
    assign(list(variables.values()), [arrays[name] for name in variables])


def _named(model: keras.Model, optimizers: Sequence[Any]) -> dict[str, Any]:
    # Without the names of layers, which Keras numbers again when a notebook builds the model once more.
    named = {f"{_SHARED}/model/{i}/{v.path.split('/')[-1]}": v for i, v in enumerate(model.variables)}
    for number, optimizer in enumerate(optimizers):
        named |= {f"{_SHARED}/optimizer_{number}/{i}": v for i, v in enumerate(variables_of(optimizer))}
    return named


def take_own(model: keras.Model, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Returns the state that differs by rank between two epochs: metrics, statistics, accumulated gradients."""
    return {
        "metrics": [values_of(metric.variables) for metric in model.metrics],
        "statistics": values_of(keras_model.statistics_of(model)),
        "accumulators": values_of(accumulators_of(optimizers)),
    }


def put_own(
    of_ranks: Sequence[dict[str, Any]], model: keras.Model, optimizers: Sequence[Any], topology: Topology,
    is_within_epoch: bool,
) -> None:  # fmt: skip
    """Sets the state of this rank from the states of all ranks of the commit, which may have been more or fewer.

    If an epoch begins (`is_within_epoch=False`), Keras has reset the metrics for it.
    """
    statistics, accumulators = keras_model.statistics_of(model), accumulators_of(optimizers)
    if len(of_ranks) == topology.size:
        own = of_ranks[topology.rank]
        if is_within_epoch:
            WITH_TOTALS.discard(model)  # an evaluation before `fit` has left them
            for metric, values in zip(model.metrics, own["metrics"], strict=True):
                assign(metric.variables, values)
        assign(statistics, own["statistics"])
        assign(accumulators, own["accumulators"])
        return
    # The chief gets the sum of all ranks, the others nothing. All ranks get the average of statistics.
    if is_within_epoch and topology.is_chief:
        combine_metrics(model, [own["metrics"] for own in of_ranks], metric_states(model)[1])
    assign(statistics, [mean_of(values) for values in zip(*(own["statistics"] for own in of_ranks), strict=True)])
    sums = [sum(values) for values in zip(*(own["accumulators"] for own in of_ranks), strict=True)]
    assign(accumulators, [total if topology.is_chief else np.zeros_like(total) for total in sums])
