"""`batch="per_replica"` and `scale_learning_rate`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist as kd
from tests.contract.harness import Numbers, asking, contract, same
from tests.contract.parts import (
    BATCH,
    COUNT,
    batches,
    compiled,
    dataset,
    examples,
    fitted,
    from_list,
    mlp,
    numbers,
    predictions,
    some,
)
from tests.contract.test_api import refused
from tests.contract.test_sources import RowMeans, ragged

SMALL = 3  # 9 batches: 3, ..., 3, 1
COVERED: dict[str, Any] = {"covered_by": ("per-replica-numpy",)}


def per_replica(distribute: Any, **options: Any) -> keras.Model:
    return compiled(asking(distribute, batch="per_replica"), **options)


def with_steps(model: keras.Model, result: Numbers) -> Numbers:
    return {**result, "steps": model.optimizer.iterations}


def add(row: str, case: Callable[..., Numbers], **options: Any) -> None:
    """Declares a row whose batches are in one process as many times as large as there are replicas."""
    reference = lambda size: case(same, SMALL * size)  # noqa: E731
    contract(row, reference=reference, **options)(lambda distribute: case(distribute, SMALL))


def by_arrays(distribute: Any, batch_size: int, **options: Any) -> Numbers:
    model = per_replica(distribute, metrics=["mae"], **options)
    return with_steps(model, fitted(model, *numbers(), batch_size=batch_size))


def by_tf(distribute: Any, batch_size: int) -> Numbers:
    data = examples().shuffle(COUNT).filter(lambda x, y: True).batch(batch_size)
    # Keras counts one more step when data of unknown length end: TensorFlow runs operations that do not need the data.
    return fitted(per_replica(distribute), data, epochs=3)


def by_ragged(distribute: Any, batch_size: int) -> Numbers:
    model = per_replica(distribute, model=RowMeans())
    return with_steps(model, fitted(model, ragged().batch(batch_size)))


def grouped(batches: list[Any], size: int, per_epoch: int | None = None) -> list[Any]:
    """Returns the batches that one process must get: `size` batches of an epoch, concatenated."""
    per_epoch = per_epoch or len(batches)
    epochs = [batches[start : start + per_epoch] for start in range(0, len(batches), per_epoch)]
    groups = [epoch[start : start + size] for epoch in epochs for start in range(0, len(epoch), size)]
    return [tuple(np.concatenate(parts) for parts in zip(*group, strict=True)) for group in groups]


def steps_per_epoch_in_one_process(size: int) -> Numbers:
    """An epoch has 5 of the 9 batches: epochs begin in the middle of the data, which are repeated."""
    model, epochs = compiled(same), grouped([*batches(size=SMALL), *batches(size=SMALL)][:15], size, per_epoch=5)
    return with_steps(model, fitted(model, from_list(epochs), epochs=3, steps_per_epoch=math.ceil(5 / size)))


@contract("per-replica-steps-per-epoch", sizes=(3,), reference=steps_per_epoch_in_one_process)
def test_per_replica_steps_per_epoch(distribute: Any) -> Numbers:
    model = per_replica(distribute)
    return with_steps(model, fitted(model, dataset(batch=SMALL).repeat(), epochs=3, steps_per_epoch=5))


def chiefs(size: int) -> Numbers:
    model, data = compiled(same), from_list(grouped([*batches(size=SMALL)], size))
    result = fitted(model, data, epochs=1)
    return {"generator": result, "tf": fitted(model, data)}


@contract("per-replica-chief", sizes=(3,), reference=chiefs, **COVERED)
def test_per_replica_chief(distribute: Any) -> Numbers:
    """The chief reads generators by default."""
    model = per_replica(distribute)
    result = fitted(model, batches(size=SMALL), epochs=1)
    second = compiled(asking(distribute, batch="per_replica", data="chief"))
    second.set_weights(model.get_weights())
    return {"generator": result, "tf": fitted(second, dataset(batch=SMALL))}


def by_one_batch(distribute: Any, batch_size: int) -> Numbers:
    model = per_replica(distribute)
    return with_steps(model, fitted(model, *numbers(5), batch_size=BATCH))


def validated(distribute: Any, batch_size: int) -> Numbers:
    """Three validation batches are three steps on any number of ranks."""
    model, data = per_replica(distribute, metrics=["mae"]), dataset(19, 4).repeat()
    result = fitted(model, *numbers(), batch_size=batch_size, validation_data=data, validation_steps=3)
    evaluation = model.evaluate(data, steps=3, verbose=0)
    return {**result, "evaluated": evaluation, "predicted": predictions(model, numbers(19)[0])}


add("per-replica-numpy", by_arrays, sizes=(3, 4))
add("per-replica-steps-per-execution", functools.partial(by_arrays, steps_per_execution=2), **COVERED)
add("per-replica-tf", by_tf, sizes=(3, 4), **COVERED)
add("per-replica-ragged", by_ragged, **COVERED)
add("per-replica-small", by_one_batch, sizes=(3,), **COVERED)
add("per-replica-validation", validated, sizes=(3,), **COVERED)


@contract("per-replica-different-data")
def test_per_replica_different_data(distribute: Any) -> Numbers:
    """Also if the rank's own batch is the same."""
    x, y = numbers()
    if kd.rank():
        x[0] += 1  # in the chief's batch
    model, words = per_replica(distribute), "rank 1 of 2 read a different batch"
    return refused(kd.MismatchError, words, lambda: fitted(model, x, y, batch_size=SMALL, shuffle=False))


# --- scale_learning_rate ---

RATE = 0.02  # times 8, training does not diverge yet
RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}


def rates_are_scaled(results: list[Numbers], plain: Numbers, size: int) -> None:
    for result in results:
        for rule, rates in result["own_rates"].items():
            np.testing.assert_allclose(rates, [RATE * RULES[rule](size)] * 4, rtol=1e-6)


def scaled(distribute: Any, rule: str, factor: float) -> tuple[Numbers, list[float]]:
    """The rate of a model that is compiled before and after, distributed twice, compiled again, and fitted twice."""
    distribute = asking(distribute, scale_learning_rate=rule)
    model = mlp()

    def rate_of(optimizer: Any) -> float:
        model.compile(optimizer, "mse")
        return float(model.optimizer.learning_rate)

    rate_of(keras.optimizers.SGD(RATE * factor))
    distribute(distribute(model))
    rates = [float(model.optimizer.learning_rate), rate_of(keras.optimizers.SGD(RATE * factor))]
    rates.append(rate_of(model.optimizer))
    result = [fitted(model, *numbers()), fitted(model, *numbers())]
    rates.append(float(model.optimizer.learning_rate))
    return {"results": result}, rates


def scaled_by_hand(size: int) -> Numbers:
    chosen = some(RULES, "sqrt").items()
    return {rule: scaled(same, rule, of(size))[0] for rule, of in chosen} | {"own_rates": {}}


@contract("scale-learning-rate", sizes=(3, 4), tolerance=1e-6, reference=scaled_by_hand, verify=rates_are_scaled)
def test_scale_learning_rate(distribute: Any) -> Numbers:
    results = {rule: scaled(distribute, rule, 1.0) for rule in some(RULES, "sqrt")}
    rates = {rule: rates for rule, (_, rates) in results.items()}
    return {**{rule: result for rule, (result, _) in results.items()}, "own_rates": rates}


@contract("scale-learning-rate-loaded", covered_by=("scale-learning-rate",))
def test_scale_learning_rate_loaded(distribute: Any) -> Numbers:
    linear = asking(distribute, scale_learning_rate="linear")
    model = compiled(linear, keras.optimizers.Adam(0.01))
    fitted(model, *numbers())
    model.save("model.keras")
    loaded = keras.models.load_model("model.keras")
    rates = []
    for action in (
        lambda: None,
        lambda: linear(loaded),
        lambda: fitted(loaded, *numbers()),
        lambda: loaded.compile(keras.optimizers.Adam(0.01), "mse"),
    ):
        action()
        rates.append(float(loaded.optimizer.learning_rate))
    scale = 1 if distribute is same else kd.num_replicas()
    np.testing.assert_allclose(rates, [0.01 * scale] * 4, rtol=1e-6)
    return {}


SCHEDULES: list[Callable[[], Any]] = [
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 10, 0.2, warmup_target=0.4, warmup_steps=3),
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 10),
    lambda: keras.optimizers.schedules.CosineDecayRestarts(0.1, 4),
    lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5, staircase=True),
    lambda: keras.optimizers.schedules.InverseTimeDecay(0.1, 5, 0.5),
    lambda: keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [0.4, 0.2, 0.1]),
    lambda: keras.optimizers.schedules.PolynomialDecay(0.1, 8, 0.02, 2.0),
]


class Own(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 / (keras.ops.cast(step, "float64") + 1)


@contract("scale-learning-rate-schedules", float32=True)
def test_scale_learning_rate_schedules(distribute: Any) -> Numbers:
    linear = asking(distribute, scale_learning_rate="linear")
    for make in SCHEDULES:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(make()))
        compiled(linear, optimizer)
        inner, factor = optimizer.inner_optimizer, 1 if distribute is same else kd.num_replicas()
        for step in range(12):
            inner.iterations.assign(step)
            np.testing.assert_allclose(inner.learning_rate, factor * make()(step), rtol=1e-6, atol=1e-9)
        assert inner.get_config()["learning_rate"]["class_name"] == type(make()).__name__
    words = "This learning rate cannot be scaled"
    return refused(kd.NotSupportedError, words, lambda: compiled(linear, keras.optimizers.SGD(Own())))


@contract("refuses-other-options")
def test_refuses_other_options(distribute: Any) -> Numbers:
    for words, target, options in (
        ("Use one of 'global', 'per_replica'", mlp(), {"batch": "local"}),
        ("Use one of 'linear', 'sqrt', or None", mlp(), {"scale_learning_rate": "square"}),
        ("The option `batch` is for models only", keras.optimizers.SGD(), {"batch": "per_replica"}),
        ("put several calls of kd.run into one tf", keras.optimizers.SGD(), {"tune": True}),
        ("(?s)tune=8.*Use one of True, False", mlp(), {"tune": 8}),
    ):
        with pytest.raises(kd.ConfigurationError, match=words):
            kd.distribute(target, **options)
    model = kd.distribute(mlp(), batch="per_replica")
    assert kd.distribute(model) is model
    words = "batch='global' after batch='per_replica'"
    return refused(kd.ConfigurationError, words, lambda: kd.distribute(model, batch="global"))
