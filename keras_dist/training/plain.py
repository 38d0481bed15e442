"""A model on one device. Keras trains it as it is; only a `fit` that commits or puts steps together does more."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit
from keras_dist.compat.keras_model import attach
from keras_dist.step.optimizer import optimizers_of
from keras_dist.training.call import Call
from keras_dist.training.fitting import Fitting
from keras_dist.training.options import Options

_AUTO = "_keras_dist_auto_executions"
# The models that `kd.distribute` got. They themselves stay as they are.
_backends: MutableMapping[keras.Model, Backend] = weakref.WeakKeyDictionary()


def extend_fit_of(model: keras.Model, backend: Backend, options: Options) -> None:
    """Lets `fit` of a model commit and go on, if it has a `Commit`, and put steps together, if an option says so.

    Args:
        model: The user's model.
        backend: A backend with one replica.
        options: The options of `kd.distribute`.
    """
    _backends[model] = backend
    if not hasattr(model, _AUTO) and (auto := options.automatic_executions(model, backend)) is not None:
        attach(model, _AUTO, auto)
    keras_fit.wrap_fit(_fit)


def _fit(model: keras.Model, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call("fit", types.MethodType(plain, model), args, kwargs)
    if (backend := _backends.get(model)) is None:
        return call()
    fitting = Fitting(model, backend, lambda: optimizers_of(model), getattr(model, _AUTO, None))
    with fitting.fit():
        given = call.get("callbacks")
        if (arranged := fitting.arrange(given, given)) is given:
            return call()
        call.set("callbacks", arranged)
        call.change("x", fitting.ordered)
        with keras_fit.epoch_iterators(lambda made: _watch(fitting, made)):
            return call()


def _watch(fitting: Fitting, epoch_iterator: Any) -> None:
    """Without a strategy Keras iterates over the dataset itself."""
    fitting.watch(epoch_iterator, keras_fit.distributed_dataset(epoch_iterator), lambda rest: rest)
