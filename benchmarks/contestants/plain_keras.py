"""`model.fit` of Keras, in one process."""

import time
from collections.abc import Callable
from typing import Any

import models

from contestants import BATCH, Case


def build(case: Case) -> Callable[[], tuple[float, float]]:
    return fitted(models.keras_model(case.model), case, case.batch or BATCH)


def compiled(model: Any, case: Case) -> Any:
    model.compile(
        models.keras_optimizer(case.optimizer),
        models.keras_loss(),
        metrics=["accuracy"],
        steps_per_execution=case.steps_per_execution,
        jit_compile=case.jit_compile,
    )
    return model


def fitted(model: Any, case: Case, batch: int, timed: str = "steps") -> Callable[[], tuple[float, float]]:
    """Returns a function that trains a model by `fit`. The times are those of its steps, or of the `"whole"` call."""
    data, times = models.batches(case.model, batch), list[float]()
    compiled(model, case)

    def run() -> tuple[float, float]:
        times.clear()
        start = time.perf_counter()
        history = model.fit(data, steps_per_epoch=case.steps, verbose=0)
        if timed == "whole":
            seconds = (time.perf_counter() - start) * case.executions / (case.executions + 1)
            return seconds, history.history["loss"][0]
        if not times:  # that was the first one, which traces
            model.train_function = _clocked(model.train_function, times)
            return 0.0, history.history["loss"][0]
        return times[-1] - times[0], history.history["loss"][0]

    return run


def _clocked(function: Callable[[Any], Any], times: list[float]) -> Callable[[Any], Any]:
    """Not a callback: the ranks synchronize after each batch if a callback has a hook there."""

    def clocked(iterator: Any) -> Any:
        outputs = function(iterator)
        times.append(time.perf_counter())
        return outputs

    return clocked
