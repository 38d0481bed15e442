"""A model on one device. Keras trains it as it is; only a `fit` with a `kd.callbacks.Commit` does more."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit
from keras_dist.step.optimizer import optimizers_of
from keras_dist.training.call import Call
from keras_dist.training.resuming import Resuming

# The models that `kd.distribute` got. They themselves stay as they are.
_backends: MutableMapping[keras.Model, Backend] = weakref.WeakKeyDictionary()


def resume_fit_of(model: keras.Model, backend: Backend) -> None:
    """Lets `fit` of a model commit and go on, if it has a `Commit`. A second call does nothing.

    Args:
        model: The user's model.
        backend: A backend with one replica.
    """
    _backends[model] = backend
    keras_fit.wrap_fit(_fit)


def _fit(model: keras.Model, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call("fit", types.MethodType(plain, model), args, kwargs)
    if (backend := _backends.get(model)) is None:
        return call()
    resuming = Resuming(model, backend, lambda: optimizers_of(model))
    with resuming.fit():
        given = call.get("callbacks")
        if (arranged := resuming.arrange(given, given)) is given:
            return call()
        call.set("callbacks", arranged)
        call.change("x", resuming.ordered)
        with keras_fit.epoch_iterators(lambda made: _watch(resuming, made)):
            return call()


def _watch(resuming: Resuming, epoch_iterator: Any) -> None:
    """Without a strategy Keras iterates over the dataset itself."""
    resuming.watch(epoch_iterator, keras_fit.distributed_dataset(epoch_iterator), lambda rest: rest)
