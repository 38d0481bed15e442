"""What `exact=True` costs: the time of a step with it over that of a step without it, on two processes.

    python benchmarks/exact.py            # some minutes on two idle cores
    python benchmarks/exact.py --rounds 3 # shows only that it works

Both models live in the same two processes, one thread each, and take turns in each round.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_dist.testing import run_workers

RANKS, BATCH, STEPS = 2, 64, 20
BACKENDS = ("horovod", "multi_worker", "mirrored")
MODELS = ("MLP with Dropout", "CNN with BatchNormalization", "CNN with both", "augmentation")


def main() -> None:
    show_ratios(__doc__, 15, "of 20 steps with each model", measured, MODELS)


def show_ratios(
    doc: str,
    rounds: int,
    unit: str,
    measured: Callable[[int], dict[str, tuple[float, float]]],
    models: Iterable[str],
    backends: Sequence[str] = BACKENDS,
) -> None:
    """Prints a table: for each model and backend the range of the ratios that `measured` returns on two ranks."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{unit} ({rounds})")
    rounds = parser.parse_args().rounds
    ratios = {backend: run_workers(measured, RANKS, backend, args=(rounds,), timeout=3600)[0] for backend in backends}
    print("| | " + " | ".join(backends) + " |")
    print("|---|" + "---|" * len(backends))
    for model in models:
        cells = [f"{low:.2f} to {high:.2f}" for low, high in (ratios[backend][model] for backend in backends)]
        print(f"| {model} | " + " | ".join(cells) + " |")


def measured(rounds: int) -> dict[str, tuple[float, float]]:
    """Returns for each model the quartiles of the ratio. Runs on every rank."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    return {model: quartiles(ratios_of(model, rounds)) for model in MODELS}


def ratios_of(name: str, rounds: int) -> list[float]:
    import time

    import numpy as np

    import keras_dist as kd

    random = np.random.RandomState(0)
    x = random.uniform(size=(BATCH * STEPS, 28, 28, 1)).astype("float32")
    y = random.randint(0, 10, len(x))
    models = [kd.distribute(built(name), exact=exact) for exact in (False, True)]
    for model in models:
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=BATCH, verbose=0)
    ratios = []
    for number in range(rounds):
        seconds = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            models[index].fit(x, y, batch_size=BATCH, verbose=0)
            seconds[index] = time.perf_counter() - began
        ratios.append(seconds[1] / seconds[0])
    return ratios


def built(name: str) -> Any:
    import keras

    layers, is_cnn = keras.layers, name.startswith("CNN")
    stack: list[Any] = [keras.Input((28, 28, 1))]
    if name == "augmentation":
        stack += [layers.RandomFlip(), layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.2)]
    for filters in (16, 32) if is_cnn else ():
        stack += [layers.Conv2D(filters, 3, strides=2), layers.BatchNormalization(), layers.Activation("relu")]
        stack += [layers.Dropout(0.3)] if name.endswith("both") else []
    stack += [layers.Flatten()]
    for units in () if is_cnn else (256, 256):
        stack += [layers.Dense(units, "relu"), layers.Dropout(0.3)]
    return keras.Sequential([*stack, layers.Dense(10, "softmax")])


def quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, high


if __name__ == "__main__":
    main()
