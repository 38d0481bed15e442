"""A `fit` that ends by an error and resumes from its commits, against one that nobody has disturbed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_dist as kd
from tests.contract.harness import FLOAT32_ADAM, Numbers, contract, same
from tests.contract.parts import FEATURES, compiled, examples, fitted, numbers
from tests.contract.test_sources import Batches


class Crash(Exception):
    pass


class Crashing(keras.callbacks.Callback):
    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


def interrupted(distribute: Any, crashes: tuple[int, ...], fit: Callable[[list[Any]], Numbers]) -> Numbers:
    """Returns what `fit` returns, in one process at once, else after crashes."""
    keras.utils.set_random_seed(3)
    if distribute is same:
        return fit([])
    for number, batches in enumerate(crashes):
        with contextlib.suppress(Crash):
            fit([kd.callbacks.Commit("commits", every=(1, "epoch", 2)[number]), Crashing(batches)])
            raise AssertionError("fit has ended before the crash")
        keras.utils.set_random_seed(3)
    return fit([kd.callbacks.Commit("commits", every=2)])


@contract("commit", tolerance=FLOAT32_ADAM, covered_by=("commit-pydataset", "commit-stopped-early"))
def test_commit(distribute: Any) -> Numbers:
    def fit(callbacks: list[Any]) -> Numbers:
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05)
        model = compiled(distribute, keras.optimizers.Adam(0.05), metrics=["mae"])
        x, y = numbers()
        return fitted(model, x, y, epochs=4, validation_data=(x[:9], y[:9]), callbacks=[plateau, *callbacks])

    return interrupted(distribute, (2, 6, 4), fit)


contract("commit-repeated-dataset", covered_by=("commit-pydataset",))(
    lambda distribute: interrupted(
        distribute, (5,),
        lambda callbacks: fitted(
            compiled(distribute, keras.optimizers.SGD(0.1, momentum=0.9), metrics=["mae"]),
            examples(24).shuffle(24, seed=5).repeat().batch(8), epochs=4, steps_per_epoch=2, callbacks=callbacks,
        ),
    )
)  # fmt: skip
contract("commit-shuffled-dataset", covered_by=("commit-pydataset",))(
    lambda distribute: interrupted(
        distribute, (5, 4),
        lambda callbacks: fitted(
            compiled(distribute),
            examples(24).shuffle(24, seed=5).map(lambda x, y: (2 * x, y)).batch(8).prefetch(1),
            epochs=4, callbacks=callbacks,
        ),
    )
)  # fmt: skip


@contract("commit-callbacks", tolerance=FLOAT32_ADAM, covered_by=("commit-pydataset", "commit-stopped-early"))
def test_commit_callbacks(distribute: Any) -> Numbers:
    """Callbacks that act when an epoch begins do so once, also for an epoch that is interrupted."""

    def fit(callbacks: list[Any]) -> Numbers:
        lower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate)
        warmup = kd.callbacks.LearningRateWarmup(epochs=2.5, start=0.01)
        return fitted(compiled(distribute), *numbers(), epochs=4, callbacks=[lower, warmup, *callbacks])

    return interrupted(distribute, (6, 3), fit)


class Shuffling(Batches):
    """Has a state of its own: an order and a generator of noise."""

    def __init__(self) -> None:
        super().__init__(numbers(24))
        self.order, self.noise = np.arange(24), np.random.default_rng(4)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[8 * index : 8 * index + 8]
        return self.x[rows] + 0.1 * self.noise.normal(size=(8, FEATURES)), self.y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


contract("commit-pydataset")(
    lambda distribute: interrupted(
        distribute, (4, 3),
        lambda callbacks: fitted(compiled(distribute), Shuffling(), epochs=4, shuffle=False, callbacks=callbacks),
    )
)  # fmt: skip


@contract("commit-stopped-early", also=("serial-1", "mirrored-2", "parameter_server-2"))
def test_commit_stopped_early(distribute: Any) -> Numbers:
    def fit(callbacks: list[Any]) -> Numbers:
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)
        return fitted(compiled(distribute), *numbers(), epochs=5, callbacks=[stopping, *callbacks])

    result = interrupted(distribute, (3,), fit)
    assert len(result["history"]["loss"]) == 2
    return result
