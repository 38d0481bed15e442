"""Files are plain Keras files: complete, written once, loadable without keras_dist. Runs resume from commits."""

import contextlib
import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd
from tests.contract.harness import FLOAT32, FLOAT32_ADAM, Numbers, contract, same
from tests.contract.parts import (
    FEATURES,
    compiled,
    examples,
    fitted,
    mlp,
    numbers,
    predictions,
    saved_config,
    some,
    undistributed,
)
from tests.contract.test_sources import Batches
from tests.contract.test_training import Subclassed


def config_of(path: str) -> str:
    """Returns the configuration in a .keras file, with ids of objects (their addresses) replaced by 0, 1, 2, …"""
    text = json.dumps(saved_config(path), sort_keys=True)
    ids: dict[str, str] = {}
    return re.sub(r'(?<="shared_object_id": )\d+', lambda match: ids.setdefault(match[0], str(len(ids))), text)


@contract("save", sizes=(3,), also=("mirrored-2", "parameter_server-2", "tpu-1"))
def test_save(distribute: Any) -> Numbers:
    model = compiled(distribute, keras.optimizers.Adam(0.01, clipnorm=1.0), metrics=["mae"])
    result = fitted(model, *numbers())
    model.save("model.keras")
    assert [path.name for path in Path().iterdir()] == ["model.keras"]
    with undistributed():
        loaded = keras.models.load_model("model.keras")
        again = loaded.fit(*numbers(), shuffle=False, verbose=0).history
    numbers_of = {"steps": loaded.optimizer.iterations, "again": again, "weights": loaded.get_weights()}
    return {**result, "config": config_of("model.keras"), **numbers_of}


def functional() -> keras.Model:
    inputs = keras.Input([FEATURES])
    return keras.Model(inputs, {"a": mlp()(inputs), "b": keras.layers.Dense(1, kernel_regularizer="l2")(inputs)})


@contract("save-config-models")
def test_save_config_models(distribute: Any) -> Numbers:
    configs = {}
    for name, make in {"sequential": mlp, "functional": functional, "subclassed": Subclassed}.items():
        keras.backend.clear_session()
        model = compiled(distribute, "adam", {"a": "mse", "b": "mae"} if name == "functional" else "mse", make())
        model.build([None, FEATURES])
        model.save(f"{name}.keras")
        configs[name] = config_of(f"{name}.keras")
        assert '"compile_config": {' in configs[name]
        assert "keras_dist" not in configs[name]
    return configs


OPTIMIZERS = {
    "SGD": {"momentum": 0.9}, "Adam": {"clipnorm": 0.5}, "AdamW": {"weight_decay": 0.1}, "RMSprop": {},
    "Nadam": {}, "Ftrl": {}, "Lion": {}, "Adafactor": {}, "Lamb": {}, "Muon": {}, "Adagrad": {}, "Adadelta": {},
    "Adamax": {"gradient_accumulation_steps": 2},
}  # fmt: skip


@contract("save-config-optimizers", covered_by=("save", "save-config-models"))
def test_save_config_optimizers(distribute: Any) -> Numbers:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizers = {
        **{name: getattr(keras.optimizers, name)(**given) for name, given in OPTIMIZERS.items()},
        "schedule": keras.optimizers.SGD(schedule, use_ema=True),
        "scaled": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0),
    }
    configs = {}
    for name, optimizer in optimizers.items():
        model = compiled(distribute, optimizer)
        model.save("model.keras")
        configs[name] = re.sub(r"sequential_\d+|dense_\d+|input_layer_\d+", "layer", config_of("model.keras"))
        assert type(optimizer).__name__ in configs[name]
    return configs


def printed_by_the_chief(program: str) -> str:
    """Returns what a program prints that the chief runs, or how it failed."""
    text = None
    if kd.is_chief():
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
        text = ended.stdout if ended.returncode == 0 else ended.stderr[-2000:]
    return str(kd.broadcast(text))


def loaded_weights(distribute: Any, path: str, optimizer: Any = None, **options: Any) -> Numbers:
    """Trains, saves weights, and returns the files and what a plain model loads of them, which is the same."""
    model, other = compiled(distribute, optimizer), mlp()
    fitted(model, *numbers())
    model.save_weights(path, **options)
    other.load_weights(path)
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return {"weights": other.get_weights(), "files": ",".join(sorted(path.name for path in Path().iterdir()))}


contract("save-weights", covered_by=("load-weights",))(
    lambda distribute: loaded_weights(distribute, "w.weights.h5", keras.optimizers.Adam(0.01))
)
# The file that is named refers to the others by their names.
contract("save-weights-in-shards", covered_by=("load-weights",))(
    lambda distribute: loaded_weights(distribute, "w.weights.json", max_shard_size=2e-7)  # GB
)


@contract("load-weights")
def test_load_weights(distribute: Any) -> Numbers:
    if kd.is_chief():
        source = mlp()
        source.set_weights([np.ones_like(weight) for weight in source.get_weights()])
        source.save_weights("w.weights.h5")
    kd.barrier()
    model = compiled(distribute)
    model.load_weights("w.weights.h5")
    return fitted(model, *numbers())


@contract("save-path-of-the-chief")
def test_save_path_of_the_chief(distribute: Any) -> Numbers:
    model = compiled(distribute)
    model.save(f"model-{kd.rank()}.keras")
    return {"files": ",".join(path.name for path in Path().iterdir())}


@contract("clone-copy-pickle")
def test_clone_copy_pickle(distribute: Any) -> Numbers:
    model = compiled(distribute)
    fitted(model, *numbers())
    x, _ = numbers()
    with undistributed():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert {type(other) for other in (clone, copied, pickled)} == {keras.Sequential}
        return {name: predictions(other, x) for name, other in
                {"clone": clone, "copied": copied, "pickled": pickled}.items()}  # fmt: skip


EXPORTED = """
import json, sys
import keras, numpy as np, tensorflow as tf
x = np.load("x.npy")
saved = keras.saving.load_model("model.keras").predict(x, verbose=0)
loaded = tf.saved_model.load("exported")
served = loaded.serve(x).numpy()
interpreter = tf.lite.Interpreter(model_content=tf.lite.TFLiteConverter.from_saved_model("exported").convert())
inputs, outputs = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
interpreter.resize_tensor_input(inputs, x.shape)
interpreter.allocate_tensors()
interpreter.set_tensor(inputs, x)
interpreter.invoke()
assert not [name for name in sys.modules if name.startswith(("keras_dist", "horovod"))]
print(json.dumps([served.tolist(), interpreter.get_tensor(outputs).tolist(), saved.tolist()]))
"""


@contract("export", float32=True, tolerance=FLOAT32)
def test_export(distribute: Any) -> Numbers:
    model = compiled(distribute)
    x, y = numbers()
    fitted(model, x, y)
    model.export("exported", verbose=False)
    model.save("model.keras")
    expected = predictions(model, x)
    with undistributed():
        loaded = tf.saved_model.load("exported")
        served = np.array(loaded.serve(x))
    np.testing.assert_allclose(served, expected, rtol=1e-6, atol=1e-6)
    if not some({"another process": True}):
        return {"served": served}
    if kd.is_chief():
        np.save("x.npy", x)
    text = printed_by_the_chief(EXPORTED)
    served, lite, saved = (np.array(values, "float32") for values in json.loads(text.splitlines()[-1]))
    for values in (served, lite, saved):
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
    return {"served": served, "lite": lite, "saved": saved}


class Crash(Exception):
    pass


class Crashing(keras.callbacks.Callback):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


def interrupted(distribute: Any, crashes: tuple[int, ...], fit: Callable[[list[Any]], Numbers]) -> Numbers:
    """Returns what `fit` returns, in one process at once, else after crashes."""
    keras.utils.set_random_seed(3)
    if distribute is same:
        return fit([])
    for number, batches in enumerate(crashes):
        with contextlib.suppress(Crash):
            fit([kd.callbacks.Commit("commits", every=(1, "epoch", 2)[number]), Crashing(batches)])
            raise AssertionError("fit has ended before the crash")
        keras.utils.set_random_seed(3)
    return fit([kd.callbacks.Commit("commits", every=2)])


@contract("commit", tolerance=FLOAT32_ADAM, covered_by=("commit-pydataset", "commit-stopped-early"))
def test_commit(distribute: Any) -> Numbers:
    def fit(callbacks: list[Any]) -> Numbers:
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05)
        model = compiled(distribute, keras.optimizers.Adam(0.05), metrics=["mae"])
        x, y = numbers()
        model.evaluate(x, y, verbose=0)
        return fitted(model, x, y, epochs=4, validation_data=(x[:9], y[:9]), callbacks=[plateau, *callbacks])

    return interrupted(distribute, (2, 6, 4), fit)


contract("commit-repeated-dataset", covered_by=("commit-pydataset",))(
    lambda distribute: interrupted(
        distribute, (5,),
        lambda callbacks: fitted(
            compiled(distribute, keras.optimizers.SGD(0.1, momentum=0.9), metrics=["mae"]),
            examples(24).shuffle(24, seed=5).repeat().batch(8), epochs=4, steps_per_epoch=2, callbacks=callbacks,
        ),
    )
)  # fmt: skip


@contract("commit-callbacks", tolerance=FLOAT32_ADAM, covered_by=("commit-pydataset", "commit-stopped-early"))
def test_commit_callbacks(distribute: Any) -> Numbers:
    """Callbacks that act when an epoch begins do so once, also for an epoch that is interrupted."""

    def fit(callbacks: list[Any]) -> Numbers:
        lower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate)
        warmup = kd.callbacks.LearningRateWarmup(epochs=2.5, start=0.01)
        return fitted(compiled(distribute), *numbers(), epochs=4, callbacks=[lower, warmup, *callbacks])

    return interrupted(distribute, (6, 3), fit)


class Shuffling(Batches):
    """Has a state of its own: an order and a generator of noise."""

    def __init__(self) -> None:
        super().__init__(numbers(24))
        self.order, self.noise = np.arange(24), np.random.default_rng(4)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[8 * index : 8 * index + 8]
        return self.x[rows] + 0.1 * self.noise.normal(size=(8, FEATURES)), self.y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


contract("commit-pydataset")(
    lambda distribute: interrupted(
        distribute, (4, 3),
        lambda callbacks: fitted(compiled(distribute), Shuffling(), epochs=4, shuffle=False, callbacks=callbacks),
    )
)  # fmt: skip


@contract("commit-stopped-early", also=("mirrored-2", "parameter_server-2"))
def test_commit_stopped_early(distribute: Any) -> Numbers:
    def fit(callbacks: list[Any]) -> Numbers:
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)
        return fitted(compiled(distribute), *numbers(), epochs=5, callbacks=[stopping, *callbacks])

    result = interrupted(distribute, (3,), fit)
    assert len(result["history"]["loss"]) == 2
    return result
