"""What a step on a share needs to know of the whole batch: what its losses are divided by, and its statistics."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_losses
from keras_dist.step import batch_statistics, losses
from keras_dist.step import step as step_module


@contextlib.contextmanager
def whole_batch(backend: Backend, model: keras.Model | None = None) -> Iterator[None]:
    """While this is entered losses and statistics of a share are those of the global batch.

    Args:
        backend: How the replicas talk.
        model: The model whose step is run, `None` in a loop of the user's own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_losses.rescaled_losses(functools.partial(losses.rescale, backend.all_reduce_exact)))
        stack.enter_context(keras_losses.batch_statistics(functools.partial(batch_statistics.summed, backend)))
        if model is not None:
            stack.enter_context(keras_losses.weighted_output_losses(model, _part))
        yield


def _part() -> Any:
    step = step_module.current()
    return None if step is None else step.part
