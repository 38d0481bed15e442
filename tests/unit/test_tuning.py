"""`tune=True`: what is chosen from which times, and that no step is lost or repeated."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.step import optimizer
from keras_dist.training import options
from keras_dist.training.options import evenly, number_for
from tests.contract.parts import compiled_functions
from tests.multiprocess.launches import assert_close


@pytest.mark.parametrize(
    ("alone", "together", "tried", "number"),
    [
        (0.002, 0.0010625, 16, 50),  # Python and the step take 1 ms each
        (0.0011, 0.00100625, 16, 5),  # Python takes 0.1 ms
        (0.05, 0.05, 16, 1),
        (0.05, 0.06, 16, 1),  # noise
        (0.0501, 0.05, 16, 1),
        (0.051, 0.0500625, 16, 1),  # 1 ms beside 50 ms
        (0.011, 0.0100625, 16, 5),
        (0.002, 0.000125, 16, 8000),  # the step takes no time at all: the limit is an execution of a second
        (0.5, 0.3, 2, 3),  # an execution of more than a second would be too long
    ],
)
def test_what_is_chosen(alone: float, together: float, tried: int, number: int) -> None:
    assert number_for(alone, together, tried) == number


@pytest.mark.parametrize(
    ("number", "steps", "chosen"),
    [(64, 100, 50), (64, 1000, 62), (16, 5, 5), (16, None, 16), (16, 16, 16), (16, 17, 8), (1, 7, 1), (9, 1, 1)],
)
def test_few_steps_are_left_over(number: int, steps: int | None, chosen: int) -> None:
    assert evenly(number, steps) == chosen


class Own(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return 2 * x


class Counts(keras.callbacks.ProgbarLogger):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(batch)
        super().on_train_batch_end(batch, logs)


class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 4


@pytest.fixture(autouse=True)
def serial() -> None:
    kd.init("serial")


def model_of(tune: bool, *layers: keras.layers.Layer, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "tanh"), *layers, keras.layers.Dense(1)])
    if tune:
        model = kd.distribute(model, tune=True)
    model.compile(keras.optimizers.SGD(0.05), "mse", **compiled)
    return model


def data(steps: int) -> tf.data.Dataset:
    x = np.random.RandomState(0).normal(size=(2 * steps, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(2)


def choose(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(options, "number_for", lambda *times: number)


@pytest.mark.parametrize("source", ["data", pytest.param("data without end", marks=pytest.mark.full), "generator"])
def test_steps_are_those_of_plain_keras(
    source: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, 30)

    def train(model: keras.Model) -> Any:
        batches, options = data(50), {}
        if source == "data without end":
            batches, options = batches.repeat(), {"steps_per_epoch": 50}
        if source == "generator":  # its number of batches is known after the first epoch
            batches = tf.data.Dataset.from_generator(lambda: iter(data(50)), output_signature=batches.element_spec)
        counts = Counts()
        history = model.fit(batches, epochs=4, validation_data=data(7), callbacks=[counts], verbose=0, **options)
        return counts.ends, history.history, model.get_weights()

    ends, *plain = train(model_of(tune=False))
    assert ends == [*range(50)] * 4
    ends, *ours = train(model_of(tune=True))
    assert_close(ours, plain, rtol=0, atol=0)
    of_epochs = np.split(np.array(ends), np.flatnonzero(np.diff(ends) < 0) + 1)
    assert all(epoch[-1] == 49 for epoch in of_epochs)
    if source == "generator":
        assert [*of_epochs[0]] == [*range(50)]
        assert [*of_epochs[1]] == [15, 31, 47, 48, 49]
    else:
        assert [*of_epochs[0]] == [*range(21), 32, 44, *range(45, 50)]  # 12 are tried, 4 × 12 = 48
    assert [*of_epochs[-1]] == [24, 49]  # rather than 29 and 20 steps alone
    assert "keras_dist: 25 steps in one execution. A step took " in capfd.readouterr().err


def test_what_was_chosen_is_kept_until_the_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, 25)
    model = model_of(tune=True)
    model.fit(data(50), epochs=3, verbose=0)
    traced = model.train_function
    model.fit(data(50), callbacks=[counts := Counts()], verbose=0)
    assert counts.ends == [24, 49]
    assert model.train_function is traced
    assert model.steps_per_execution == 1
    model.compile("sgd", "mse")
    model.fit(data(50), callbacks=[counts := Counts()], verbose=0)
    assert counts.ends[:21] == [*range(21)]
    assert len(counts.ends) < 50


def test_a_training_that_stops_before_an_epoch_makes_one_step_more_as_in_plain_keras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose(monkeypatch, 25)
    steps = []
    for tune in (False, True):
        model = model_of(tune)
        model.fit(data(50), epochs=6, callbacks=[Stops()], validation_data=data(3), verbose=0)
        steps.append(int(model.optimizer.iterations))
    assert steps == [201, 201]


@pytest.mark.parametrize(
    ("build", "callbacks", "reason"),
    [
        (lambda: model_of(True), [kd.callbacks.LearningRateWarmup(2)], "LearningRateWarmup may act between batches"),
        (lambda: model_of(True, steps_per_execution=5), [], "`compile` has set 5"),
        (lambda: model_of(True, run_eagerly=True), [], "the steps run eagerly"),
    ],
)
def test_where_steps_stay_as_they_are(build: Any, callbacks: list[Any], reason: str, said: list[str]) -> None:
    model = build()
    steps = model.steps_per_execution
    model.fit(data(50), callbacks=[*callbacks, counts := Counts()], verbose=0)
    assert counts.ends == [*range(steps - 1, 50, steps)]
    assert f"tune=True changes nothing here: {reason}." in said


def prefer(monkeypatch: pytest.MonkeyPatch, way: str) -> list[float]:
    """Lets a way to make a step seem the fastest. Returns the seconds that the ways seem to take."""
    medians = [0.001 if each == way else 0.002 for each in options.WAYS]

    def of_all(self: Any, value: Any) -> list[Any]:
        return [medians if value and isinstance(value, list) and isinstance(value[0], float) else value]

    monkeypatch.setattr(options.Tuning, "_of_all", of_all)
    return medians


@pytest.fixture
def all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few steps of these tests are worth it, and their model is large."""
    monkeypatch.setattr(options, "WORTH", 0)
    monkeypatch.setattr(optimizer, "FUSED_FROM", (0, 0))


@pytest.mark.usefixtures("all_ways")
@pytest.mark.parametrize("way", [pytest.param(options.PLAIN, marks=pytest.mark.full), options.UPDATE, options.ALL])
def test_the_fastest_way_is_kept_and_has_the_numbers_of_plain_keras(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    medians = prefer(monkeypatch, way)
    choose(monkeypatch, 10)
    plain = model_of(False)
    expected = plain.fit(data(50), epochs=3, verbose=0).history
    model, before = model_of(True), compiled_functions()
    history = model.fit(data(50), epochs=3, verbose=0).history
    assert_close([history, model.get_weights()], [expected, plain.get_weights()], rtol=1e-5, atol=1e-6)
    line = "; ".join(f"{1000 * median:.2f} ms {each}" for each, median in zip(options.WAYS, medians, strict=True))
    assert f"keras_dist: {line}.\n" in capfd.readouterr().err
    assert (model.jit_compile, "apply" in vars(model.optimizer)) == (False, False)
    # Of one step, and of several in one execution.
    several = sum("fused_update" in name for name in compiled_functions() - before)
    assert several == (2 if way == options.UPDATE else 1)


@pytest.mark.usefixtures("all_ways")
@pytest.mark.parametrize(
    ("build", "ways"),
    [
        (lambda: model_of(True), options.WAYS),
        (lambda: model_of(True, keras.layers.Dropout(0.1)), options.WAYS[:2]),
        pytest.param(lambda: model_of(True, Own()), options.WAYS[:2], marks=pytest.mark.full),
    ],
)
def test_xla_is_tried_where_the_numbers_stay_the_same(
    build: Any, ways: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    build().fit(data(70), verbose=0)
    line = "; ".join(rf"[\d.]+ ms {way}" for way in ways)
    assert re.search(rf"^keras_dist: {line}\.$", capfd.readouterr().err, re.MULTILINE)


@pytest.mark.usefixtures("all_ways")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.full] * (way == options.UPDATE)) for way in options.WAYS]
)
def test_the_end_of_data_of_unknown_length_counts_as_in_plain_keras(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    """It would not among other steps, nor in one that XLA compiles. Keras takes the 15 steps of an epoch for 16."""
    choose(monkeypatch, 16)
    prefer(monkeypatch, way)

    def train(model: keras.Model) -> Any:
        batches = data(15).filter(lambda *example: True)
        history = model.fit(batches, epochs=13, callbacks=[counts := Counts()], verbose=0)
        return counts.ends[-1:], int(model.optimizer.iterations), history.history, model.get_weights()

    last, steps, *plain = train(model_of(tune=False))
    assert (last, steps) == ([14], 13 * 16)
    model = model_of(tune=True)
    last, steps, *ours = train(model)
    assert (last, steps) == ([14], 13 * 16)
    assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    said = capfd.readouterr().err
    assert "keras_dist: 15 steps in one execution." in said
    assert f"ms {options.ALL}" in said


def test_nothing_is_tried_that_the_run_is_too_short_for(capfd: pytest.CaptureFixture[str]) -> None:
    model_of(True).fit(data(150), verbose=0)
    err = capfd.readouterr().err
    assert "ms alone" in err
    assert "XLA" not in err
