"""How long it takes until a script has made its first step, beside the same script without keras_dist.

    python benchmarks/start_up.py            # about 10 minutes on two idle cores
    python benchmarks/start_up.py --quick    # shows only that it works

The script is plain Keras. The contestants are `python train.py`, and `keras-dist run` of it with the two lines of
keras_dist, on one and on two processes, pinned to one core each. In each round all take their turn in a random order.
The time is that from the start of the command to the end of the first step on the last rank. `keras-dist --help` is
timed beside `python -c pass`, in seconds too, because its goal is in seconds.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import report
from report import Comparison
from runner import ONE_THREAD, ROOT, parsed, parser_of, pick_cores, progress, save

PAGE = ROOT / "docs" / "benchmarks.md"
GOAL = 1.15
TRAIN = """
import sys, time
import keras, numpy as np
{init}
model = keras.Sequential([keras.Input([28, 28, 1]), keras.layers.Conv2D(32, 3, activation="relu"),
                          keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dense(10)])
{distribute}
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
x, y = np.random.default_rng(0).normal(size=(512, 28, 28, 1)).astype("float32"), np.arange(512) % 10
model.fit(x, y, batch_size=128, steps_per_epoch=1, verbose=0)
open(sys.argv[1] + {rank}, "w").write(str(time.time()))
"""
PLAIN = TRAIN.format(init="", distribute="", rank="'0'")
OURS = TRAIN.format(
    init="import keras_dist as kd\nkd.init()", distribute="model = kd.distribute(model)", rank="str(kd.rank())"
)
RUN = [sys.executable, "-m", "keras_dist", "run", "--backend", "horovod", "-np"]
HELP, NOTHING = [sys.executable, "-m", "keras_dist", "--help"], [sys.executable, "-c", "pass"]


def main() -> int:
    args = parse()
    if not args.render:
        pick_cores(2)
        load = os.getloadavg()[0]
        os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs
        save(measured(args.rounds), load, args.output)
    comparisons, where = report.load(args.output)
    text = f"{report.table(comparisons)}\n\n{where}"
    print(text)
    if args.docs:
        PAGE.write_text(report.replaced(PAGE.read_text(), text, *report.markers("start-up")))
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "runs/start_up")
    args = parsed(parser)
    if args.docs and args.quick:
        parser.error("--docs needs the whole run: no --quick.")
    return args


def measured(rounds: int) -> list[Comparison]:
    with tempfile.TemporaryDirectory(prefix="keras_dist-start-") as folder:
        plain, ours = Path(folder, "plain.py"), Path(folder, "ours.py")
        plain.write_text(PLAIN)
        ours.write_text(OURS)
        rivals = {
            "plain": [sys.executable, str(plain)],
            "one": [*RUN, "1", str(ours)],
            "two": [*RUN, "2", str(ours)],
        }
        times = {name: list[float]() for name in (*rivals, "help", "nothing")}
        order = random.Random(0)
        for round_ in range(rounds + 1):  # the first one fills the caches of files
            with progress(f"round {round_} of {rounds}"):
                for name in order.sample(sorted(rivals), len(rivals)):
                    times[name].append(first_step(rivals[name], Path(folder, f"{name}-{round_}-")))
                times["help"].append(duration(HELP))
                times["nothing"].append(duration(NOTHING))
    times = {name: each[1:] for name, each in times.items()}
    command = f"keras-dist --help over python -c pass ({statistics.median(times['help']):.2f} s here)"
    return [
        Comparison("To the first step, over plain Keras", "1 process", times["one"], times["plain"], GOAL),
        Comparison("To the first step, over plain Keras", "2 processes", times["two"], times["plain"], GOAL),
        Comparison("The command", command, times["help"], times["nothing"], None),
    ]


def first_step(command: Sequence[str], output: Path) -> float:
    """Returns the seconds from the start of a command to the end of the first step of its last rank."""
    start = time.time()
    subprocess.run([*command, str(output)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return max(float(each.read_text()) for each in output.parent.glob(f"{output.name}*")) - start


def duration(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
