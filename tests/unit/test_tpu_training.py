"""Training through TPUStrategy: its real code on emulated cores has to give what plain Keras gives."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.backends.tpu import step as tpu_data
from keras_dist.backends.tpu.backend import TPU
from keras_dist.compat import keras_losses, keras_strategy, tpu_emulation
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import warn_once
from keras_dist.training import options
from tests.multiprocess.launches import assert_close

pytestmark = pytest.mark.timeout(240)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 12)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
Dense = keras.layers.Dense


@contextlib.contextmanager
def cores(count: int = 1) -> Iterator[tf.distribute.Strategy]:
    """The strategy of so many cores, and its scope."""
    strategy = tpu_emulation.emulated_strategy(count)
    with tpu_emulation.runs_on_cpu(), strategy.scope():
        yield strategy


def backend_on(strategy: tf.distribute.Strategy) -> TPU:
    """Returns the backend as it is after `kd.init("tpu")`."""
    backend = TPU("local")
    backend.strategy = strategy
    return backend


def distribute_on_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Distributes a model as `kd.distribute` does after `kd.init("tpu")`."""
    backend_on(strategy).distribute(model, options.Options())
    return model


def build(*more: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((12,)), Dense(16, "relu"), *more, keras.layers.Dropout(0.1), Dense(2)])


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=0.5), loss, metrics=["accuracy"])
    return model


def test_one_core_is_plain_keras_bit_for_bit() -> None:
    """100 examples, shuffled, in full batches of 25. The promised cases compare the rest with one process."""

    def trained(distribute: Callable[[keras.Model], keras.Model]) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = compiled(distribute(build(keras.layers.BatchNormalization())))
        model.fit(X, Y, batch_size=25, epochs=2, verbose=0)
        return list(model.get_weights())

    plain = trained(lambda model: model)
    with cores() as strategy:
        on_core = trained(lambda model: distribute_on_strategy(model, strategy))
    for ours, theirs in zip(on_core, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_jit_is_switched_off_aloud(said: list[str]) -> None:
    with cores() as strategy:
        model = distribute_on_strategy(build(), strategy)
        said.clear()
        model.compile("sgd", "mse")
        assert (model.jit_compile, said) == (False, [])
        model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile is False
    assert said == ["jit_compile=True is off on a TPU: TPUStrategy compiles the whole step."]


def test_fit_puts_steps_together_where_nobody_looks(said: list[str]) -> None:
    """The numbers stay those of plain Keras, with validation and evaluation on data without end, too."""
    data, seen = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10), list[int]()

    def train(model: keras.Model, *callbacks: Any) -> Any:
        later = LooksLater(data)
        history = model.fit(data.repeat(), epochs=2, steps_per_epoch=6, validation_data=data.repeat(),
                            validation_steps=4, callbacks=[later, *callbacks], verbose=0).history  # fmt: skip
        return history, model.get_weights(), [evaluated for _, evaluated in later.seen], later

    keras.utils.set_random_seed(1)
    *plain, _ = train(compiled(build()))
    with cores() as strategy:
        keras.utils.set_random_seed(1)
        model = compiled(distribute_on_strategy(build(), strategy))
        said.clear()
        warn_once.cache_clear()
        *ours, later = train(model)
        assert [number for number, _ in later.seen] == [2, 2]  # divides 6 and 4
        assert said == [
            "2 steps in one execution: no callback acts between batches. compile(steps_per_execution=1) turns it off."
        ]
        assert model.steps_per_execution == 1
        looks = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        model.fit(data, callbacks=[looks], verbose=0)
        assert seen == list(range(10))
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=1)
        *_, later = train(model)
        assert [number for number, _ in later.seen] == [1, 1]
    for left, right in zip(ours[1], plain[1], strict=True):
        np.testing.assert_array_equal(left, right)
    for name, values in plain[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=1e-6, atol=0, err_msg=name)
    np.testing.assert_allclose(ours[2], plain[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("steps", "exactly", "number"),
    [(100, [], 25), (97, [], 32), (None, [], 32), (5, [], 5), (1563, [], 32), (64, [100, 10], 10), (None, [7], 7),
     (1000, [50, None], 25), (1, [], 1)],
)  # fmt: skip
def test_how_many_steps_are_put_together(steps: Any, exactly: Any, number: int) -> None:
    assert options.number_of(steps, exactly) == number


def test_a_model_from_before_is_refused() -> None:
    model = build()
    with cores() as strategy, pytest.raises(ConfigurationError, match="created before the TPU was connected"):
        distribute_on_strategy(model, strategy)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Adds(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x))
        return x


def own_step() -> keras.Model:
    plain = build()
    return OwnStep(plain.inputs, plain.outputs)


def mean_error(y: Any, x: Any) -> Any:
    return keras.ops.mean(x)


NOT_FILLED: list[Any] = [
    (own_step, dict, "OwnStep has a custom train_step"),
    (build, lambda: {"metrics": [mean_error]}, "the metric 'mean_error' is one number for all examples"),
    pytest.param(lambda: build(Adds(name="adds")), dict, "the layer 'adds' adds a loss", marks=pytest.mark.full),
    pytest.param(
        build,
        lambda: {"loss": mean_error},
        "a loss of shape () has no row for each of 32 examples",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("make", "options", "received"), NOT_FILLED, ids=["train_step", "metric", "add_loss", "loss"])
def test_what_would_count_rows_that_fill_up(make: Any, options: Any, received: str) -> None:
    """It is refused where a smaller batch is certain, and trained where none can come."""
    with cores() as strategy:
        model = distribute_on_strategy(make(), strategy)
        model.compile(**{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", **options()})
        with pytest.raises(NotSupportedError, match="this model would count these rows") as raised:
            model.fit(X, Y, batch_size=32, verbose=0)
        assert received in str(raised.value)
        model.fit(X[:96], Y[:96], batch_size=32, verbose=0)
        model.fit(X, Y, batch_size=20, validation_split=0.2, verbose=0)
        assert model.optimizer.iterations == 3 + 4


def batches(dataset: tf.data.Dataset, size: int, replicas: int) -> list[tuple[list[int], list[float], int]]:
    shares = tpu_data.shares(tpu_data.checked(dataset, size, replicas), replicas, 0, 1)
    return [(x.numpy().tolist(), rows.numpy().tolist(), int(totals[0])) for x, rows, totals in shares]


def test_shares_are_filled_up() -> None:
    """Shares are those of other backends: one example more or less."""
    dataset = tf.data.Dataset.range(5).batch(3)
    assert batches(dataset, 3, 2) == [
        ([0, 1], [1, 0], 3), ([1, 2], [1, 1], 3), ([3, 4], [1, 0], 2), ([4, 4], [1, 0], 2)
    ]  # fmt: skip
    assert batches(tf.data.Dataset.range(1).batch(4), 4, 2) == [([0, 0], [0, 0], 1), ([0, 0], [1, 0], 1)]


def test_hosts_of_a_pod_take_their_own_shares() -> None:
    even = tpu_data.checked(tf.data.Dataset.range(8).batch(8), 8)
    hosts = [[x.numpy().tolist() for (x,) in tpu_data.shares(even, 4, host, 2)] for host in (0, 1)]
    assert hosts == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (tf.data.Dataset.range(9).batch(4), (4, False)),
        (tf.data.Dataset.range(8).batch(4).prefetch(1), (4, True)),
        (tf.data.Dataset.range(9).repeat().batch(4), (4, True)),
        (tf.data.Dataset.range(9).filter(lambda x: x > 1).batch(4), (4, None)),
        (tf.data.Dataset.range(9).batch(4).map(lambda x: x + 1).prefetch(1), (4, False)),
        (tf.data.Dataset.range(9).batch(4, drop_remainder=True).repeat(), (4, True)),
        (tf.data.Dataset.range(9).batch(4).shuffle(2), (None, None)),
    ],
)
def test_the_batch_size_is_known_without_looking_at_data(dataset: tf.data.Dataset, expected: Any) -> None:
    assert tpu_data.batch_size_of(dataset) == expected


@pytest.mark.parametrize(
    ("data", "received"),
    [
        (tf.ragged.constant([[1], [2, 3]]), "RaggedTensorSpec"),
        (tf.constant(["a", "b"]), "dtype=tf.string"),
    ],
    ids=["ragged", "strings"],
)
def test_what_has_no_fixed_shape_is_refused(data: Any, received: str) -> None:
    with pytest.raises(NotSupportedError, match=received):
        tpu_data.check_shapes(tf.data.Dataset.from_tensor_slices(data).batch(2))


def test_an_eager_custom_loop_is_refused() -> None:
    with cores() as strategy, pytest.raises(NotSupportedError, match="must be traced.\nReceived: kd.run outside"):
        backend_on(strategy).loop.run(len, (X,))


class LooksLater(keras.callbacks.Callback):
    def __init__(self, data: tf.data.Dataset) -> None:
        super().__init__()
        self.data = data
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        evaluated = self.model.evaluate(self.data.repeat(), steps=3, verbose=0)
        self.seen.append((self.model.steps_per_execution, evaluated))


def test_bfloat16_is_advised_once(said: list[str]) -> None:
    warn_once.cache_clear()
    with cores() as strategy:
        keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
        try:
            distribute_on_strategy(build(), strategy)
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
        assert said == []
        for _ in range(2):
            distribute_on_strategy(build(), strategy)
    (words,) = said
    assert "set_global_policy('mixed_bfloat16')" in words


def test_a_smaller_batch_of_unknown_data_is_refused_when_it_comes() -> None:
    with cores() as strategy:
        model = compiled(distribute_on_strategy(own_step(), strategy))
        known = tf.data.Dataset.from_tensor_slices((X, Y))
        unknown = known.filter(lambda x, y: True).batch(32)
        model.fit(unknown, steps_per_epoch=3, verbose=0)
        model.fit(known.batch(32), steps_per_epoch=3, verbose=0)
        model.fit(known.repeat().batch(32), steps_per_epoch=4, verbose=0)
        assert model.optimizer.iterations == 10
        received = "a batch of 4 examples, where 32 were expected; OwnStep has a custom train_step"
        with pytest.raises(NotSupportedError, match=received):
            model.fit(unknown, verbose=0)


# --- Several cores, beside the cases of the contract: what can't be filled up, in full batches ---


@pytest.fixture
def double_precision() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def on_full_batches(kind: str, strategy: tf.distribute.Strategy | None = None) -> dict[str, Any]:
    """Trains a model with a kind of loss: a reduction, or a function with one value."""
    keras.utils.set_random_seed(3)
    last = Dense(3, kernel_regularizer=None if kind == "none" else "l2")
    model = keras.Sequential([keras.Input((12,)), Dense(5, "tanh"), last])
    model = model if strategy is None else distribute_on_strategy(model, strategy)
    if kind == "scalar":
        crossentropy = keras.losses.sparse_categorical_crossentropy
        loss: Any = lambda y, logits: tf.reduce_mean(crossentropy(y, logits, from_logits=True))  # noqa: E731
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=kind)
    rate = 0.5 if kind == "scalar" else 0.01
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.4), loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).take(48).batch(24, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0).history
    return {"history": history, "predicted": model.predict(data, verbose=0), "weights": model.get_weights()}


@pytest.mark.full
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("kind", ["sum", "scalar", "none"])
def test_several_cores_compute_what_one_process_does(kind: str) -> None:
    expected = on_full_batches(kind)
    with cores(3) as strategy:
        assert_close(on_full_batches(kind, strategy), expected, atol=1e-12)


# --- Private names of Keras for steps under a strategy, and that they are still needed ---

ROWS = np.random.default_rng(0).normal(size=(6, 3, 4)).astype("float32")


class Scalar(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_pred)


def test_keras_divides_losses_by_the_number_of_replicas_but_for_scalars() -> None:
    """Once Keras divides all losses or none, `unscaled_losses` can go."""

    def losses() -> list[float]:
        return [float(loss(tf.zeros((2, 1)), tf.ones((2, 1)))) for loss in (keras.losses.MeanSquaredError(), Scalar())]

    with tpu_emulation.emulated_strategy(2).scope():
        assert losses() == [0.5, 1.0]
        with keras_strategy.unscaled_losses():
            assert losses() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("layer", "mask"),
    [
        ({}, None), ({"axis": 1}, None), ({"synchronized": True}, None), ({"renorm": True}, None),
        ({}, np.arange(18).reshape(6, 3) % 4 > 0),
    ],
    ids=["plain", "axis", "synchronized", "renorm", "mask"],
)  # fmt: skip
def test_rows_that_do_not_count_leave_no_trace_in_batchnorm(layer: Any, mask: Any) -> None:
    """The outputs of the first 4 of 6 rows, and the moving averages, are those of a batch of these 4 rows."""
    rows = np.array([1, 1, 1, 1, 0, 0], "float32")
    outputs, states = [], []
    for count in (4, 6):
        model = keras.Sequential([keras.Input((3, 4)), keras.layers.BatchNormalization(momentum=0.5, **layer)])
        call = model.layers[0]
        options = {"training": True, **({} if mask is None else {"mask": mask[:count]})}
        if count == 6:
            with keras_losses.batch_statistics(lambda numbers: numbers, rows=lambda: rows):
                outputs.append(np.asarray(call(ROWS, **options))[:4])
        else:
            outputs.append(np.asarray(call(ROWS[:4], **options)))
        states.append([np.asarray(variable) for variable in call.non_trainable_variables])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
