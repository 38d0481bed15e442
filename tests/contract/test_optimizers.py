"""Optimizers, with all options that use gradients: the same weights."""

from __future__ import annotations

from typing import Any

import keras

from tests.contract.harness import FLOAT32, FLOAT32_ADAM, FLOAT64, Numbers, contract
from tests.contract.parts import compiled, dataset, fitted, numbers

optimizers = keras.optimizers

MAKERS = {
    "sgd": lambda **options: optimizers.SGD(0.2, **options),
    "momentum": lambda **options: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: optimizers.Adam(0.01, **options),
    "adamw": lambda **options: optimizers.AdamW(0.01, weight_decay=0.1, **options),
}
# So small that every step is clipped. The weights show whether that was before or after the reduction.
CLIPS = {"clipnorm": 0.05, "global_clipnorm": 0.1, "clipvalue": 0.01}

OTHERS = {
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "nadam": lambda: optimizers.Nadam(0.01, clipnorm=0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: optimizers.Lion(0.01, weight_decay=0.1),
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "lamb": lambda: optimizers.Lamb(0.01, weight_decay=0.1),
    "muon": lambda: optimizers.Muon(0.02, exclude_layers=["dense_1"]),
    "schedule-free-adamw": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "multi-optimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(0.01, clipnorm=0.1), {".*bias": optimizers.SGD(0.1, momentum=0.9)}
        )
    ),
    "cosine-decay": lambda: optimizers.SGD(
        optimizers.schedules.CosineDecay(0.0, 6, warmup_target=0.3, warmup_steps=2)
    ),
    "learning-rate-schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.2, 2, 0.7)),
    # 8 steps, an update every 3 steps.
    "gradient-accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.05),
    "ema-overwrite": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nadam": {"covered_by": ("adam", "optimizers-found")},
    "schedule-free-adamw": {"covered_by": ("adam",), "since": "3.14"},
    "multi-optimizer": {"covered_by": ("optimizers-found",), "since": "3.15"},
    **dict.fromkeys(
        ("cosine-decay", "learning-rate-schedule"), {"covered_by": ("scale-learning-rate-schedules",)}
    ),
    "gradient-accumulation": {"sizes": (3,)},
    "ema-overwrite": {"covered_by": ("ema-overwrite-at-end",)},
}


def add_test(row: str, maker: Any, **options: Any) -> None:
    contract(row, **options)(lambda distribute: fitted(compiled(distribute, maker()), *numbers()))


def add_clipped(maker: str, clip: str | None, is_float32: bool = False) -> None:
    """How an optimizer uses a gradient is Keras's. What it does with all of them together is clipping."""
    row = "-".join(part for part in (maker, clip, "float32" if is_float32 else None) if part).replace("_", "-")
    tolerance = FLOAT64
    if is_float32:
        tolerance = FLOAT32_ADAM if maker.startswith("adam") else FLOAT32
    covered_by = () if row == "adam" else ("adam", "optimizers-found", "fit-embedding-global-clipnorm")
    options = {clip: CLIPS[clip]} if clip else {}
    add_test(
        row, lambda: MAKERS[maker](**options), tolerance=tolerance, float32=is_float32, covered_by=covered_by
    )


for maker in MAKERS:
    add_clipped(maker, None, is_float32=True)
    for clip in (None, *CLIPS):
        add_clipped(maker, clip)
for name in OTHERS:
    add_test(name, OTHERS[name], **OPTIONS.get(name, {"covered_by": ("adam",)}))


@contract("ema-overwrite-at-end")
def test_ema_overwrite_at_end(distribute: Any) -> Numbers:
    optimizer = optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)
    return fitted(compiled(distribute, optimizer), *numbers(), validation_data=numbers(9))


@contract("loss-scaling", covered_by=("loss-scaling-overflow",))
def test_loss_scaling(distribute: Any) -> Numbers:
    """The outermost optimizer is the distributed one."""
    optimizer = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=64.0)
    return fitted(compiled(distribute, optimizer), dataset())


@contract("weight-decay-excluded", covered_by=("adam",))
def test_weight_decay_excluded(distribute: Any) -> Numbers:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return fitted(compiled(distribute, optimizer), *numbers())
