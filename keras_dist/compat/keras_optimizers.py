"""Private names of Keras's optimizers. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_dist.compat.keras_model import subclasses
from keras_dist.compat.tf_compat import patched

# The outermost optimizer whose plain `apply` is running.
_APPLYING: contextvars.ContextVar[Any] = contextvars.ContextVar("keras_dist_applying", default=None)


def applying() -> Any:
    """Returns the optimizer that is applying gradients; the outermost, if it calls others. `None` outside of one."""
    return _APPLYING.get()


def plain_apply(optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
    """Returns an optimizer's `apply` as it is now, to be called by what takes its place."""
    plain = optimizer.apply

    @functools.wraps(plain)
    def apply(*args: Any, **kwargs: Any) -> Any:
        token = _APPLYING.set(_APPLYING.get() or optimizer)
        try:
            return plain(*args, **kwargs)
        finally:
            _APPLYING.reset(token)

    return apply


def accumulators(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables in which an optimizer accumulates gradients, those that exist."""
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def updated_variables(optimizer: keras.optimizers.Optimizer, given: Sequence[Any] | None) -> list[Any]:
    """Returns the variables that an optimizer updates, given what was passed to `apply`."""
    return list(optimizer._trainable_variables if given is None else given)


def before_updates(look: Callable[[Any, Sequence[Any]], object]) -> None:
    """Passes an optimizer and the variables that it updates to `look`, from now on, unless its `apply` is replaced."""
    plain = BaseOptimizer.apply

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if applying() is None:
            variables = updated_variables(self, trainable_variables)
            look(self, variables)
            trainable_variables = None if trainable_variables is None else variables  # it may be a generator
        return plain(self, grads, trainable_variables)

    BaseOptimizer.apply = apply


@contextlib.contextmanager
def found_optimizers(find: Callable[[Any], None]) -> Iterator[None]:
    """Passes each optimizer that applies gradients to `find`, in this context.

    Neither one whose `apply` is an attribute of the object, nor one that another optimizer calls. If `find` sets such
    an attribute, it is called. Whatever holds an optimizer, its class has an `apply`.
    """
    with contextlib.ExitStack() as stack:
        for cls in subclasses(BaseOptimizer):
            if "apply" in vars(cls):
                stack.enter_context(patched(cls, apply=_finding(vars(cls)["apply"], find)))
        yield


@contextlib.contextmanager
def scaled_losses(weigh: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Passes the optimizer and each loss that a LossScaleOptimizer scales to `weigh`, and uses what it returns."""
    plain = keras.optimizers.LossScaleOptimizer.scale_loss

    def scale_loss(self: Any, loss: Any) -> Any:
        return weigh(self, plain(self, loss))

    with patched(keras.optimizers.LossScaleOptimizer, scale_loss=scale_loss):
        yield


def _finding(plain: Callable[..., Any], find: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if applying() is None:
            find(self)
            if "apply" in vars(self):
                return self.apply(*args, **kwargs)
        return plain(self, *args, **kwargs)

    return apply
