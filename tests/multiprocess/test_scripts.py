"""Scripts as people write them, run as people run them, give what they give without keras_dist.

`scripts/train.py` has functions and a main guard, takes arguments, calls `fit` in a loop, writes a file of its own
under `kd.is_chief()`, and has the time in the names of its checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("scripts") / "train.py"
ROUNDS, UNITS = 3, 5
ARGUMENTS = ["--rounds", str(ROUNDS), "--units", str(UNITS), "--floatx", "float64"]
SERIAL_LINE = "keras_dist: serial (CPU; no launcher found; to use more processes: keras-dist run -np N script.py)"
CLUSTER_LINE = "keras_dist: horovod (2 ranks, CPU; started by keras-dist run)"

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

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
    """What a script has printed, on each rank, and written."""

    printed: list[str]
    err: str
    folder: Path

    @property
    def found(self) -> list[dict[str, Any]]:
        """The numbers that each rank printed."""
        return [json.loads(text) for out in self.printed for text in re.findall("^found: (.*)$", out, re.MULTILINE)]

    @property
    def own_lines(self) -> list[str]:
        """What keras_dist has said; TensorFlow says things of its own."""
        return said_by_us(self.err)


def said_by_us(text: str) -> list[str]:
    """Not all lines with our name in them: a clone, whose files Keras's warnings name, may be called so too."""
    return [line for line in text.splitlines() if line.startswith(("keras_dist", "keras-dist"))]


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **more}


def on_two_ranks(folder: Path, *arguments: str, **variables: str) -> Run:
    command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--log-dir", "logs", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--output", "two", *arguments],
        cwd=folder, env=environ(**variables), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    return Run(logs, done.stderr, folder / "two")


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Plain Keras, and the script itself under plain `python`."""
    folder = tmp_path_factory.mktemp("laptop")
    plain = folder / "train.py"
    plain.write_text(without_keras_dist(SCRIPT.read_text()))
    command = [sys.executable, "-c", ON_A_LAPTOP, str(plain), str(SCRIPT), *ARGUMENTS, "--seed", "1"]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return Run([done.stdout], done.stderr, folder)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return on_two_ranks(tmp_path_factory.mktemp("seeded"), *ARGUMENTS, "--seed", "1")


@pytest.fixture(scope="module")
def unseeded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return on_two_ranks(tmp_path_factory.mktemp("unseeded"), *ARGUMENTS, "--pipeline", KERAS_DIST_LOG="debug")


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(actual["history"], expected["history"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(actual["evaluated"], expected["evaluated"], rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_written_once(folder: Path, found: dict[str, Any]) -> None:
    """One checkpoint an epoch, all with the time of one process; one model; one line of the script's own."""
    checkpoints = sorted(folder.glob("*-*.keras"))
    assert [path.stem.partition("-")[2] for path in checkpoints] == [str(epoch + 1) for epoch in range(ROUNDS)]
    assert len({path.stem.partition("-")[0] for path in checkpoints}) == 1
    (model,) = set(folder.glob("*.keras")) - set(checkpoints)
    assert sorted(folder.iterdir()) == sorted([*checkpoints, model, folder / "results.jsonl"])
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == [found]


# --- Under plain `python` ---


def test_a_laptop_gets_what_it_got_before(laptop: Run) -> None:
    """Bit for bit: with one process the model isn't touched."""
    plain, serial = laptop.found
    assert serial == plain
    assert len(plain["history"]) == ROUNDS
    assert np.shape(plain["weights"][0]) == (4, UNITS)
    assert laptop.own_lines == [SERIAL_LINE]
    assert_written_once(laptop.folder / "laptop", serial)


# --- Under `keras-dist run` ---


def test_two_ranks_get_what_the_plain_script_got(laptop: Run, seeded: Run) -> None:
    first, second = seeded.found
    assert first == second
    assert_same(first, laptop.found[0])


def test_files_with_the_time_in_their_names_are_written_once(seeded: Run) -> None:
    assert_written_once(seeded.folder, seeded.found[0])


def test_a_script_that_does_not_seed_is_alike_on_all_ranks(laptop: Run, unseeded: Run) -> None:
    first, second = unseeded.found
    assert first == second
    assert first["weights"] != laptop.found[0]["weights"]
    assert_written_once(unseeded.folder, first)


# --- In a notebook ---


CELLS = {
    "start": """
import signal, os
import keras, keras_dist as kd, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
kd.init()
print("size", kd.size())
""",
    "build": """
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model = kd.distribute(model)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
random = np.random.RandomState(7)
x = random.normal(size=(25, 4))
y = np.tanh(x.sum(axis=1, keepdims=True))
""",
    "train": """
for epoch in range(3):
    model.fit(x, y, batch_size=8, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
print("weights", [weight.tolist() for weight in model.get_weights()])
""",
    "interrupted": """
class CtrlC(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            os.kill(os.getpid(), signal.SIGINT)
before = int(model.optimizer.iterations.numpy())
model.fit(x, y, batch_size=8, epochs=100, verbose=0, callbacks=[CtrlC()])
""",
    "afterwards": """
print("steps", int(model.optimizer.iterations.numpy()) - before)
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
print("steps", int(model.optimizer.iterations.numpy()) - before)
""",
}
ORDER = ["start", "start", "build", "train", *["start", "build", "train"], "interrupted", "afterwards"]


def text_of(cell: Any, stream: str) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == stream)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of a notebook that was run in a Jupyter kernel, some of them twice."""
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(CELLS[name]) for name in ORDER]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebook.ipynb")
    homes = {name: str(folder / name) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    execute = [sys.executable, "-m", "jupyter", "execute", "--inplace", "--allow-errors", "--kernel_name=python3"]
    done = subprocess.run(
        [*execute, "notebook.ipynb"], cwd=folder, env=environ(**homes), capture_output=True, text=True, timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(nbformat.read(folder / "notebook.ipynb", as_version=4).cells)


def test_a_notebook_is_one_process_and_says_so(notebook: list[Any]) -> None:
    first, again = notebook[0], notebook[1]
    assert text_of(first, "stdout") == text_of(again, "stdout") == "size 1\n"
    assert said_by_us(text_of(first, "stderr")) == [SERIAL_LINE]
    assert said_by_us(text_of(again, "stderr")) == []


def test_cells_that_are_run_again_give_the_same(notebook: list[Any], laptop: Run) -> None:
    weights = [
        json.loads(text_of(cell, "stdout").removeprefix("weights "))
        for cell, name in zip(notebook, ORDER, strict=True)
        if name == "train"
    ]
    assert weights[0] == weights[1] == laptop.found[0]["weights"]


def test_ctrl_c_in_a_cell_loses_nothing(notebook: list[Any]) -> None:
    *_, interrupted, afterwards = notebook
    assert [output.ename for output in interrupted.outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    assert text_of(afterwards, "stdout") == "steps 2\nsteps 10\n"


def test_ctrl_c_lets_all_ranks_stop_after_the_same_step_and_save(tmp_path: Path) -> None:
    """The script catches it, saves, trains on, and catches the next one."""
    command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--log-dir", "logs"]
    process = subprocess.Popen(
        [*command, str(SCRIPT.with_name("until_interrupted.py"))],
        cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in (0, 1)), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert (process.returncode, err.splitlines()[-1]) == (130, "keras-dist: stopped by SIGINT.")
    stopped = [re.findall(r"^(apart|together) after (\d+) (\w+)$", log, re.MULTILINE) for log in logs]
    assert stopped[0] == stopped[1], logs
    apart, saved_apart, together, saved_together = stopped[0]
    assert apart == saved_apart
    assert together == saved_together
    assert apart[:2] == ("apart", "36")
    assert together[0] == "together"
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["apart.keras", "together.keras"]


ONE_IS_ASKED = """
import os, signal, sys
import keras, numpy as np
import keras_dist as kd

class Ask(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if kd.rank() == 1 and epoch == 2:
            for _ in range(int(sys.argv[1])):
                os.kill(os.getpid(), signal.SIGINT)

kd.init()
x = np.ones([64, 4])
model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=10**6, verbose=0, callbacks=[Ask()])
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_on_one_rank_only_ends_all(tmp_path: Path, times: int) -> None:
    """It waits for the others in vain, unless asked twice, then stops alone. They are told why."""
    script = tmp_path / "script.py"
    script.write_text(ONE_IS_ASKED)
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--log-dir", "logs", str(script), str(times)],
        cwd=tmp_path, env=environ(KERAS_DIST_LOG="debug"), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    chief, asked = ((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert done.returncode != 0
    assert "PeerLostError: Rank 1 has failed, so rank 0 of 2 can't continue.\nReceived: KeyboardInterrupt" in chief
    has_waited = "keras_dist [1] DEBUG: stopped by Ctrl-C, though not all ranks are" in asked
    assert has_waited == (times == 1)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- What is said ---


def test_by_default_one_line_is_said(seeded: Run) -> None:
    """On the chief; the other rank says nothing at all."""
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
OF_THE_CHIEF = [
    r"model\.save: wrote two/\d+-3\.keras atomically",
    r"model\.save: wrote two/\d+\.keras atomically",
]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_debug_run_tells_each_decision(unseeded: Run, rank: int) -> None:
    """Each line with the rank that says it."""
    prefix = f"keras_dist [{rank}] DEBUG: "
    said = [line.removeprefix(prefix) for line in unseeded.printed[rank].splitlines() if line.startswith(prefix)]
    for decision in [*DECISIONS, *(OF_THE_CHIEF if rank == 0 else [])]:
        assert [line for line in said if re.fullmatch(decision.format(rank=rank), line)], f"{decision} not in {said}"
    others = [line for line in said_by_us(unseeded.printed[rank]) if prefix not in line]
    assert others == ([CLUSTER_LINE] if rank == 0 else [])
