"""A model on a strategy of a test's own: TPU cores that are emulated, or devices of a CPU."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.tpu.backend import TPU
from keras_dist.training.options import Options


def distribute_on_strategy(model: keras.Model, strategy: tf.distribute.Strategy, **options: Any) -> keras.Model:
    """Distributes a model as `kd.distribute` does after `kd.init("tpu")`."""
    backend_on(strategy).distribute(model, Options(**options))
    return model


def backend_on(strategy: tf.distribute.Strategy) -> TPU:
    """Returns the backend as it is after `kd.init("tpu")`."""
    backend = TPU("local")
    backend.strategy = strategy
    return backend
