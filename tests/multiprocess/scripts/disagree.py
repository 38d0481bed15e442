"""Two ranks that disagree in one thing after the other. Each rank writes what it was told; then training continues."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import keras_dist as kd

told: dict[str, list[str]] = {}


def stopped(name: str, action: Callable[[], object]) -> None:
    kd.barrier()
    try:
        action()
        told[name] = ["nothing", ""]
    except Exception as error:
        told[name] = [type(error).__name__, str(error)]


def model_of(units: int = 3, optimizer: str = "sgd", loss: object = "mse", metrics: object = None) -> keras.Model:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(units, name="first"), keras.layers.Dense(1)])
    model = kd.distribute(model)
    model.compile(optimizer, loss, metrics=metrics)
    return model


def fit(model: keras.Model, count: int = 25, epochs: int = 1, first: float = 0.0) -> None:
    x = np.arange(count * 4).reshape(count, 4) / 100
    x[0, 0] = first
    model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0)


kd.init()
second = kd.rank()
stopped("models", lambda: fit(model_of(units=3 + second)))
stopped("optimizers", lambda: fit(model_of(optimizer="adam" if second else "sgd")))
stopped("losses", lambda: fit(model_of(loss=keras.losses.Huber(1.0 + second))))
stopped("metrics", lambda: fit(model_of(metrics=["mae", "mse"] if second else ["mae"])))
stopped("epochs", lambda: fit(model_of(), epochs=1 + second))
stopped("steps", lambda: fit(model_of(), count=25 - 8 * second))
stopped("data", lambda: fit(model_of(), first=1.0 * second))
stopped("calls", lambda: kd.barrier() if second else fit(model_of()))
Path("a-file").touch()  # which nobody, not even root, can write into as if it were a folder
stopped("unwritable", lambda: model_of().save("somewhere.keras" if second else "a-file/model.keras"))
if kd.is_chief():
    child = [sys.executable, "-c", "import keras_dist as kd; kd.init()"]
    told["child"] = ["", subprocess.run(child, capture_output=True, text=True).stderr]
stopped("nothing", lambda: fit(model_of()))
Path(f"told-{kd.rank()}.json").write_text(json.dumps(told))
