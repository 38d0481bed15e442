"""What a commit costs: how long it holds up the training, over the time of `model.save`, for a model of 100 MB.

    python benchmarks/commit_stall.py            # some minutes on two idle cores
    python benchmarks/commit_stall.py --rounds 2 # shows only that it works

In each round the same process commits and saves, in turns, to the same disk. The stall is the time from the end of a
batch to the beginning of the next one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

UNITS, FEATURES, BATCH, STEPS = 2890, 2890, 32, 4  # of three layers: 100 MB of float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of one commit and one save (10)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="commit-stall-") as folder:
        stalls, saves = measured(Path(folder), rounds)
    ratios = sorted(stall / save for stall, save in zip(stalls, saves, strict=True))
    print(f"model.save: {statistics.median(saves):.2f} s, a commit stalls: {statistics.median(stalls):.2f} s")
    print(f"ratio: {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; goal: at most 0.2")


def measured(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each stall by a commit, and of each `model.save`."""
    import keras
    import numpy as np

    import keras_dist as kd

    class Stalls(keras.callbacks.Callback):
        """Measures the time between two batches. The longest one of a round is the one with the commit."""

        def __init__(self) -> None:
            super().__init__()
            self.ended, self.seconds = 0.0, [0.0]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ended = time.perf_counter()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.ended:
                self.seconds.append(time.perf_counter() - self.ended)

    kd.init()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH * STEPS, FEATURES)).astype("float32")
    y = random.normal(size=(BATCH * STEPS, 1)).astype("float32")
    layers = [keras.layers.Dense(UNITS, "relu") for _ in range(3)]
    model = kd.distribute(keras.Sequential([keras.Input([FEATURES]), *layers, keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    stalls, saves = [], []
    for number in range(rounds):
        between = Stalls()
        commit = kd.callbacks.Commit(folder / f"commits-{number}", every=STEPS // 2, keep=1)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[commit, between])
        stalls.append(max(between.seconds))
        began = time.perf_counter()
        model.save(folder / "model.keras")
        saves.append(time.perf_counter() - began)
    return stalls, saves


if __name__ == "__main__":
    main()
