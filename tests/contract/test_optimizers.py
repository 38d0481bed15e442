"""Optimizers, with all options that use gradients, schedules, loss scaling and compression: the same weights."""

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import keras_dist as kd
from keras_dist.cluster import current_backend
from keras_dist.step import optimizer as step_optimizer
from tests.contract.harness import FLOAT32, FLOAT32_ADAM, FLOAT64, Numbers, asking, contract, same
from tests.contract.parts import (
    BATCH,
    Distribute,
    Gan,
    compiled,
    compiled_functions,
    compiled_gan,
    computed,
    dataset,
    descend,
    fitted,
    mlp,
    numbers,
    some,
    stack,
    trained_on_shares,
)
from tests.contract.test_exact import draw
from tests.contract.test_training import mean_squared_error

MAKERS = {
    "sgd": lambda **options: optimizers.SGD(0.2, **options),
    "momentum": lambda **options: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: optimizers.Adam(0.01, **options),
    "adamw": lambda **options: optimizers.AdamW(0.01, weight_decay=0.1, **options),
}
# So small that every step is clipped. The weights show whether that was before or after the reduction.
CLIPS = {"clipnorm": 0.05, "global_clipnorm": 0.1, "clipvalue": 0.01}


def without_bias() -> optimizers.Optimizer:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OTHERS = {
    "weight-decay-excluded": without_bias,
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "nadam": lambda: optimizers.Nadam(0.01, clipnorm=0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: optimizers.Lion(0.01, weight_decay=0.1),
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "lamb": lambda: optimizers.Lamb(0.01, weight_decay=0.1),
    "muon": lambda: optimizers.Muon(0.02, exclude_layers=["dense_1"]),
    "schedule-free-adamw": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "multi-optimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.01, clipnorm=0.1), {".*bias": optimizers.SGD(0.1, momentum=0.9)})
    ),
    "cosine-decay": lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.0, 6, warmup_target=0.3, warmup_steps=2)),
    # 8 steps, an update every 3 steps.
    "gradient-accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.05),
    "ema-overwrite": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nadam": {"covered_by": ("adam", "optimizers-found")},
    "schedule-free-adamw": {"covered_by": ("adam",), "since": "3.14"},
    "multi-optimizer": {"covered_by": ("optimizers-found",), "since": "3.15"},
    "cosine-decay": {"covered_by": ("scale-learning-rate-schedules",)},
    "gradient-accumulation": {"sizes": (3,), "covered_by": ("gradient-accumulation-remainder", "adam")},
    "ema-overwrite": {"covered_by": ("ema-overwrite-at-end",)},
}


def add_test(row: str, maker: Any, **options: Any) -> None:
    contract(row, **options)(lambda distribute: fitted(compiled(distribute, maker()), *numbers()))


def add_clipped(maker: str, clip: str | None, is_float32: bool = False) -> None:
    """How an optimizer uses a gradient is Keras's. What it does with all of them together is clipping."""
    row = "-".join(part for part in (maker, clip, "float32" if is_float32 else None) if part).replace("_", "-")
    single = FLOAT32_ADAM if maker.startswith("adam") else FLOAT32
    covered_by = () if row == "adam" else ("adam", "optimizers-found", "fit-embedding-global-clipnorm")
    options = {clip: CLIPS[clip]} if clip else {}
    tolerance = single if is_float32 else FLOAT64
    add_test(row, lambda: MAKERS[maker](**options), tolerance=tolerance, float32=is_float32, covered_by=covered_by)


for maker in MAKERS:
    add_clipped(maker, None, is_float32=True)
    for clip in (None, *CLIPS):
        add_clipped(maker, clip)
for name in OTHERS:
    add_test(name, OTHERS[name], **OPTIONS.get(name, {"covered_by": ("adam",)}))


@contract("learning-rate-schedule", covered_by=("scale-learning-rate-schedules",))
def test_schedules(distribute: Any) -> Numbers:
    """Keras uses another rate or schedule once it traces another step: here one with weights."""
    model = compiled(distribute, optimizers.SGD(0.2))
    first, (x, y) = fitted(model, *numbers()), numbers()
    model.optimizer.learning_rate = optimizers.schedules.ExponentialDecay(0.2, 2, 0.7)
    second = fitted(model, x, y)
    model.optimizer.learning_rate = optimizers.schedules.InverseTimeDecay(0.05, 3, 0.5)
    third = fitted(model, x, y, sample_weight=np.linspace(0.5, 1.5, len(x)))
    return {"first": first, "second": second, **third}


contract("ema-overwrite-at-end")(
    lambda distribute: fitted(
        compiled(distribute, optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)), *numbers(),
        validation_data=numbers(9),
    )
)  # fmt: skip
# The outermost optimizer is the distributed one.
contract("loss-scaling", covered_by=("loss-scaling-overflow",))(
    lambda distribute: fitted(
        compiled(distribute, optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=64.0)), dataset()
    )
)


# --- Updates that XLA compiles ---

FUSED = {
    "momentum": lambda: MAKERS["momentum"](clipnorm=0.05),
    "adam": lambda: optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3),
    "adamw": without_bias,
    "muon": OTHERS["muon"],
    "accumulated": OTHERS["gradient-accumulation"],
    "scaled": lambda: optimizers.LossScaleOptimizer(FUSED["adam"](), initial_scale=64.0),
}


def fused() -> dict[str, Any]:
    return some(FUSED, "scaled")


def are_fused(results: list[Numbers], expected: Numbers, size: int) -> None:
    """All are, but those whose update has a collective inside, as each rank accumulates gradients of its own."""
    assert all(result["own_compiled"] > len(fused()) for result in results if "own_compiled" in result)


@contract("fused-update", verify=are_fused)
def test_fused_update(distribute: Distribute) -> Numbers:
    """All are large enough. One of them skips a step: its loss is infinite. A GAN's optimizers Keras doesn't build."""
    x, y = numbers()
    infinite = np.where(np.arange(len(y))[:, None] == 9, np.inf, y)
    names, result = set[str](), dict[str, Any]()
    with mock.patch.object(step_optimizer, "FUSED_FROM", (0, 0)):
        for name, maker in fused().items():
            result[name] = fitted(compiled(distribute, maker()), x, infinite if name == "scaled" else y)["weights"]
            names |= compiled_functions()
        real = numbers(32)[0]
        result["gan"] = fitted(compiled_gan(distribute(Gan())), real, real, batch_size=16)
        names |= compiled_functions()
    if kd.num_replicas() > 1 and current_backend().uses_xla:
        result["own_compiled"] = sum("fused_update" in name for name in names)
    return result


# --- Several optimizers, rates, accumulation ---


class Towers(keras.Model):
    """Trains towers, each with an optimizer that is no public attribute of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = [mlp() for _ in range(3)]
        self._private = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
        self.towers[1].compile(keras.optimizers.Adam(0.01, clipnorm=0.05))
        self.helper = types.SimpleNamespace(
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2, momentum=0.9), initial_scale=1.0)
        )

    def call(self, x: Any) -> Any:
        return sum(tower(x) for tower in self.towers)

    def optimizers_of_towers(self) -> Sequence[Any]:
        return self._private, self.towers[1].optimizer, self.helper.optimizer

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for tower, optimizer in zip(self.towers, self.optimizers_of_towers(), strict=True):
            descend(tape, loss, tower, optimizer)
        return {"loss": loss}


@contract("optimizers-found")
def test_optimizers_found(distribute: Distribute) -> Numbers:
    model = distribute(Towers())
    model.compile(loss="mse")
    for epochs in (2, 1):  # shares of one size, for TPU cores
        fitted(model, *numbers(32), batch_size=16, epochs=epochs, shuffle=False)
    assert [int(optimizer.iterations) for optimizer in model.optimizers_of_towers()] == [6, 6, 6]
    return {"weights": model.get_weights(), "scale": model.helper.optimizer.dynamic_scale}


class Lookahead(optimizers.Optimizer):
    """Holds another optimizer, whose variables Keras does not count as its own (Zhang et al., arXiv 1907.08610)."""

    def __init__(self, around: optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.0)
        self.around = around

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.around.build(variables)
        self.slow = [self.add_variable_from_reference(variable, "slow") for variable in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        self.around.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
        is_due = keras.ops.equal(self.iterations % 3, 0)
        for slow, variable in zip(self.slow, trainable_variables, strict=True):
            slow.assign(keras.ops.where(is_due, slow + 0.5 * (variable - slow), slow))
            variable.assign(keras.ops.where(is_due, slow, variable))


class Langevin(optimizers.SGD):
    """Adds noise of its own generator to each gradient (Welling and Teh, 2011)."""

    def __init__(self) -> None:
        super().__init__(0.1, momentum=0.9)
        self.generator = keras.random.SeedGenerator(5)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = keras.random.normal(variable.shape, stddev=0.1, dtype=variable.dtype, seed=self.generator)
        super().update_step(gradient + noise, variable, learning_rate)


# `make test` has it on mirrored, where each device has copies of all that an optimizer changes.
@contract("optimizer-around-another", also=("mirrored-2",), covered_by=("optimizers-found", "adam"))
def test_optimizer_around_another(distribute: Distribute) -> Numbers:
    """What the default check tries out is undone in the inner one too."""
    optimizer = Lookahead(Langevin())
    results = fitted(compiled(distribute, optimizer), *numbers(32), batch_size=16, epochs=2, shuffle=False)
    state = [variable.numpy() for part in (optimizer, optimizer.around) for variable in part.variables]
    return {**results, "state": [*state, optimizer.around.generator.state.numpy()]}


@contract(
    "optimizer-unknown-length", also=("mirrored-2",), covered_by=("data-generator", "adam"),
    of=("serial", "horovod", "multi_worker", "mirrored", "central_storage", "parameter_server"),
)  # fmt: skip
def test_optimizer_unknown_length(distribute: Distribute) -> Numbers:
    """Plain Keras counts a step more in each epoch, unless XLA compiles the step as on TPUs. Adam uses the count.

    It decays the weights and draws once more too: numbers for Dropout, and for noise in evaluations. Of batches of a
    static size it also counts once more in the average of the losses, which nobody wants. While gradients are
    accumulated, a schedule delays the count, and what was accumulated may be dropped. Nadam's product of momenta, which
    needs no gradients, gets one more factor.
    """
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.3)
    noise = draw(lambda x, seed: keras.random.normal(keras.ops.shape(x), seed=seed), 2, always=True)
    model = stack(layers.Dense(8), layers.Dropout(0.5, seed=1), noise, layers.Dense(1))
    model = compiled(asking(distribute, exact=True), optimizer, model=model)
    data = tf.data.Dataset.from_tensor_slices(numbers(40)).filter(lambda x, y: True)
    results = fitted(model, data.batch(8), epochs=3, validation_data=data.batch(8))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.8)
    model.compile(keras.optimizers.SGD(rate, weight_decay=0.3, gradient_accumulation_steps=3), "mse")
    fixed = fitted(model, data.batch(8, drop_remainder=True))
    states = [part.state.numpy() for part in (model.layers[1].seed_generator, noise.generator)]
    model.compile(keras.optimizers.Nadam(0.01), "mse")
    nadam = fitted(model, data.batch(8), epochs=3)
    states += [variable.numpy() for variable in model.optimizer.variables]
    return {"dynamic": results, "weights": fixed["weights"], "steps": optimizer.iterations.numpy(), "states": states,
            "nadam": nadam}  # fmt: skip


@contract("gradient-accumulation-remainder", sizes=(3,))
def test_gradient_accumulation_remainder(distribute: Distribute) -> Numbers:
    """Updates come after 3 and 6 of 7 steps: one gradient is left after the first and the second `fit`."""
    x, y = numbers(16)
    model = compiled(distribute, keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=3))
    batches = keras.callbacks.ModelCheckpoint("batch.keras", save_freq=2)
    epochs = keras.callbacks.ModelCheckpoint("epoch{epoch}.weights.h5", save_weights_only=True)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=2, callbacks=[epochs, batches], **options)
    model.save("all.keras")
    model.fit(x, y, callbacks=[epochs], **options)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    files = {name: keras.models.load_model(f"{name}.keras").optimizer.variables for name in ("batch", "all")}

    def resumed() -> list[Any]:
        model = distribute(keras.models.load_model("all.keras"))
        model.fit(x, y, **options)
        model.load_weights("epoch1.weights.h5")
        model.fit(x, y, **options)
        return list(model.get_weights())

    return {"weights": model.get_weights(), **files, **computed({"resumed": resumed})}


def one_reduction_per_update(results: list[Numbers], plain: Numbers, size: int) -> None:
    if len(results) == size > 1:  # replicas of one process share the accumulators, and reduce in each step
        assert [result["own_reductions"] for result in results] == [2] * len(results)


@contract(
    "gradient-accumulation-reductions", sizes=(3,), verify=one_reduction_per_update,
    covered_by=("gradient-accumulation-remainder",),
)  # fmt: skip
def test_gradient_accumulation_reductions(distribute: Distribute) -> Numbers:
    from keras_dist.api import current_backend

    count = tf.Variable(0)
    backend = current_backend()
    plain = backend.all_reduce

    def counting(*args: Any) -> Any:
        count.assign_add(1)
        return plain(*args)

    backend.all_reduce = counting  # type: ignore[method-assign]
    try:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        result = fitted(compiled(distribute, optimizer), *numbers())
    finally:
        del backend.all_reduce
    return {**result, "own_reductions": int(count.numpy()) if kd.size() > 1 else 0}


@contract("loss-scaling-overflow", sizes=(3,))
def test_loss_scaling_overflow(distribute: Distribute) -> Numbers:
    """One example, in one rank's share, has an infinite loss: all ranks skip that update and halve the scale."""
    x, y = numbers()
    y[9] = np.inf
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)
    model = compiled(distribute, optimizer)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    weights = model.get_weights()
    assert all(np.isfinite(weight).all() for weight in weights)
    assert (float(optimizer.dynamic_scale), int(optimizer.iterations), int(optimizer.step_counter)) == (32.0, 3, 2)
    return {"weights": weights}


@contract(
    "fit-mixed-float16-overflow", float32=True, tolerance=FLOAT32, sizes=(4,),
    covered_by=("loss-scaling-overflow", "fit-mixed-bfloat16"),
)  # fmt: skip
def test_mixed_float16_overflow(distribute: Distribute) -> Numbers:
    """Of a batch of 8 the scaled gradient of an output is `2 * 6 / 8 * 2**15`, of a share of 4 above 65504."""
    keras.config.set_dtype_policy("mixed_float16")
    x = 0.1 * numbers(24)[0]
    y = np.where(np.arange(24) % 2, 6.0, -6.0).astype("float32")[:, None]
    model = compiled(distribute, keras.optimizers.SGD(1e-4), model=stack(keras.layers.Dense(1)))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    optimizer = model.optimizer
    assert (float(optimizer.dynamic_scale), int(optimizer.iterations)) == (2.0**15, 3)
    return {"weights": model.get_weights()}


# --- Compression ---

EPOCHS = 4


def over_wire(compression: str, model: keras.Model, distribute: Distribute) -> keras.Model:
    """Distributes a model with compressed gradients."""
    from keras_dist.api import current_backend
    from keras_dist.training.options import Options

    if kd.size() == 1:
        return distribute(model)
    backend = copy.copy(current_backend())
    collectives = copy.copy(backend._collectives)  # type: ignore[attr-defined]
    collectives._way = f"sum_{compression}"
    backend._collectives = collectives  # type: ignore[attr-defined]
    backend._options = {**backend.options(), "compression": compression}  # type: ignore[attr-defined]
    backend.distribute(model, Options())
    return model


def compressed_of_shares(compression: str, size: int) -> Numbers:
    """Rounds each share's weighted gradient, and their sum."""
    uncompressed = fitted(compiled(same), *numbers(), shuffle=False, epochs=EPOCHS)["weights"]
    keras.utils.set_random_seed(0)
    wire = {"fp16": tf.float16, "bf16": tf.bfloat16}[compression] if size > 1 else None
    result = trained_on_shares(compiled(same), mean_squared_error, numbers(), size, EPOCHS, wire=wire)
    return {**result, "own_uncompressed": uncompressed}


def add_compression(compression: str, difference: float) -> None:
    def verify(results: list[Numbers], golden: Numbers, size: int) -> None:
        pairs = zip(results[0]["weights"], golden["own_uncompressed"], strict=True)
        measured = max(np.abs(ours - plain).max() for ours, plain in pairs)
        assert (measured > 0) == (size > 1)
        assert measured < difference

    def over(distribute: Distribute) -> Numbers:
        """Equals one process that rounds the same shares' gradients."""
        model = over_wire(compression, mlp(), distribute)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return {"weights": fitted(model, *numbers(), shuffle=False, epochs=EPOCHS)["weights"]}

    contract(
        f"compression-{compression}", reference=functools.partial(compressed_of_shares, compression), verify=verify,
        of=("serial", "horovod"), covered_by=() if compression == "fp16" else ("compression-fp16",),
    )(lambda distribute: over(distribute))  # fmt: skip


add_compression("fp16", 1e-3)
add_compression("bf16", 1e-2)
