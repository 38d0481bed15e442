"""Optimizers, with all options that use gradients: the same weights."""

from __future__ import annotations

from typing import Any

import keras

from tests.contract.harness import FLOAT32, FLOAT32_ADAM, FLOAT64, Numbers, contract
from tests.contract.parts import compiled, dataset, fitted, float64, numbers

MAKERS = {
    "sgd": lambda **options: keras.optimizers.SGD(0.2, **options),
    "momentum": lambda **options: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: keras.optimizers.Adam(0.01, **options),
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, weight_decay=0.1, **options),
}
# So small that every step is clipped. The weights show whether that was before or after the reduction.
CLIPS = {"clipnorm": 0.05, "global_clipnorm": 0.1, "clipvalue": 0.01}


def add_test(maker: str, clip: str | None, is_float32: bool = False) -> None:
    """Adds the test of one optimizer to this module."""
    options = {clip: CLIPS[clip]} if clip else {}
    row = "-".join(part for part in (maker, clip, "float32" if is_float32 else None) if part).replace("_", "-")

    def case(distribute: Any) -> Numbers:
        if not is_float32:
            float64()
        return fitted(compiled(distribute, MAKERS[maker](**options)), *numbers())

    case.__name__ = f"test_{row.replace('-', '_')}"
    tolerance = FLOAT64
    if is_float32:
        tolerance = FLOAT32_ADAM if maker.startswith("adam") else FLOAT32
    # How an optimizer uses a gradient is Keras's. What it does with all of them together is clipping.
    covered_by = () if row == "adam" else ("adam", "optimizers-found", "fit-embedding-global-clipnorm")
    globals()[case.__name__] = contract(row, tolerance=tolerance, covered_by=covered_by)(case)


for maker in MAKERS:
    add_test(maker, None, is_float32=True)
    for clip in (None, *CLIPS):
        add_test(maker, clip)


@contract("learning-rate-schedule", covered_by=("scale-learning-rate-schedules",))
def test_learning_rate_schedule(distribute: Any) -> Numbers:
    float64()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.7)
    return fitted(compiled(distribute, keras.optimizers.SGD(schedule)), *numbers())


@contract("gradient-accumulation", sizes=(3,))
def test_gradient_accumulation(distribute: Any) -> Numbers:
    """8 steps, an update every 3 steps."""
    float64()
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.05)
    return fitted(compiled(distribute, optimizer), *numbers())


@contract("ema-overwrite", covered_by=("ema-overwrite-at-end",))
def test_ema_overwrite(distribute: Any) -> Numbers:
    float64()
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)
    return fitted(compiled(distribute, optimizer), *numbers())


@contract("ema-overwrite-at-end")
def test_ema_overwrite_at_end(distribute: Any) -> Numbers:
    float64()
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)
    return fitted(compiled(distribute, optimizer), *numbers(), validation_data=numbers(9))


@contract("loss-scaling", covered_by=("loss-scaling-overflow",))
def test_loss_scaling(distribute: Any) -> Numbers:
    """The outermost optimizer is the distributed one."""
    float64()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)
    return fitted(compiled(distribute, optimizer), dataset())
