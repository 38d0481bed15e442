"""A plugin of pytest that runs Keras's own tests with every model distributed over two replicas of this process."""

import functools
import importlib
import sys
import types
from typing import Any
from unittest import mock

import pytest

DEVICES = ["CPU:0", "CPU:1"]
TRAINER_TEST = "keras.src.trainers.trainer_test"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("mirrored", "central_storage"), required=True)


def pytest_configure(config: pytest.Config) -> None:
    import keras
    from keras.src.backend.tensorflow import trainer as tensorflow_trainer
    from keras.src.trainers import trainer

    import keras_dist as kd

    engine = config.getoption("--engine")
    kd.init(kd.Mirrored(devices=DEVICES) if engine == "mirrored" else kd.CentralStorage(compute_devices=DEVICES))
    plain = tensorflow_trainer.TensorFlowTrainer
    _distribute_in(trainer.Trainer, "compile", kd.distribute, keras.Model)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        _distribute_in(plain, name, kd.distribute, keras.Model)
    # `trainer_test.py` imports JAX, even if Keras runs on TensorFlow, and makes models of a trainer and a layer. Other
    # files import a function of Keras's repository.
    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = lambda backend, reason: pytest.mark.skipif(backend == "tensorflow", reason=reason)
    sys.modules["conftest"] = conftest
    with (
        mock.patch.dict(sys.modules, {"jax": types.ModuleType("jax")}),
        mock.patch.object(tensorflow_trainer, "TensorFlowTrainer", _trainer_that_is_a_model(keras.Model, plain)),
    ):
        importlib.import_module(TRAINER_TEST)
        own = sys.modules[TRAINER_TEST]
    sys.modules[TRAINER_TEST] = own  # `patch.dict` has removed it


def _distribute_in(owner: type, name: str, distribute: Any, model_class: type) -> None:
    """Makes a method distribute a model before its first call."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, model_class) and getattr(self, "_keras_dist", None) is None:
            distribute(self)
            if getattr(type(self), name) is method:  # else a subclass calls this by `super()`
                return getattr(self, name)(*args, **kwargs)
        return plain(self, *args, **kwargs)

    setattr(owner, name, method)


def _trainer_that_is_a_model(model_class: Any, plain: Any) -> type:
    """Returns a class for `class Example(Trainer, Dense)` by which these are models, as `kd.distribute` asks for."""

    class Trainer(model_class):  # type: ignore[misc]
        def __init__(self) -> None:
            plain.__init__(self)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            for name in ("call", "build"):  # of the layer, not of `keras.Model`
                owner = next(base for base in cls.__mro__ if name in vars(base) and base is not model_class)
                setattr(cls, name, vars(owner)[name])

    return Trainer
