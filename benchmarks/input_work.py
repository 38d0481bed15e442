"""What reading costs as ranks grow: the CPU time of all ranks for one epoch of input, over that of one process.

    python benchmarks/input_work.py            # a minute
    python benchmarks/input_work.py --rounds 1 # shows only that it works

`fit` reads and counts, and learns nothing. CPU time is that of all threads of all ranks, less that of an epoch of as
many batches of numbers: what Keras, the ranks' agreement and waiting take in any case. 1 means that more ranks do no
more work in all.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keras_dist.testing import WorkerPool

RANKS = (1, 2, 4)
BATCH, IMAGES, SIDE = 64, 1024, 256
SOURCES = ("TFRecord of JPEG images", "TFRecord, kd.shard(read)", "arrays", "arrays, shuffled", "PyDataset")
NOTHING = "numbers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each source and number of ranks (5)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        seconds = {ranks: timed(ranks, folder, rounds) for ranks in RANKS}
    print("| CPU time of the input over that of one process | " + " | ".join(f"{n} ranks" for n in RANKS[1:]) + " |")
    print("|---|" + ":---:|" * len(RANKS[1:]))
    for source in SOURCES:
        cells = [f"{work(seconds[ranks], source) / work(seconds[1], source):.2f}" for ranks in RANKS[1:]]
        print(f"| {source} | " + " | ".join(cells) + " |")


def work(seconds: dict[str, list[float]], source: str) -> float:
    """Returns the CPU seconds of an epoch's input."""
    return statistics.median(seconds[source]) - statistics.median(seconds[NOTHING])


def timed(ranks: int, folder: str, rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each epoch, summed over the ranks."""
    with WorkerPool(ranks, "horovod" if ranks > 1 else "serial") as pool:
        of_ranks = pool.run(measured, folder, rounds, timeout=600)
    return {name: [*map(sum, zip(*(each[name] for each in of_ranks), strict=True))] for name in of_ranks[0]}


def measured(folder: str, rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each epoch of each source. Runs on every rank."""
    import keras_dist as kd

    path = Path(folder) / "images.tfrecord"
    if kd.is_chief() and not path.exists():
        write_images(path)
    kd.barrier()
    return {source: epochs_of(source, path, rounds) for source in (NOTHING, *SOURCES)}


def epochs_of(source: str, path: Path, rounds: int) -> list[float]:
    import keras

    import keras_dist as kd

    class Meter(keras.callbacks.Callback):
        """Measures the CPU time of each epoch but the first, which traces."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                seconds.append(time.process_time() - self.began)

    seconds: list[float] = []
    model = kd.distribute(reader())
    model.compile(steps_per_execution=IMAGES // BATCH)
    x, options = inputs(source, path)
    model.fit(x, epochs=rounds + 1, callbacks=[Meter()], verbose=0, **options)
    if int(model.seen.numpy()) != (rounds + 1) * share(kd.rank(), kd.size()):
        raise RuntimeError(f"Rank {kd.rank()} has seen {int(model.seen.numpy())} images.")
    return seconds


def share(rank: int, ranks: int) -> int:
    """Returns how many images of an epoch a rank gets: its part of each batch."""
    return IMAGES // BATCH * ((rank + 1) * BATCH // ranks - rank * BATCH // ranks)


def reader() -> Any:
    """Returns a model that reads and counts images, and learns nothing."""
    import keras
    import tensorflow as tf

    class Reader(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen = tf.Variable(0, dtype=tf.int64, trainable=False)

        def call(self, x: Any) -> Any:
            return x

        def train_step(self, data: Any) -> Any:
            x = data[0] if isinstance(data, tuple) else data
            self.seen.assign_add(tf.shape(x, tf.int64)[0])
            return {"seen": tf.cast(self.seen, tf.float32)}

    return Reader()


def inputs(source: str, path: Path) -> tuple[Any, dict[str, Any]]:
    """Returns what a script passes to `fit`."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist as kd

    @tf.autograph.experimental.do_not_convert
    def decoded(record: Any) -> Any:
        image = tf.io.decode_jpeg(record, channels=3)
        return tf.cast(tf.ensure_shape(image, [SIDE, SIDE, 3]), tf.float32) / 255

    def read(context: Any) -> Any:
        mine = tf.data.TFRecordDataset(path).shard(context.num_input_pipelines, context.input_pipeline_id)
        return mine.map(decoded, tf.data.AUTOTUNE).batch(BATCH // context.num_input_pipelines)

    class Images(keras.utils.PyDataset):
        def __len__(self) -> int:
            return IMAGES // BATCH

        def __getitem__(self, index: int) -> Any:
            return images[index * BATCH : (index + 1) * BATCH] / np.float32(255)

    if source == NOTHING:
        return tf.data.Dataset.range(IMAGES).batch(BATCH), {}
    if source == "TFRecord, kd.shard(read)":
        return kd.shard(read), {}
    if source == "TFRecord of JPEG images":
        return tf.data.TFRecordDataset(path).map(decoded, tf.data.AUTOTUNE).batch(BATCH), {}
    images = np.zeros([IMAGES, SIDE, SIDE, 3], "float32")
    images[:] = np.random.default_rng(0).uniform(size=[SIDE, SIDE, 3])
    if source == "PyDataset":
        return Images(), {"shuffle": False}
    return images, {"batch_size": BATCH, "shuffle": source == "arrays, shuffled"}


def write_images(path: Path) -> None:
    """Writes JPEG images of smooth noise."""
    import numpy as np
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    with tf.io.TFRecordWriter(f"{path}.part") as writer:
        for _ in range(IMAGES):
            small = numbers.integers(0, 256, [SIDE // 8, SIDE // 8, 3]).astype("uint8")
            image = tf.cast(tf.image.resize(small, [SIDE, SIDE], "bicubic"), tf.uint8)
            writer.write(tf.io.encode_jpeg(image).numpy())
    Path(f"{path}.part").rename(path)


if __name__ == "__main__":
    sys.exit(main())
