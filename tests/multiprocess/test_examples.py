"""The digits example through the real command line, against the plain script in a Python without keras_dist."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS = 3
ARGUMENTS = ["--epochs", str(EPOCHS), "--seed", "1", "--data-dir", "data"]

# Trains with the plain script, then evaluates and reads what the distributed one has written.
WITHOUT_KERAS_DIST = """
import json, runpy, sys
from pathlib import Path
sys.modules["keras_dist"] = None  # importing it raises
folder, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["digits.py", "--output", "plain", *arguments]
runpy.run_path(str(Path(folder) / "digits.py"), run_name="__main__")

import keras
import tensorflow as tf
from digits_dataset import load
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
test = load("digits", "data")[2].batch(32)
found = {}
for name in ("model.keras", "best.keras"):
    model = keras.saving.load_model(Path("distributed") / name)
    found[name] = model.evaluate(test, verbose=0)[1]
for log in Path("distributed").glob("tensorboard/*/*"):
    losses = EventAccumulator(str(log)).Reload().Tensors("epoch_loss")
    found[log.name] = [float(tf.make_ndarray(loss.tensor_proto)) for loss in losses]
print("found:", json.dumps(found))
"""

pytestmark = [pytest.mark.timeout(240), pytest.mark.ci]


@dataclasses.dataclass
class Runs:
    """What the two scripts have printed and written."""

    folder: Path
    distributed: str
    plain: str


def run(command: list[str], folder: Path) -> str:
    """In float64: in float32 the plain script differs from itself by 1 % with other numbers of threads."""
    (folder / "keras.json").write_text(json.dumps({"floatx": "float64"}))
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("examples")
    script = [str(EXAMPLES / "digits_distributed.py"), "--output", "distributed", *ARGUMENTS]
    # First, so that the ranks find no data set and one of them has to make it.
    distributed = run([sys.executable, "-m", "keras_dist", "run", "-np", "2", *script], folder)
    plain = run([sys.executable, "-c", WITHOUT_KERAS_DIST, str(EXAMPLES), *ARGUMENTS], folder)
    return Runs(folder, distributed, plain)


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^test accuracy: (0\.\d{4}|1\.0000)$", output, re.MULTILINE)]


def history(path: Path) -> dict[str, list[float]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def test_it_prints_its_accuracy_once(runs: Runs) -> None:
    (accuracy,) = accuracies(runs.distributed)
    assert accuracy > 0.9  # after 3 epochs; 0.98 or more after all


def test_every_file_is_there_once(runs: Runs) -> None:
    written = sorted(str(path.relative_to(runs.folder / "distributed")) for path in files(runs.folder))
    without_times = [re.sub(r"\d{8}-\d{6}|tfevents\..*", "*", name) for name in written]
    assert without_times == [
        "best.keras",
        "history.csv",
        "model.keras",
        "tensorboard/*/train/events.out.*",
        "tensorboard/*/validation/events.out.*",
    ]
    assert len({Path(name).parts[1] for name in written if name.startswith("tensorboard")}) == 1


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "distributed").rglob("*") if path.is_file()]


def test_the_data_set_is_prepared_once(runs: Runs) -> None:
    (prepared,) = (runs.folder / "data" / "digits").iterdir()
    names = ("dataset_info.json", "digits-test.tfrecord", "digits-train.tfrecord", "features.json")
    assert [path.name.removesuffix("-00000-of-00001") for path in sorted(prepared.iterdir())] == list(names)


def test_the_numbers_are_those_of_the_plain_script(runs: Runs) -> None:
    distributed, plain = (history(runs.folder / name / "history.csv") for name in ("distributed", "plain"))
    assert distributed["epoch"] == [0, 1, 2]
    for name, values in plain.items():
        np.testing.assert_allclose(distributed[name], values, rtol=1e-9, err_msg=name)


def test_what_it_saved_loads_without_keras_dist_and_is_as_good(runs: Runs) -> None:
    found = found_without_keras_dist(runs)
    assert found["model.keras"] == pytest.approx(accuracies(runs.distributed)[0], abs=1e-4)
    assert found["best.keras"] > 0.9


def test_tensorboard_reads_the_logs(runs: Runs) -> None:
    found, logged = found_without_keras_dist(runs), history(runs.folder / "distributed" / "history.csv")
    np.testing.assert_allclose(found["train"], logged["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["validation"], logged["val_loss"], rtol=1e-6)


@pytest.mark.full
def test_the_contrastive_example_compares_the_whole_batch(runs: Runs) -> None:
    """Two processes print the numbers of one."""
    script = [str(EXAMPLES / "contrastive.py"), "--epochs", "2", "--data-dir", "data"]
    outputs = [
        run([sys.executable, *launcher, *script], runs.folder)
        for launcher in ([], ["-m", "keras_dist", "run", "-np", "2"])
    ]
    pattern = r"^loss: ([\d.]+), test loss: ([\d.]+), nearest neighbour: ([\d.]+)$"
    one, two = ([float(number) for number in re.search(pattern, output, re.M).groups()] for output in outputs)  # type: ignore[union-attr]
    assert two == one
    assert one[0] < 4  # 4.85 is the loss of vectors by chance
    assert one[2] > 0.9


def found_without_keras_dist(runs: Runs) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runs.plain.rsplit("found: ", 1)[1])
    return found
