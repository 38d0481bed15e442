"""What is compiled: a script up to its `fit`, or a model in a file. Runs in the process that compiles."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_dist import api, cluster
from keras_dist.backends.local.serial import Serial
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError, DistributionError


class Captured(BaseException):
    """Ends a script at its `fit`."""

    def __init__(self, model: keras.Model, specs: Any, varying: Sequence[str] = (), examples: int = 0) -> None:
        super().__init__("fit")
        self.model = model
        self.specs = specs  # a batch, as a structure of `tf.TensorSpec`
        self.varying = list(varying)  # the specifications of data without a fixed shape, as text
        self.examples = examples  # their number in the data, 0 if unknown


def run(script: Path, arguments: Sequence[str], strategy: tf.distribute.Strategy) -> Captured:
    """Runs a script until it calls `fit` or `train_on_batch`; its variables are made in the strategy's scope."""
    # This process only runs the script: `fit` captures, and the strategy makes all variables.
    tf_compat.set_strategy(strategy)
    cluster.set_backend(Serial())
    api.init = lambda *args, **kwargs: None
    keras.Model.fit, keras.Model.train_on_batch = _fit, _train_on_batch
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Captured as captured:
        return captured
    except DistributionError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            "The script ended before it called `fit`.", f"{type(error).__name__}: {error}",
            "Run it with plain `python` first. Its arguments come after `--`: "
            f"keras-dist dry-run {script.name} --target v5e-8 -- --epochs 1",
        ) from error
    raise ConfigurationError(
        "The script never called `model.fit`, so there is no step to compile.", str(script),
        "A dry run captures the first call of `fit` or `train_on_batch`; for a custom training loop use "
        "kd.tpu_dry_run(model, batch, target=...).",
    )


def load(path: str, specs: Any, strategy: tf.distribute.Strategy) -> Captured:
    try:
        with strategy.scope():
            return Captured(keras.saving.load_model(path), specs)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "The model can't be loaded in the process of the dry run.", str(error).splitlines()[0],
            "Put its custom classes into a module that can be imported, registered with "
            "@keras.saving.register_keras_serializable(), or use `keras-dist dry-run train.py`.",
        ) from error


def _fit(self: Any, x: Any = None, y: Any = None, batch_size: int | None = None, *_: Any, **kwargs: Any) -> NoReturn:
    raise capture(self, x, y, kwargs.get("sample_weight"), batch_size)


def _train_on_batch(self: Any, x: Any, y: Any = None, sample_weight: Any = None, *_: Any, **__: Any) -> NoReturn:
    raise capture(self, x, y, sample_weight, None)


def capture(model: keras.Model, x: Any, y: Any, weights: Any, batch_size: int | None) -> Captured:
    """Returns the model and the specification of a batch of the data given to `fit`."""
    if isinstance(x, tf.data.Dataset):
        shapes = ((spec, getattr(spec, "shape", None)) for spec in tf.nest.flatten(x.element_spec))
        varying = [str(spec) for spec, shape in shapes if shape is not None and shape.rank and None in list(shape[1:])]
        specs = specs_of(next(iter(x.take(1))))
        return Captured(model, specs, varying, max(0, int(x.cardinality())) * batch_of(specs))  # negative: unknown
    if isinstance(x, keras.utils.PyDataset):
        specs = specs_of(x[0])
        return Captured(model, specs, examples=(x.num_batches or 0) * batch_of(specs))
    if isinstance(x, Iterator):
        return Captured(model, specs_of(next(x)))
    specs = specs_of(keras.utils.pack_x_y_sample_weight(x, y, weights))
    examples = batch_of(specs)
    # 32 is Keras's default.
    return Captured(model, resized(specs, min(batch_size or 32, examples)), examples=examples)


def specs_of(batch: Any) -> Any:
    """Returns the specification of a batch as Keras passes it to a step: floats have Keras's precision."""

    def spec(leaf: Any) -> tf.TensorSpec:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ConfigurationError(
                "A TPU needs data of a fixed shape.", f"a {type(leaf).__name__} in the data of `fit`",
                "Make it dense in the dataset: `to_tensor(shape=...)`, `tf.sparse.to_dense`.",
            )
        if not tf.is_tensor(leaf):
            leaf = np.asarray(leaf)
            is_float = np.issubdtype(leaf.dtype, np.floating)
            return tf.TensorSpec(leaf.shape, keras.config.floatx() if is_float else tf.as_dtype(leaf.dtype))
        return tf.TensorSpec(leaf.shape, leaf.dtype)

    return tf.nest.map_structure(spec, batch)


def batch_of(specs: Any) -> int:
    return int(tf.nest.flatten(specs)[0].shape[0])


def resized(specs: Any, size: int) -> Any:
    return tf.nest.map_structure(lambda spec: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype), specs)
