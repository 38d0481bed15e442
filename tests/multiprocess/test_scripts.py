"""Scripts as people write them, run as people run them, give what they give without keras_dist."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from tests.forks import ForkServer
from tests.multiprocess.launches import RUN, SCRIPTS, SERIAL_LINE, assert_close, found, logs_of, output_of, run

SCRIPT = SCRIPTS / "train.py"
ROUNDS, UNITS = 3, 5
ARGUMENTS = ["--rounds", str(ROUNDS), "--units", str(UNITS), "--floatx", "float64"]
CLUSTER_LINE = "keras_dist: horovod (2 ranks, CPU; started by keras-dist run)"

pytestmark = pytest.mark.timeout(240)
FULL = pytest.mark.full

# Runs the script without its lines of keras_dist, then as it is, in one process: that spares a start of TensorFlow.
ON_A_LAPTOP = """
import runpy, sys
plain, script, *arguments = sys.argv[1:]
sys.argv = ["train.py", "--output", "plain", *arguments]
runpy.run_path(plain, run_name="__main__")
assert not [name for name in sys.modules if name.startswith(("keras_dist", "horovod"))]
sys.argv[2] = "laptop"
runpy.run_path(script, run_name="__main__")
"""


def without_keras_dist(source: str) -> str:
    """Returns the script that somebody had before the two lines were added."""
    source = source.replace("import keras_dist as kd\n", "").replace("    kd.init()\n", "")
    source = source.replace("    model = kd.distribute(model)\n", "").replace("if kd.is_chief():", "if True:")
    assert "kd." not in source
    return source


@dataclasses.dataclass
class Run:
    """What a script has printed, on each rank, the numbers in it, and what keras_dist has said to the user."""

    printed: list[str]
    err: str
    folder: Path

    def __post_init__(self) -> None:
        lines = [line for out in self.printed for line in out.splitlines() if line.startswith("found: ")]
        self.found: list[dict[str, Any]] = [json.loads(line.removeprefix("found: ")) for line in lines]
        self.own_lines = said_by_us(self.err)


def said_by_us(text: str) -> list[str]:
    """Not all lines with our name in them: a clone, whose files Keras's warnings name, may be called so too."""
    return [line for line in text.splitlines() if line.startswith(("keras_dist", "keras-dist"))]


def on_two_ranks(folder: Path, *arguments: str, **variables: str) -> Run:
    command = [*RUN, "-np", "2", "--log-dir", "logs", SCRIPT, "--output", "two"]
    done = run(*command, *arguments, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return Run(logs_of(folder), done.stderr, folder / "two")


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Plain Keras, and the script itself under plain `python`."""
    folder = tmp_path_factory.mktemp("laptop")
    plain = folder / "train.py"
    plain.write_text(without_keras_dist(SCRIPT.read_text()))
    command = [sys.executable, "-c", ON_A_LAPTOP, str(plain), str(SCRIPT), *ARGUMENTS, "--seed", "1"]
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stderr
    return Run([done.stdout], done.stderr, folder)


def assert_written_once(folder: Path, found: dict[str, Any]) -> None:
    """One checkpoint an epoch, all with the time of one process; one model; one line of the script's own."""
    checkpoints = sorted(folder.glob("*-*.keras"))
    assert [path.stem.partition("-")[2] for path in checkpoints] == [str(epoch + 1) for epoch in range(ROUNDS)]
    assert len({path.stem.partition("-")[0] for path in checkpoints}) == 1
    (model,) = set(folder.glob("*.keras")) - set(checkpoints)
    assert sorted(folder.iterdir()) == sorted([*checkpoints, model, folder / "results.jsonl"])
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == [found]


@FULL
def test_a_laptop_gets_what_it_got_before(laptop: Run) -> None:
    """Bit for bit: with one process the model isn't touched."""
    plain, serial = laptop.found
    assert serial == plain
    assert len(plain["history"]) == ROUNDS
    assert np.shape(plain["weights"][0]) == (4, UNITS)
    assert laptop.own_lines == [SERIAL_LINE]
    assert_written_once(laptop.folder / "laptop", serial)


@FULL
def test_two_ranks_get_what_the_plain_script_got(laptop: Run, tmp_path: Path) -> None:
    """By default one line is said, on the chief; the other rank says nothing at all."""
    seeded = on_two_ranks(tmp_path, *ARGUMENTS, "--seed", "1")
    first, second = seeded.found
    assert first == second
    assert_close(first, laptop.found[0])
    assert_written_once(seeded.folder, first)
    assert seeded.own_lines == [CLUSTER_LINE]
    assert said_by_us(seeded.printed[1]) == []


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
OF_THE_CHIEF = [r"model\.save: wrote two/\d+-3\.keras atomically", r"model\.save: wrote two/\d+\.keras atomically"]


@FULL
def test_a_script_that_does_not_seed_is_alike_on_all_ranks_and_tells_each_decision(laptop: Run, tmp_path: Path) -> None:
    """A debug run has each line with the rank that says it."""
    unseeded = on_two_ranks(tmp_path, *ARGUMENTS, "--pipeline", KERAS_DIST_LOG="debug")
    first, second = unseeded.found
    assert first == second
    assert first["weights"] != laptop.found[0]["weights"]
    assert_written_once(unseeded.folder, first)
    for rank, printed in enumerate(unseeded.printed):
        prefix = f"keras_dist [{rank}] DEBUG: "
        said = [line.removeprefix(prefix) for line in printed.splitlines() if line.startswith(prefix)]
        for decision in [*DECISIONS, *(OF_THE_CHIEF if rank == 0 else [])]:
            assert any(re.fullmatch(decision.format(rank=rank), line) for line in said), f"{decision} not in {said}"
        others = [line for line in said_by_us(printed) if prefix not in line]
        assert others == ([CLUSTER_LINE] if rank == 0 else [])


@FULL
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
import json
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
"""


@pytest.mark.ci
def test_what_ranks_read_without_a_seed(forks: ForkServer, tmp_path: Path) -> None:
    """They agree on the order, and all else is as random as in one process."""
    (tmp_path / "train.py").write_text(UNSEEDED)
    plain = found(forks.run(UNSEEDED, tmp_path).stdout)
    output_of(*RUN, "-np", "2", "--log-dir", "logs", "train.py", folder=tmp_path)
    ranks = [found(log) for log in logs_of(tmp_path)]

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
