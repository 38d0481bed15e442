"""A standing cluster of parameter servers: notebooks come and go, and each finds new servers."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import pytest

from keras_dist.cli import main
from keras_dist.errors import ConfigurationError
from keras_dist.launcher import serve
from tests.multiprocess.launches import QUIET, RUN, output_of, until

SECONDS = 400
pytestmark = [pytest.mark.timeout(900)]

START = """
import json, keras, numpy as np
import keras_dist as kd
kd.init(kd.ParameterServer(cluster="cluster.json"))
keras.config.set_floatx("float64")
x = np.random.default_rng(0).normal(size=(20, 4)); y = x.sum(axis=1, keepdims=True)
"""
TRAIN = """
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(width, "tanh") for width in {widths}]])
model = DISTRIBUTE(model)
model.compile(keras.optimizers.Adam(0.01), "mse")
losses = model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]
print(json.dumps([losses, len({{v.value.device for v in model.weights}}), model.weights[0].value.device]))
"""
MODELS = ([1], [7, 1])
ENDLESS = """
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        open("trains", "w").close()
model = DISTRIBUTE(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, y, batch_size=2, epochs=10**6, verbose=0, callbacks=[Tell()])
"""
END_SECONDS = 10  # after Ctrl-C


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two workers and a server, whose addresses are in cluster.json."""
    process = subprocess.Popen(
        [*RUN, "--workers", "2", "--ps", "1", "--serve"],
        env={**os.environ, **QUIET}, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: process.poll() is not None or (tmp_path / "cluster.json").exists(), SECONDS)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_notebook(folder: Path) -> list[list[float]]:
    """Trains both models in a kernel of its own; returns their losses."""
    cells = [START.replace("DISTRIBUTE", ""), *[TRAIN.format(widths=widths) for widths in MODELS]]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell.replace("DISTRIBUTE", "kd.distribute")) for cell in cells]
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    losses = []
    for cell in notebook.cells[1:]:
        (text,) = [output["text"] for output in cell["outputs"] if output.get("name") == "stdout"]
        own, count, device = json.loads(text)
        assert (count, device) == (1, "/job:ps/replica:0/task:0/device:CPU:0")
        losses.append(own)
    return losses


def kill_while_training(folder: Path) -> None:
    """Trains in a process that is killed in the middle."""
    script = (START + ENDLESS).replace("DISTRIBUTE", "kd.distribute")
    with subprocess.Popen([sys.executable, "-c", script], cwd=folder, env={**os.environ, **QUIET}) as process:
        until(lambda: process.poll() is not None or (folder / "trains").exists(), SECONDS)
        time.sleep(random.SystemRandom().uniform(0, 0.2))  # any moment will do
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.full
def test_notebooks_train_on_a_standing_cluster(standing: subprocess.Popen[str], tmp_path: Path) -> None:
    first = run_notebook(tmp_path)
    kill_while_training(tmp_path)
    assert run_notebook(tmp_path) == first, "the servers kept something"
    plain = START.replace("import keras_dist as kd", "").replace(
        'kd.init(kd.ParameterServer(cluster="cluster.json"))', ""
    )
    script = "".join([plain, *(TRAIN.format(widths=widths) for widths in MODELS)]).replace("DISTRIBUTE", "")
    for losses, line in zip(first, output_of(sys.executable, "-c", script).splitlines(), strict=True):
        assert losses == pytest.approx(json.loads(line)[0], rel=1e-9)
    standing.send_signal(signal.SIGINT)
    assert standing.wait(END_SECONDS) == 128 + signal.SIGINT
    assert not (tmp_path / "cluster.json").exists()


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.write_text("mine")
    assert main(["run", "--workers", "1", "--ps", "1", "--serve", str(file)]) == 2
    assert file.read_text() == "mine"
    assert f"exists already.\nReceived: {file}\nRemedy: If no cluster uses it, delete it" in capsys.readouterr().err


def test_the_addresses_of_another_cluster_are_kept(standing: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("another cluster's")
    standing.send_signal(signal.SIGINT)
    standing.wait(END_SECONDS)
    assert (tmp_path / "cluster.json").read_text() == "another cluster's"


def test_a_process_that_the_cluster_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}')
    assert main(["serve", "--role", "worker", "--index", "1", "--cluster", str(file)]) == 2
    with pytest.raises(ConfigurationError, match="none.json"):
        serve.main(argparse.Namespace(role="ps", index=0, cluster=str(tmp_path / "none.json")))
