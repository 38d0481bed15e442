"""What mirrored costs on a GPU: ResNet50 on 32 images of 64 x 64 with Adam, on the whole card and on two halves of it.

    python benchmarks/gpu.py    # some ten minutes on one idle GPU, of which 4 processes take `--memory` each

All without and with XLA, each in a process of its own, one of which computes at a time. The halves are logical devices
that share the card's cores: they show what mirrored costs, not what a second GPU brings. Before it is timed, each
trains for a few steps in float64 with exact=True: if the weights are not those of plain Keras, the exit code is 1.
"""

import contextlib
import os
import random
import sys
from typing import Any

import contestants
import models
import report
from contestants import ADAM, Case
from models import RESNET
from processes import Processes
from runner import ROUND_SECONDS, parsed, parser_of, progress, save, where

DEVICE = "GPU"
PLAIN, HALVES = "plain Keras", {f"mirrored on two halves, {way}": way for way in ("reduce_to_one", "hierarchical_copy")}
NAMES = (PLAIN, "mirrored on the whole card", *HALVES)
BATCH, STEPS, CHECKED_STEPS, ALIKE = 32, 20, 3, 1e-9


def main() -> int:
    parser = parser_of(__doc__, "runs/gpu")
    parser.add_argument("--memory", type=int, default=8192, help="MiB for each process (default: %(default)s)")
    args = parsed(parser)
    card, load, comparisons, worst = name_of_gpu(), os.getloadavg()[0], list[report.Comparison](), 0.0
    lines = ["| | ms a step | over plain Keras | weights differ by |", "|---|:---:|:---:|:---:|"]
    for jit in (False, True):
        with progress(f"jit_compile={jit}"):
            times, differences = measured(jit, 1 if args.quick else STEPS, args.rounds, args.memory)
        worst = max(worst, *differences.values())
        for name, seconds in times.items():
            comparisons.append(report.Comparison(f"jit_compile={jit}", name, seconds, times[PLAIN]))
            intervals = map(report.interval, ([1000 * each for each in seconds], comparisons[-1].ratios))
            texts = [f"{median:.4g} ({low:.4g} to {high:.4g})" for median, low, high in intervals]
            lines.append(f"| {', XLA'.join([name] + [''] * jit)} | {' | '.join(texts)} | {differences[name]:.1e} |")
        save(comparisons, load, args.output)
    text = "\n".join([*lines, "", f"{card}. {where(load)}"])
    (args.output / "table.md").write_text(text + "\n")
    print(text)
    return int(worst > ALIKE)


def name_of_gpu() -> str:
    import tensorflow as tf

    if found := tf.config.list_physical_devices(DEVICE):
        return str(tf.config.experimental.get_device_details(found[0]).get("device_name"))
    devices = ", ".join(device.name for device in tf.config.list_physical_devices())
    return sys.exit(
        f"This benchmark needs a GPU, and TensorFlow sees none.\n  Received: {devices}\n  Remedy: run it where "
        "`nvidia-smi` shows a GPU, after python -m pip install '.[gpu]'; look at CUDA_VISIBLE_DEVICES."
    )


def measured(jit: bool, steps: int, rounds: int, memory: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns by contestant the seconds of a step in each round, and how far its weights are from plain Keras's."""
    import gpu  # not `__main__`: so the processes find it

    case, order = Case(RESNET, 1, steps, BATCH, ADAM, jit), random.Random(0)
    files = {name: "plain_keras" if name == PLAIN else "ours" for name in NAMES}
    environ, times = {**os.environ, "MEMORY": str(memory)}, {name: list[float]() for name in NAMES}
    with contextlib.ExitStack() as stack:
        run = {name: stack.enter_context(Processes([{**environ, "CONTESTANT": name}], "gpu")).run for name in NAMES}
        weights = {name: run[name](gpu.trained, jit, timeout=ROUND_SECONDS)[0] for name in NAMES}
        for name in NAMES:
            run[name](contestants.build, files[name], case, timeout=ROUND_SECONDS)
        for name in (name for _ in range(rounds) for name in order.sample(NAMES, len(NAMES))):
            ((seconds, _),) = run[name](contestants.time_round, files[name], case, timeout=ROUND_SECONDS)
            times[name].append(seconds / steps)
    pairs = {name: zip(weights[name], weights[PLAIN], strict=True) for name in NAMES}
    return times, {name: max(float(abs(one - other).max()) for one, other in pairs[name]) for name in NAMES}


def start() -> None:
    """Gives this process of a contestant its part of the card, divides it, and calls `kd.init`."""
    import tensorflow as tf

    import keras_dist as kd

    name, card = os.environ["CONTESTANT"], tf.config.list_physical_devices(DEVICE)[0]
    parts = 2 if name in HALVES else 1
    part = tf.config.LogicalDeviceConfiguration(memory_limit=int(os.environ["MEMORY"]) // parts)
    tf.config.set_visible_devices(card, DEVICE)
    tf.config.set_logical_device_configuration(card, [part] * parts)
    if name != PLAIN:
        devices = [f"{DEVICE}:{index}" for index in range(parts)]
        kd.init(kd.Mirrored(devices=devices, all_reduce=HALVES.get(name, "auto")))


def trained(jit: bool) -> list[Any]:
    """Returns the weights after a few steps."""
    import keras

    import keras_dist as kd

    for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_type("float64")
    model = models.keras_model(RESNET)
    model = model if os.environ["CONTESTANT"] == PLAIN else kd.distribute(model, exact=True)
    model.compile(keras.optimizers.Adam(1e-3), models.keras_loss(), jit_compile=jit)
    model.fit(models.batches(RESNET, BATCH), steps_per_epoch=CHECKED_STEPS, verbose=0)
    for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_type("float32")
    return list(model.get_weights())


if __name__ == "__main__":
    sys.exit(main())
