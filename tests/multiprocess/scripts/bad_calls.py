"""Calls that are refused in one process, each with its message as JSON. Horovod is not installed here."""

import json
import os
from collections.abc import Callable

import keras

import keras_dist as kd

told: dict[str, list[str]] = {}


def refused(name: str, call: Callable[[], object], **variables: str) -> None:
    """Notes which error the call raises while these variables are in the environment."""
    os.environ.update(variables)
    try:
        call()
        told[name] = ["nothing", ""]
    except Exception as error:
        told[name] = [type(error).__name__, str(error)]
    for variable in variables:
        del os.environ[variable]


def init_on_jax() -> None:
    """As if Keras ran on JAX, which is not installed here."""
    plain, keras.backend.backend = keras.backend.backend, lambda: "jax"
    try:
        kd.init()
    finally:
        keras.backend.backend = plain


RANK = {f"HOROVOD_{name}": value for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0"}.items()}
WHOLE_RANK = {**RANK, "HOROVOD_LOCAL_SIZE": "2"}

refused("rank before init", kd.rank)
refused("distribute before init", lambda: kd.distribute(keras.Sequential()))
refused("unknown backend", lambda: kd.init("mpi"))
refused("unknown backend in the environment", kd.init, KERAS_DIST_BACKEND="mpi")
refused("backend of another type", lambda: kd.init(4))
refused("unknown option", lambda: kd.init("horovod", compresion="fp16"))
refused("option of a backend without options", lambda: kd.init("serial", compression="fp16"))
refused("options beside a backend", lambda: kd.init(kd.Serial(), compression="fp16"))
refused("unknown value of an option", lambda: kd.Horovod(compression="zip"))
refused("negative value of an option", lambda: kd.Horovod(cycle_time_ms=-1))
refused("another backend of Keras", init_on_jax)
refused("unknown log level", kd.init, KERAS_DIST_LOG="loud")
refused("horovod without a launcher", lambda: kd.init("horovod"))
refused("horovod without Horovod", lambda: kd.init("horovod"), **WHOLE_RANK)
refused("half of a launcher's environment", kd.init, **RANK)

kd.init("serial")
kd.init("serial")
kd.init()
refused("another backend after init", lambda: kd.init("horovod"))
refused("a backend with options after init", lambda: kd.init(kd.Horovod(compression="fp16")))
refused("distribute a layer", lambda: kd.distribute(keras.layers.Dense(1)))
refused("unknown kind of data", lambda: kd.distribute(keras.Sequential(), data="shard"))
refused("unknown reduction", lambda: kd.reduce("max", 1.0))
print("told:", json.dumps(told))
