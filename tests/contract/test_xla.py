"""`jit_compile=True`: XLA compiles the layers of a model, forward and backward; the reduction stays outside."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_dist as kd
from tests.contract.harness import FLOAT32_ADAM, Numbers, asking, contract
from tests.contract.parts import (
    BATCH,
    FEATURES,
    Distribute,
    Gan,
    compiled,
    compiled_functions,
    compiled_gan,
    computed,
    fitted,
    mlp,
    noted_warnings,
    numbers,
    saved_config,
    tokens,
    undistributed,
    used,
)
from tests.contract.test_losses import Penalized
from tests.contract.test_models import Codebook, Watched
from tests.contract.test_training import OwnStep, positions_model


@contextlib.contextmanager
def counted(result: dict[str, Any]) -> Iterator[None]:
    """Counts in the result the functions for XLA that are traced in this context."""
    before = compiled_functions()
    yield
    new = compiled_functions() - before
    result["own_forward"] = sum("forward" in name for name in new)
    result["own_backward"] = sum("backward" in name for name in new)


def is_compiled(results: list[Numbers], expected: Numbers, size: int) -> None:
    """Every rank has compiled the forward and the backward pass; a TPU has its own compiler."""
    assert all(result["own_forward"] and result["own_backward"] for result in results if "own_forward" in result)


def results_of(model: keras.Model, x: Any, y: Any) -> Numbers:
    return used(model, x, y, validation_data=(x[:9], y[:9]))


@contract("jit-compile", sizes=(3,), verify=is_compiled, covered_by=("tests/unit/test_keras_xla.py",))
def test_jit_compile(distribute: Distribute) -> Numbers:
    """Compiled before `kd.distribute` and after it, several steps in one call, a batch at once, and compiled again."""
    x, y = numbers()
    result: Numbers = {}
    with counted(result):
        model = compiled(distribute, "adam", metrics=["mae"], jit_compile=True)
        result["after"] = results_of(model, x, y)
    if not is_split():
        result.pop("own_forward"), result.pop("own_backward")
    assert model.jit_compile == (not is_tpu())
    result["on_batch"] = [float(np.ravel(model.train_on_batch(x[:7], y[:7]))[0]), model.predict_on_batch(x[:5])]
    off: Numbers = {}
    with counted(off):
        model.compile("sgd", "mse", jit_compile=False)
        result["off"] = fitted(model, x, y)
    assert off == {"own_forward": 0, "own_backward": 0}
    before = mlp()
    before.compile("sgd", "mse", steps_per_execution=2, jit_compile=True)
    result["before"] = results_of(distribute(before), x, y)
    assert before.get_compile_config()["jit_compile"] is True
    return result


def is_tpu() -> bool:
    return tf.distribute.has_strategy()


def is_split() -> bool:
    """True if layers are compiled. In one process, and on a TPU, it is the whole step."""
    return kd.num_replicas() > 1 and not is_tpu()


@contract("jit-compile-models", also=("mirrored-2",), float32=True, tolerance=FLOAT32_ADAM)
def test_jit_compile_models(distribute: Distribute) -> Numbers:
    """A custom step, a GAN without `call`, masks and loops, sparse gradients, losses and metrics of layers."""
    x, y = numbers()
    words = np.random.RandomState(3).randint(0, 9, (25, 5))

    def gan() -> Numbers:
        model = compiled_gan(distribute(Gan()))
        model.jit_compile = True
        return fitted(model, tf.data.Dataset.from_tensor_slices((x, x[::-1])).batch(BATCH))

    def texts() -> Numbers:
        stack = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3), layers.Dense(1)]
        adam = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        return results_of(compiled(distribute, adam, model=keras.Sequential(stack), jit_compile=True), words, y)

    def losses() -> Numbers:
        inputs, activity = keras.Input([FEATURES]), keras.regularizers.L1(0.01)
        regularized = layers.Dense(3, "tanh", kernel_regularizer="l2", activity_regularizer=activity)(inputs)
        model = keras.Model(inputs, Penalized(1)(Watched(3)(regularized)))
        return results_of(compiled(distribute, model=model, jit_compile=True, metrics=["mae"]), x, y)

    variants = {
        "step": lambda: fitted(compiled(distribute, model=OwnStep(), jit_compile=True), x, y),
        "gan": gan,
        "texts": texts,
        "positions": lambda: fitted(compiled(distribute, "adam", model=positions_model(), jit_compile=True), *tokens()),
        "losses": losses,
    }
    return computed(variants, "losses")


@contract("jit-compile-around", covered_by=("tests/unit/test_keras_xla.py",))
def test_jit_compile_around(distribute: Distribute) -> Numbers:
    """What layers exchange in the forward pass stays outside; the layers around it are compiled. One line says so."""
    x, y = numbers()
    stack = [layers.Dense(6, "tanh"), layers.BatchNormalization(synchronized=True), layers.Dense(4), Codebook()]
    result: Numbers = {}
    compiled(distribute)  # warnings that come once, on a TPU about float32
    counts: Numbers = {}
    with noted_warnings() as warnings, counted(counts):
        model = compiled(distribute, model=keras.Sequential([*stack, layers.Dense(1)]), jit_compile=True)
        result["trained"] = results_of(model, x, y)
    if is_split():
        named = [warning for warning in warnings if warning.startswith("jit_compile: XLA cannot compile the layer")]
        assert len(named) == (2 if kd.is_chief() else 0), warnings
        assert counts["own_backward"] >= 3
    return result


@contract("jit-compile-exact", float32=True, tolerance=1e-6, covered_by=("tests/unit/test_keras_xla.py",))
def test_jit_compile_exact(distribute: Distribute) -> Numbers:
    x, y = numbers()
    drop = [layers.Dropout(0.3, seed=1), layers.Dense(6, "tanh"), layers.GaussianNoise(0.2, seed=2), layers.Dense(1)]
    exact = asking(distribute, exact=True, verify=True)
    return results_of(compiled(exact, model=keras.Sequential(drop), jit_compile=True), x, y)


@contract("jit-compile-files", covered_by=("tests/unit/test_keras_xla.py",))
def test_jit_compile_files(distribute: Distribute) -> Numbers:
    x, y = numbers()
    model = compiled(distribute, jit_compile=True)
    result = fitted(model, x, y)
    model.save("model.keras")
    with undistributed():
        loaded = keras.models.load_model("model.keras")
        copy = keras.models.clone_model(model)
    assert not any("call" in vars(part) for part in (model, *model.layers))
    config = saved_config("model.keras")
    config["compile_config"].pop("jit_compile" if is_tpu() else "none", None)
    config["compile_config"].pop("optimizer")
    return {
        **result, "config": json.dumps(config["compile_config"], sort_keys=True), "layers": len(copy.layers),
        "loaded": loaded.predict(x, verbose=0), "again": fitted(distribute(loaded), x, y),
    }  # fmt: skip
