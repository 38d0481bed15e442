"""Scripts as people write them, run as people run them, give what they give without keras_dist."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from tests.forks import ForkServer
from tests.multiprocess.launches import RUN, assert_close, found, logs_of, output_of

pytestmark = pytest.mark.timeout(240)


@pytest.mark.full
def test_files_on_the_file_system_of_tensorflow(pools: Any) -> None:
    """`ram://`, as `gs://`, on an emulated TPU core and in one process."""

    def files() -> dict[str, Any]:
        """Saves and loads a model, and continues with it."""
        folder = "ram://files"
        keras.utils.set_random_seed(5)
        x = np.random.default_rng(0).normal(size=(100, 12)).astype("float32")
        y = (x.sum(1) > 0).astype("int32")
        layers = [keras.Input([12]), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
        model = kd.distribute(keras.Sequential(layers))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(f"{folder}/again")])
        model.save(f"{folder}/model.keras")
        loaded = kd.distribute(keras.models.load_model(f"{folder}/model.keras"))
        history = loaded.fit(x, y, verbose=0).history
        checkpoint = tf.train.Checkpoint(model=loaded)
        path = checkpoint.save(f"{folder}/checkpoint")
        loaded.set_weights([weight * 0 for weight in loaded.get_weights()])
        checkpoint.restore(path).assert_existing_objects_matched()
        return {"weights": loaded.get_weights(), **history, "listed": sorted(tf.io.gfile.listdir(folder))}

    (plain,) = pools.get("serial", 1).run(files)
    (core,) = pools.get("tpu", 1).run(files)
    assert core.pop("listed") == plain.pop("listed")
    assert_close(core, plain, rtol=1e-5, atol=1e-5)


# Sets no seed, and prints what it has read in each epoch.
UNSEEDED = """
import json, time
import keras, numpy as np, tensorflow as tf
import keras_dist as kd
kd.init()
numbers = np.arange(32, dtype="float32")[:, None]

def noted(source, **options):
    found = []

    class Noting(keras.Sequential):
        def train_step(self, data):
            found.extend(data[0][:, 0].numpy().tolist())
            return super().train_step(data)

    model = kd.distribute(Noting([keras.Input([1]), keras.layers.Dense(1)]), verify=False)  # which would note twice
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(source, epochs=3, verbose=0, **options)
    return np.reshape(found, [3, -1]).tolist()

def noise(x, y):
    return tf.random.uniform([1]), y

examples = tf.data.Dataset.from_tensor_slices((numbers, numbers))
print("found:", json.dumps({
    "own seed": noted(examples.shuffle(32, seed=5).batch(8)),
    "shuffled": noted(examples.shuffle(32).batch(8)),
    "arrays": noted(numbers, y=numbers, batch_size=8),
    "noise": noted(examples.map(noise).batch(8)),
    "noise, several at a time": noted(examples.map(noise, 2).batch(8)),
}))
model = kd.distribute(keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
checkpoint = keras.callbacks.ModelCheckpoint(f"{time.time_ns()}-{{epoch}}.keras")
model.fit(((numbers, numbers) for _ in range(2)), verbose=0, callbacks=[checkpoint])
model.save(f"{time.time_ns()}.keras")
"""
# What a debug run tells, on each rank.
DECISIONS = [
    r"backend: Horovod\(compression=None, op='average', .*\), started by keras-dist run",
    r"topology: rank {rank} of 2, local rank {rank} of 2",
    r"random states: kept: keras; given the chief's seed: python, numpy, tensorflow",
    r"optimizer sgd: its gradients are summed over the ranks",
    r"callbacks: ModelCheckpoint on the chief",
    r"the ranks synchronize after each epoch",
    r"jit_compile='auto': XLA is off",
    r"data: split \(the default\), BatchDataset",
    r"input: each rank makes the examples of its own share only",
    r"model\.fit \(start\): broadcast the chief's \d+ variables, initial epoch: None",
    r"data: chief \(a Python generator\), \w+",
]
OF_THE_CHIEF = [r"model\.save: wrote \d+-1\.keras atomically", r"model\.save: wrote \d+\.keras atomically"]


@pytest.mark.ci
def test_ranks_without_a_seed(forks: ForkServer, tmp_path: Path) -> None:
    """They agree on the order, and all else is as random as in one process. One rank writes, and tells one line."""
    (tmp_path / "train.py").write_text(UNSEEDED)
    plain = found(forks.run(UNSEEDED, tmp_path).stdout)
    output_of(*RUN, "-np", "2", "--log-dir", "logs", "train.py", folder=tmp_path, KERAS_DIST_LOG="debug")
    logs = logs_of(tmp_path)
    ranks = [found(log) for log in logs]

    def epochs_of(name: str) -> list[list[float]]:
        """Returns each epoch's numbers in the order of the global batches: each rank has half of each batch of 8."""
        halves = [np.reshape(rank[name], [3, 4, 4]) for rank in ranks]
        return [[*epoch.ravel()] for epoch in np.concatenate(halves, -1)]

    assert epochs_of("own seed") == plain["own seed"]
    for name in ("shuffled", "arrays"):
        epochs = epochs_of(name)
        assert all(sorted(epoch) == [*range(32)] for epoch in epochs), name
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0], name
    for name in ("noise", "noise, several at a time"):
        drawn = np.ravel(epochs_of(name))
        assert len(set(drawn)) == len(drawn) == 3 * 32, name
    assert len([*tmp_path.glob("*.keras")]) == 2 * len([*tmp_path.glob("*-1.keras")]) == 4  # two of the plain process
    for rank, log in enumerate(logs):
        lines, prefix = [line for line in log.splitlines() if line.startswith("keras")], f"keras_dist [{rank}] DEBUG: "
        said = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        for decision in [*DECISIONS, *(OF_THE_CHIEF if rank == 0 else [])]:
            assert any(re.fullmatch(decision.format(rank=rank), line) for line in said), f"{decision} not in {said}"
        others = [line for line in lines if not line.startswith(prefix)]
        assert others == ["keras_dist: horovod (2 ranks, CPU; started by keras-dist run)"] * (rank == 0)
