"""What a commit costs a model of 100 MB: how long it holds up the training, and how much time it takes from it in all.

    python benchmarks/commit_stall.py            # some minutes on two idle cores
    python benchmarks/commit_stall.py --rounds 2 # shows only that it works

In each round the same process trains with and without a commit, and saves the model, to the same disk. The stall is
how much longer the pause between two batches is in which a commit is made. The time in all is how much longer all steps
take from there until the commit is on the disk, and some more: its writer takes a core from them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

UNITS, FEATURES, BATCH = 2890, 2890, 32  # of three layers: 100 MB of float32
STEPS = 40  # the commit at the beginning is on the disk before the one after half of them is made
ROW = "{:>22} {:>9.0f} ms, quartiles {:.0f} to {:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="of one commit and one save (12)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="commit-stall-") as folder:
        stalls, totals, saves = (sorted(column) for column in zip(*measured(Path(folder), rounds), strict=True))
    for name, column in (("model.save", saves), ("stall by a commit", stalls), ("in all", totals)):
        low, median, high = statistics.quantiles(column, n=4)
        print(ROW.format(name, 1000 * median, 1000 * low, 1000 * high))
    ratio = statistics.median(stalls) / statistics.median(saves)
    print(f"stall / model.save: {ratio:.2f} (goal: at most 0.20)")
    print(f'with every="60s": {statistics.median(totals) / 60:.2%} of the time (goal: at most 1 %)')


def measured(folder: Path, rounds: int) -> list[tuple[float, float, float]]:
    """Returns the seconds of a stall by a commit, of what a commit costs in all, and of `model.save`, of each round."""
    import keras
    import numpy as np

    import keras_dist as kd

    class Steps(keras.callbacks.Callback):
        """Notes when each batch begins and ends."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.began: list[float] = []
            self.ended: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ended.append(time.perf_counter())

        def pause(self) -> float:
            """Returns the seconds between the halves, in which the commit is made."""
            return self.began[STEPS // 2] - self.ended[STEPS // 2 - 1]

        def second_half(self) -> float:
            return self.began[-1] - self.ended[STEPS // 2 - 1]

    kd.init()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH * STEPS, FEATURES)).astype("float32")
    y = random.normal(size=(BATCH * STEPS, 1)).astype("float32")
    layers = [keras.layers.Dense(UNITS, "relu") for _ in range(3)]
    model = kd.distribute(keras.Sequential([keras.Input([FEATURES]), *layers, keras.layers.Dense(1)]))
    model.compile("sgd", "mse")

    def fitted(*callbacks: keras.callbacks.Callback) -> Steps:
        steps = Steps()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[steps, *callbacks])
        return steps

    found = []
    for number in range(-1, rounds):  # the first one warms up
        plain = fitted()
        with_commit = fitted(kd.callbacks.Commit(folder / f"commits-{number}", every=STEPS // 2, keep=1))
        began = time.perf_counter()
        model.save(folder / "model.keras")
        save = time.perf_counter() - began
        stall, total = with_commit.pause() - plain.pause(), with_commit.second_half() - plain.second_half()
        found.append((stall, total, save))
    return found[1:]


if __name__ == "__main__":
    main()
