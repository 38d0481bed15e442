"""Two ranks that make different calls: `out_of_step.py CASE FOLDER`. `FOLDER/failed` gets the time."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_dist as kd

case, folder = sys.argv[1], Path(sys.argv[2])
kd.init()
second = kd.rank() == 1
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def now() -> None:
    (folder / "failed").write_text(str(time.monotonic()))


class Fault(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and case == "save_on_chief" and kd.is_chief():
            now()
            self.model.save(folder / "model.keras")
        if epoch == 1 and case == "barrier_on_one" and second:
            now()
            kd.barrier()


class StopEvaluating(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = second


class FailingToPredict(keras.callbacks.Callback):
    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if second:
            raise ValueError("on one rank")


def batches() -> Iterator[Any]:
    for index in range(4 if case == "uneven" and second else 8):
        yield x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]


def in_fit() -> None:
    model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    spec = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)
    now()
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), epochs=4, verbose=0, callbacks=[Fault()])
    now()
    if case == "stop_evaluating":
        model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[StopEvaluating()])
    if case == "caught":
        with contextlib.suppress(ValueError):
            model.predict(x, batch_size=8, verbose=0, callbacks=[FailingToPredict()])
        model.predict(x, verbose=0)
    if case == "out_of_loop" and kd.is_chief():
        model.evaluate(x, y, verbose=0)
    if case == "out_of_loop" and not kd.is_chief():
        kd.broadcast(1)


def in_loop(how: str) -> None:
    """No Python of ours surrounds a collective."""
    variable = keras.Variable([0.0])
    optimizer = kd.distribute(keras.optimizers.SGD(0.1))
    optimizer.build([variable])

    def mean(x: Any) -> Any:
        return kd.reduce("mean", kd.run(tf.reduce_mean, (x,)))

    def update(x: Any) -> None:
        kd.run(lambda x: optimizer.apply([tf.reduce_mean(x)[None]], [variable]), (x,))

    calls: list[Callable[[Any], Any]] = [mean, update]
    if how != "eager":
        # With a known shape, the ranks would sum the numbers of examples only once.
        calls = [tf.function(call, [tf.TensorSpec([None])]) for call in calls]
    x = tf.constant([float(kd.rank()), 2.0])
    print("mean", float(calls[0](x)))
    calls[1](x)
    kd.barrier()
    calls[0](x)
    now()
    if second:
        calls[how == "update"](x)
    elif how == "alone":
        time.sleep(100)
    elif how == "update":
        kd.reduce("sum", tf.constant(1.0))
    else:
        kd.barrier()


in_loop(case.removeprefix("loop_")) if case.startswith("loop_") else in_fit()
print("trained to the end")
