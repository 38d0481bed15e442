"""A callback that warms up the learning rate."""

from __future__ import annotations

from typing import Any

import keras

from keras_dist.errors import ConfigurationError
from keras_dist.step.optimizer import optimizers_of, variable_of


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate linearly over the first epochs, step by step, to the optimizer's rate.

    A large global batch needs a large learning rate, with which the first steps often diverge. The warm-up starts
    with the rate for one process: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    https://arxiv.org/abs/1706.02677, section 2.2.

    Step `k` (from 0) of the `n` steps in `epochs` epochs uses `start + (target - start) * k / n`. From step `n` on
    the rate is `target`, and the callback does nothing more. It starts to count at `initial_epoch`, or at the epoch
    where a resumed run ended, and continues over several calls of `fit` with the same callback object. With
    `steps_per_execution`, the rate is set once per execution.

    Args:
        epochs: float. Length of the warm-up, in epochs.
        start: float. The first rate. Default: `target / kd.num_replicas()`, so one replica has no warm-up.
        target: float. The last rate. Default: the rate that the optimizer was compiled with. Pass it if you load a
            model that was saved during a warm-up.
        steps_per_epoch: int. Steps in an epoch. Needed if `fit` gets a dataset of unknown length.

    Raises:
        ConfigurationError: If the learning rate is a schedule, or the number of steps is unknown.

    Example:

    ```python
    model = kd.distribute(model, batch="per_replica", scale_learning_rate="linear")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=256, epochs=90, callbacks=[kd.callbacks.LearningRateWarmup(epochs=5)])
    ```
    """

    def __init__(
        self,
        epochs: float = 5,
        start: float | None = None,
        target: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not epochs > 0:
            raise ConfigurationError(
                "The length of a warm-up must be positive.", f"epochs={epochs!r}", "For example epochs=5."
            )
        self.epochs = epochs
        self.start = start
        self.target = target
        self.steps_per_epoch = steps_per_epoch
        self.size = 1  # a distributed `fit` sets the number of replicas
        self._ramps: list[tuple[Any, float, float]] = []
        self._optimizers: list[Any] = []
        self._epochs_done: int | None = None
        self._is_warming = False

    def set_model(self, model: keras.Model) -> None:
        """Stores the rates, before another callback loads those of an interrupted run."""
        super().set_model(model)
        optimizers = optimizers_of(model)
        if [id(optimizer) for optimizer in optimizers] != [id(optimizer) for optimizer in self._optimizers]:
            self._optimizers = optimizers
            self._ramps = [self._ramp(optimizer) for optimizer in optimizers]
            self._epochs_done = None

    def _ramp(self, optimizer: Any) -> tuple[Any, float, float]:
        variable = variable_of(optimizer)
        if variable is None:
            raise ConfigurationError(
                "LearningRateWarmup cannot set this learning rate: it is not a number.",
                f"optimizer {optimizer.name!r} with a schedule",
                "Give the optimizer a number, or use a schedule with a warm-up: CosineDecay(..., warmup_target=..., "
                "warmup_steps=...).",
            )
        target = float(variable) if self.target is None else self.target
        return variable, target / self.size if self.start is None else self.start, target

    def on_train_begin(self, logs: Any = None) -> None:
        if self._steps() is None:
            raise ConfigurationError(
                "LearningRateWarmup needs the number of steps in an epoch.",
                "steps=None (a dataset of unknown length)",
                "Pass it: LearningRateWarmup(steps_per_epoch=...), or `steps_per_epoch` of `fit`.",
            )

    def _steps(self) -> int | None:
        return self.steps_per_epoch or self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._epochs_done is None:
            self._epochs_done = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        position = (self._epochs_done or 0) + batch / (self._steps() or 1)
        if position < self.epochs:
            self._is_warming = True
            self._set(position / self.epochs)
        elif self._is_warming or position == self.epochs:  # or a run was resumed just here
            self._is_warming = False
            self._set(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs_done = (self._epochs_done or 0) + 1

    def _set(self, fraction: float) -> None:
        for variable, start, target in self._ramps:
            if start != target:
                variable.assign(target if fraction == 1.0 else start + (target - start) * fraction)
