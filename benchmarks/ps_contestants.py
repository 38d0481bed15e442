"""What `parameter_server.py` measures. This runs on the coordinator, or in one plain process."""

import dataclasses
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import models
from contestants import check_alike as check_alike

BATCH, FEATURES, EXAMPLES = 64, 784, 4096
WORK_BATCH = 64  # which plain Keras computes in about 20 ms on one core
ROWS, WIDTH, COLUMNS = 200_000, 16, 20
MODES = ("sync", "async")
HAND_WRITTEN = "hand-written"
WAYS = ("fed by the coordinator", "read by the workers")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        mode: `"sync"`, `"async"`, `"plain"` for plain Keras in one process, or `HAND_WRITTEN`.
        way: One of `WAYS`.
        workers: How many.
    """

    mode: str
    way: str
    workers: int


# --- Steps ---

_READY: dict[tuple[str, Case], tuple[Any, Any]] = {}


def time_fit(model: str, case: Case, steps: int) -> tuple[float, float]:
    """Times one round of `fit`. The model is kept for the next one. Returns seconds and loss."""
    if case.mode == HAND_WRITTEN:
        return _time_loop(model, case, steps)
    if case.mode != "plain":
        from keras_dist.cluster import current_backend

        current_backend()._options.update(mode=case.mode)  # the processes are the same for both modes
    if (model, case) not in _READY:
        _READY[model, case] = _compiled(model, case), _data(model, case)
    trained, data = _READY[model, case]
    start = time.perf_counter()
    history = trained.fit(data, steps_per_epoch=steps, verbose=0)
    return time.perf_counter() - start, history.history["loss"][0]


def _time_loop(model: str, case: Case, steps: int) -> tuple[float, float]:
    """Times TensorFlow's own way: a loop with a `ClusterCoordinator`, on the same workers and servers."""
    if (model, case) not in _READY:
        _READY[model, case] = _loop(model)
    run, loss = _READY[model, case]
    loss.reset_state()
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start, float(loss.result())


def _loop(model: str) -> tuple[Callable[[int], None], Any]:
    """Returns what runs a number of steps, and the metric of the loss, as in TensorFlow's tutorial."""
    import keras
    import tensorflow as tf

    from keras_dist.cluster import current_backend

    jobs = current_backend()._cluster.jobs()

    class Connected(tf.distribute.ParameterServerStrategy):  # this process is connected to the cluster already
        def _connect_to_cluster(self, coordinator_name: str) -> None:
            self._num_workers, self._num_ps = len(jobs["worker"]), len(jobs["ps"])

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = Connected(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        made, optimizer, mean = MODELS[model](), keras.optimizers.SGD(1e-3), keras.metrics.Mean()
        optimizer.build(made.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, made(x, training=True))
        optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)
        mean.update_state(loss)

    step = tf.function(lambda iterator: strategy.run(compute, args=next(iterator)))
    read = tf.function(lambda: strategy.distribute_datasets_from_function(lambda _: _batches(model, 1, 0)))
    iterator = iter(coordinator.create_per_worker_dataset(read))

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    return run, mean


def _compiled(model: str, case: Case) -> Any:
    import keras

    import keras_dist as kd

    keras.utils.set_random_seed(1)
    made = MODELS[model]()
    made = made if case.mode == "plain" else kd.distribute(made)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(1e-3), loss)
    return made


def _data(model: str, case: Case) -> Any:
    """Returns batches of 64 without end, that workers read or are fed with. In "sync" each reads its part of them."""
    import keras_dist as kd

    if case.way == WAYS[0]:
        return _batches(model, 1, 0)
    parts = case.workers if case.mode == "sync" else 1

    def read(context: Any) -> Any:
        return _batches(model, parts, context.input_pipeline_id % parts)

    return kd.shard(read)


def _batches(model: str, parts: int, part: int) -> Any:
    import numpy as np
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    y = numbers.integers(10, size=EXAMPLES)
    if model == TABLE:
        x = numbers.integers(ROWS, size=(EXAMPLES, COLUMNS)).astype("int32")
    else:
        x = numbers.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    batch = WORK_BATCH if model == WORK else BATCH
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(parts, part).repeat().batch(batch // parts).prefetch(2)


def _table() -> Any:
    import keras

    import keras_dist as kd

    rows = kd.layers.ShardedEmbedding(ROWS, WIDTH)
    return keras.Sequential([keras.Input([COLUMNS], dtype="int32"), rows, keras.layers.Flatten(), *_dense(256)])


def _mlp() -> Any:
    import keras

    return keras.Sequential([keras.Input([FEATURES]), *_dense(512)])


def _dense(units: int) -> list[Any]:
    import keras

    return [keras.layers.Dense(units, activation="relu"), keras.layers.Dense(10)]


TABLE = f"Table of {ROWS * WIDTH / 1e6:.1f} M weights"
MLP = "MLP of 0.4 M weights"
WORK = "CNN, a step of about 20 ms"
MODELS: dict[str, Callable[[], Any]] = {TABLE: _table, MLP: _mlp, WORK: lambda: models.keras_model(models.CNN)}


# --- Memory ---


def peaks(source: str, megabytes: int, factors: Sequence[int], folder: str) -> list[int]:
    """Trains on data of so many megabytes, times each factor. Returns the process's largest size after each, in MB."""
    import keras

    import keras_dist as kd

    path, batches = Path(folder, "data.tfrecord"), megabytes * 2**20 // (4 * FEATURES * BATCH)
    if not path.exists():
        _write(path, batches)
    model = kd.distribute(keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    sizes = []
    for factor in factors:
        x, options = SOURCES[source](path, batches, factor)
        model.fit(x, verbose=0, **options)
        del x, options
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    return sizes


def _write(path: Path, batches: int) -> None:
    import numpy as np
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(batches * BATCH):
            writer.write(numbers.normal(size=FEATURES).astype("float32").tobytes())


def _arrays(path: Path, batches: int, factor: int) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    x = np.random.default_rng(0).standard_normal((batches * factor * BATCH, FEATURES), "float32")
    return x, {"y": np.zeros([len(x), 1], "float32"), "batch_size": BATCH}


def _generator(path: Path, batches: int, factor: int) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    def generate() -> Iterator[tuple[Any, Any]]:
        numbers = np.random.default_rng(0)
        for _ in range(batches * factor):
            yield numbers.standard_normal((BATCH, FEATURES), "float32"), np.zeros([BATCH, 1], "float32")

    return generate(), {}


def _files(path: Path, factor: int, parts: int = 1, part: int = 0) -> Any:
    """The file, so many times."""
    import tensorflow as tf

    def example(record: Any) -> tuple[Any, Any]:
        return tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [FEATURES]), tf.zeros([1])

    records = tf.data.Dataset.from_tensors(str(path)).repeat(factor).flat_map(tf.data.TFRecordDataset)
    return records.shard(parts, part).map(example).batch(BATCH // parts).prefetch(2)


def _fed(path: Path, batches: int, factor: int) -> tuple[Any, dict[str, Any]]:
    return _files(path, factor), {}


def _read(path: Path, batches: int, factor: int) -> tuple[Any, dict[str, Any]]:
    import keras_dist as kd

    def read(context: Any) -> Any:
        return _files(path, factor, context.num_input_pipelines, context.input_pipeline_id)

    return kd.shard(read), {}


SOURCES: dict[str, Callable[[Path, int, int], tuple[Any, dict[str, Any]]]] = {
    "NumPy arrays": _arrays,
    "Python generator, fed": _generator,
    "TFRecord files, fed": _fed,
    "TFRecord files, read by the workers": _read,
}
