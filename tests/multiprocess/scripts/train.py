"""A script as people write them: functions, arguments, `fit` in a loop, files of its own, names with the time."""

import argparse
import functools
import json
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd


def make_data(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(7)
    x = random.normal(size=(count, 4))
    return x, np.tanh(x.sum(axis=1, keepdims=True))


def build_model(units: int) -> keras.Model:
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--floatx", default="float32")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--pipeline", action="store_true", help="read by tf.data, else arrays")
    args = parser.parse_args()
    keras.config.set_floatx(args.floatx)
    if args.seed is not None:
        keras.utils.set_random_seed(args.seed)
    kd.init()

    x, y = make_data(25)
    model = build_model(args.units)
    model = kd.distribute(model)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])

    args.output.mkdir(parents=True, exist_ok=True)
    checkpoint = keras.callbacks.ModelCheckpoint(args.output / f"{time.time_ns()}-{{epoch}}.keras")
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(25).map(lambda x, y: (2 * x, y)).batch(8)
    fit = functools.partial(model.fit, pipeline) if args.pipeline else functools.partial(model.fit, x, y, batch_size=8)
    history = []
    for epoch in range(args.rounds):
        logs = fit(initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[checkpoint]).history
        history.append([logs["loss"][0], logs["mae"][0]])
    model.save(args.output / f"{time.time_ns()}.keras")

    evaluated = model.evaluate(((x[start : start + 8], y[start : start + 8]) for start in range(0, 25, 8)), verbose=0)
    weights = [weight.tolist() for weight in model.get_weights()]
    found = {"history": history, "evaluated": evaluated, "weights": weights}
    if kd.is_chief():
        with (args.output / "results.jsonl").open("a") as file:
            print(json.dumps(found), file=file)
    print("found:", json.dumps(found))


if __name__ == "__main__":
    main()
