"""What the benchmarks time. This runs on the ranks; each contestant does the same work as its rival."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BATCH = 64  # of each process
CLASSES = 10
Seconds = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison of two ways to train.

    Args:
        model: Which one, a key of `MODELS`.
        steps_per_execution: How many steps TensorFlow makes before Python gets to run.
        executions: How many of these are timed in a round.
        batch: The global batch size. `None`: `BATCH` for each process.
    """

    model: str
    steps_per_execution: int
    executions: int
    batch: int | None = None


def pin(*cores: int) -> None:
    """Pins this process to its cores, with its existing threads."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


# --- Steps ---


def time_serial(case: Case, rounds: int, seed: int, cores: list[int]) -> Seconds:
    """Times `fit` of a plain Keras model, and after `kd.distribute`, in one process."""
    import keras_dist as kd

    pin(cores[0])
    batches = _batches(case, BATCH, 1)
    return _rounds({"plain": _fit(case, batches), "ours": _fit(case, batches, kd.distribute)}, rounds, seed)


def time_horovod(case: Case, rounds: int, seed: int, cores: list[int]) -> Seconds:
    """Times `fit` over keras_dist, and a hand-written loop over Horovod, on the same ranks and batches."""
    import keras_dist as kd

    pin(cores[kd.rank()])
    ours = _fit(case, _batches(case, BATCH * kd.size(), 1), kd.distribute)
    return _rounds({"hand-written": _loop(case), "ours": ours}, rounds, seed)


_READY: dict[Case, Callable[[], tuple[float, float]]] = {}


def time_backend(case: Case, cores: list[int]) -> tuple[float, float]:
    """Times one round of `fit` over the backend of this rank. The model is kept for the next round."""
    import tensorflow as tf

    import keras_dist as kd

    if case not in _READY:
        count = len(cores) // kd.size()  # for this process
        pin(*cores[kd.rank() * count :][:count])
        tf.config.threading.set_intra_op_parallelism_threads(len(cores) // kd.num_replicas())
        _READY[case] = _fit(case, _batches(case, case.batch or BATCH * kd.num_replicas(), 1), kd.distribute)
        _READY[case]()  # traces
    return _READY[case]()


def _rounds(contestants: dict[str, Callable[[], tuple[float, float]]], rounds: int, seed: int) -> Seconds:
    """Runs all contestants in each round, in a random order that is the same on all ranks."""
    order, seconds = random.Random(seed), {name: [] for name in contestants}
    for run in contestants.values():
        run()  # traces, and warms up
    for _ in range(rounds):
        losses = {}
        for name in order.sample(sorted(contestants), len(contestants)):
            taken, losses[name] = contestants[name]()
            seconds[name].append(taken)
        check_alike(losses)
    return seconds


def check_alike(losses: dict[str, float]) -> None:
    """All train on the same batches: if their losses differ, one of them does other work."""
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise RuntimeError(f"The contestants don't train alike: {losses}")


def _fit(case: Case, batches: Any, distribute: Callable[[Any], Any] = lambda model: model) -> Callable[[], Any]:
    """Returns a function that trains by `fit` and returns the seconds and the loss."""
    model = distribute(_model(case))
    model.compile(_optimizer(), _loss(), metrics=["accuracy"], steps_per_execution=case.steps_per_execution)
    times: list[float] = []

    def run() -> tuple[float, float]:
        times.clear()
        history = model.fit(batches, steps_per_epoch=_steps(case), verbose=0)
        if not times:  # that was the first one, which traces
            model.train_function = _clocked(model.train_function, times)
            return 0.0, history.history["loss"][0]
        return times[-1] - times[0], history.history["loss"][0]

    return run


def _clocked(function: Callable[[Any], Any], times: list[float]) -> Callable[[Any], Any]:
    """Not a callback: the ranks synchronize after each batch if a callback has a hook there."""

    def clocked(iterator: Any) -> Any:
        outputs = function(iterator)
        times.append(time.perf_counter())
        return outputs

    return clocked


def _loop(case: Case) -> Callable[[], Any]:
    """Returns a function that trains by a typical hand-written Horovod loop, and logs what `fit` logs."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model, optimizer, loss_of = _model(case), _optimizer(), _loss()
    variables = model.trainable_variables
    optimizer.build(variables)
    mean_loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    batches = _batches(case, BATCH, hvd.size(), hvd.rank())

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), variables)
        mean_loss.update_state(loss)
        accuracy.update_state(y, logits)

    @tf.function
    def execution(iterator: Any) -> tuple[Any, Any]:
        if case.steps_per_execution == 1:
            step(*next(iterator))
        else:
            for _ in tf.range(case.steps_per_execution):
                step(*next(iterator))
        return mean_loss.result(), accuracy.result()

    def run() -> tuple[float, float]:
        for metric in (mean_loss, accuracy):
            metric.reset_state()
        iterator, times = iter(batches), []
        for _ in range(case.executions + 1):
            loss, _ = (float(value) for value in execution(iterator))
            times.append(time.perf_counter())
        return times[-1] - times[0], float(hvd.allreduce(tf.constant(loss), op=hvd.Average, name="loss"))

    return run


def _steps(case: Case) -> int:
    return case.steps_per_execution * (case.executions + 1)  # the first one isn't timed


# --- Models and data ---


def _dense(*units: int) -> Callable[[], list[Any]]:
    def layers() -> list[Any]:
        import keras

        hidden = [keras.layers.Dense(count, activation="relu") for count in units]
        return [keras.Input([784]), *hidden, keras.layers.Dense(CLASSES)]

    return layers


def _convolutions() -> list[Any]:
    import keras

    return [
        keras.Input([784]),
        keras.layers.Reshape([28, 28, 1]),
        keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(CLASSES),
    ]


def _example(side: int) -> Callable[[], list[Any]]:
    """Returns the layers of examples/digits.py, for images of this size."""

    def layers() -> list[Any]:
        import keras

        sys.path.insert(0, str(EXAMPLES))
        from digits import build_model

        return [keras.Input([side * side]), keras.layers.Reshape([side, side, 1]), build_model((side, side, 1))]

    return layers


MODELS: dict[str, Callable[[], list[Any]]] = {
    "MLP of 0.1 M weights": _dense(128),
    "MLP of 1.3 M weights": _dense(1024, 512),
    "CNN of 16 K weights": _convolutions,
    "digits, 8 x 8": _example(8),
    "digits, 28 x 28": _example(28),
}


def _model(case: Case) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(MODELS[case.model]())


def _optimizer() -> Any:
    import keras

    return keras.optimizers.SGD(1e-3, momentum=0.9)


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _batches(case: Case, batch: int, parts: int, part: int = 0) -> Any:
    """Returns endless batches: of all examples, or of every n-th one, as sharded for Horovod."""
    import numpy as np
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(4096, MODELS[case.model]()[0].shape[-1])).astype("float32")
    y = numbers.integers(CLASSES, size=4096)
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(parts, part).repeat().batch(batch).prefetch(2)


# --- All-reduce ---


def time_all_reduce(megabytes: int, times: int, cores: list[int]) -> float:
    """Times the sum over the ranks as a step of keras_dist makes it."""
    import tensorflow as tf

    from keras_dist.api import current_backend

    backend = current_backend()
    pin(cores[backend.topology.rank])

    @tf.function
    def total(tensor: Any) -> Any:
        (result,), _ = backend.all_reduce([tensor], tf.zeros([2]), f"benchmark_{megabytes}")
        return result

    return _time_sums(total, megabytes, times, backend.topology.rank, backend.topology.size)


def serve_ring(rank: int, core: int, addresses: list[str], requests: Any) -> None:
    """Is a rank of a MultiWorkerMirroredStrategy. Gets (megabytes, times) and answers with the seconds.

    Args:
        rank: Of this process.
        core: Where it may run.
        addresses: Host and port of each rank.
        requests: A `multiprocessing` connection.
    """
    pin(core)
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)

    def reduce(tensor: Any) -> Any:
        context = tf.distribute.get_replica_context()
        # The identity, which copies nothing, gives the tensor a device: it can't be reduced without.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor), options=ring)

    @tf.function
    def total(tensor: Any) -> Any:
        return strategy.run(reduce, args=(tensor,))

    requests.send("ready")
    for megabytes, times in iter(requests.recv, None):
        requests.send(_time_sums(total, megabytes, times, rank, len(addresses)))


def _time_sums(total: Callable[[Any], Any], megabytes: int, times: int, rank: int, size: int) -> float:
    import tensorflow as tf

    tensor = tf.fill([megabytes * 2**20 // 4], float(rank + 1))
    result = total(tensor)  # traces, and warms up
    start = time.perf_counter()
    for _ in range(times):
        result = total(tensor)
    seconds = time.perf_counter() - start
    if float(result[-1]) != size * (size + 1) / 2:
        raise RuntimeError(f"A wrong sum: {float(result[-1])} on rank {rank} of {size}")
    return seconds
