"""The examples, and the script of the README, by the real command line: each prints what one process prints."""

import ast
import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from keras_dist.launcher.nodes import free_ports
from tests.forks import ForkServer
from tests.multiprocess.launches import EXAMPLES, ROOT, RUN, Commands, assert_close, finished, found, output_of

sys.path.insert(0, str(ROOT / "docs"))

import make_terminal

pytestmark = pytest.mark.timeout(600)
TWO = [*RUN, "-np", "2"]
SERVERS = [*RUN, "--workers", "2", "--ps", "2"]
README = (ROOT / "README.md").read_text()
NO_KERAS_DIST = "import sys; sys.modules['keras_dist'] = None\n"  # importing it raises


def numbers(pattern: str, output: str) -> list[list[float]]:
    """Returns the numbers of each line that matches as a whole."""
    lines = re.finditer(rf"^{pattern}$", output, re.MULTILINE)
    return [[float(number) for number in line.groups()] for line in lines]


@pytest.mark.ci
def test_both_scripts_of_the_readme_give_the_same_numbers(forks: ForkServer, tmp_path: Path) -> None:
    plain, distributed = make_terminal.scripts(README)
    assert make_terminal.commands(README) == ["python train.py", "keras-dist run -np 2 train.py"]
    (tmp_path / "train.py").write_text(distributed)
    printed = []
    for run in (
        lambda: forks.run(NO_KERAS_DIST + plain, tmp_path).stdout,
        lambda: forks.run(distributed, tmp_path).stdout,
        lambda: output_of(*TWO, "train.py", folder=tmp_path),
    ):
        printed.append([float(number) for number in re.findall(r"(?:accuracy|loss): ([\d.e+-]+)", run())])
        (tmp_path / "digits.keras").unlink()
    assert len(printed[0]) == 4 * 4  # epochs, numbers of each
    assert printed[1] == pytest.approx(printed[0], abs=2e-4)  # 4 digits are shown
    assert printed[2] == pytest.approx(printed[0], abs=2e-4)


# Trains with the plain script, then evaluates and reads what the distributed one has written.
PLAIN_DIGITS = NO_KERAS_DIST + """
import json, runpy
from pathlib import Path
import keras
keras.config.set_floatx("float64")  # as `keras.json` says, which the process that forks has not read
folder, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["digits.py", "--output", "plain", *arguments]
runpy.run_path(str(Path(folder) / "digits.py"), run_name="__main__")

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


def history(folder: Path) -> dict[str, list[float]]:
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def written(folder: Path) -> list[str]:
    """Returns the files of a folder, without the times in their names."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [re.sub(r"\d{8}-\d{6}|tfevents\..*|-00000-of-00001", "*", name) for name in names]


@pytest.mark.ci
def test_digits(forks: ForkServer, tmp_path: Path) -> None:
    """In float64: in float32 the plain script differs from itself by 1 % with other numbers of threads."""
    (tmp_path / "keras.json").write_text(json.dumps({"floatx": "float64"}))
    arguments = ["--epochs", "3", "--seed", "1", "--data-dir", "data"]
    home = {"KERAS_HOME": str(tmp_path)}
    # First, so that the ranks find no data set and one of them has to make it.
    command = [*TWO, EXAMPLES / "digits_distributed.py", "--output", "distributed", *arguments]
    output = output_of(*command, folder=tmp_path, **home)
    plain = forks.run(PLAIN_DIGITS, tmp_path, str(EXAMPLES), *arguments, **home).stdout

    ((accuracy,),) = numbers(r"test accuracy: (0\.\d{4}|1\.0000)", output)
    assert accuracy > 0.9  # after 3 epochs; 0.98 or more after all
    assert written(tmp_path / "distributed") == [
        "best.keras", "history.csv", "model.keras", "tensorboard/*/train/events.out.*",
        "tensorboard/*/validation/events.out.*",
    ]  # fmt: skip
    assert len([*(tmp_path / "distributed" / "tensorboard").iterdir()]) == 1
    (prepared,) = (tmp_path / "data" / "digits").iterdir()
    tables = ["dataset_info.json", "digits-test.tfrecord*", "digits-train.tfrecord*", "features.json"]
    assert written(prepared) == tables

    logged = history(tmp_path / "distributed")
    assert logged["epoch"] == [0, 1, 2]
    assert_close(logged, history(tmp_path / "plain"), atol=0)
    loaded = found(plain)
    assert loaded["model.keras"] == pytest.approx(accuracy, abs=1e-4)
    assert loaded["best.keras"] > 0.9
    assert_close([loaded["train"], loaded["validation"]], [logged["loss"], logged["val_loss"]], rtol=1e-6)


@pytest.mark.full
def test_contrastive_compares_the_whole_batch(tmp_path: Path) -> None:
    script = [EXAMPLES / "contrastive.py", "--epochs", "2", "--data-dir", "data"]
    outputs = [output_of(*launcher, *script, folder=tmp_path) for launcher in ([sys.executable], TWO)]
    pattern = r"loss: ([\d.]+), test loss: ([\d.]+), nearest neighbour: ([\d.]+)"
    (one,), (two,) = (numbers(pattern, output) for output in outputs)
    assert two == one
    assert one[0] < 4  # 4.85 is the loss of vectors by chance
    assert one[2] > 0.9


@pytest.mark.full
def test_a_custom_loop(tmp_path: Path) -> None:
    """1,797 images in batches of 64: the last batch has 5, which two ranks do not divide."""
    script = [EXAMPLES / "custom_loop.py", "--epochs", "2"]
    outputs = [output_of(*RUN, "-np", ranks, *script, folder=tmp_path) for ranks in "12"]
    one, two = (numbers(r"epoch (\d+): last batch's loss (\d+\.\d{6}), accuracy (\d\.\d{4})", out) for out in outputs)
    assert [epoch for epoch, *_ in one] == [1, 2]
    assert_close(two, one, rtol=0, atol=1e-5)


@pytest.mark.full
def test_multi_worker_in_two_shells_and_by_the_launcher(commands: Commands) -> None:
    """As its docstring says to run it, with this Python and ports that are free."""
    example = EXAMPLES / "multi_worker.py"
    text = ast.get_docstring(ast.parse(example.read_text())) or ""
    python = shlex.quote(sys.executable)
    for before, after in (
        *zip(("2222", "2223"), map(str, free_ports(2)), strict=True),
        ("keras-dist run", f"{python} -m keras_dist run"), (" python ", f" {python} "),
        ("examples/multi_worker.py", shlex.quote(str(example))),
    ):  # fmt: skip
        text = text.replace(before, after)
    config, first, second, launcher = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    pattern = r"epoch (\d+): loss (\d+\.\d{6}), accuracy (\d\.\d{4})"
    plain = numbers(pattern, output_of(sys.executable, example))
    assert [epoch for epoch, *_ in plain] == [1, 2, 3, 4, 5]
    assert plain[-1][1] < plain[0][1] / 2
    shells = [commands("bash", "-c", f"{config}; {line}") for line in (first, second)]
    outputs = [finished(shell, 140) for shell in shells]
    assert [code for code, *_ in outputs] == [0, 0], outputs
    chief, other = (numbers(pattern, out) for _, out, _ in outputs)
    assert other == []
    assert_close([chief, numbers(pattern, output_of("bash", "-c", launcher))], [plain, plain], rtol=0, atol=1e-4)


@pytest.mark.full
def test_mirrored_trains_the_same_on_one_device_and_on_two(tmp_path: Path) -> None:
    losses = []
    for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
        output = output_of(
            sys.executable, EXAMPLES / "mirrored.py", "--epochs", "1", "--devices", *devices, folder=tmp_path
        )
        assert output.splitlines()[0] == f"{len(devices)} devices"
        losses += numbers(r"loss: ([\d.]+), validation accuracy: [\d.]+", output)[-1]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0] < 2.3  # that of a guess


@pytest.mark.full
def test_large_tables_stay_on_the_host(tmp_path: Path) -> None:
    output = output_of(sys.executable, EXAMPLES / "large_tables.py", "--devices", "CPU:1", "CPU:2", folder=tmp_path)
    assert output.splitlines()[:2] == ["table_0/embeddings: CPU:0", "table_1/embeddings: CPU:0"]
    ((_, validation),) = numbers(r"loss: ([\d.]+), validation loss: ([\d.]+)", output)
    assert validation < 0.1  # it is 4 for a guess


@pytest.mark.full
@pytest.mark.parametrize("reads", ["the workers", "the coordinator"])
def test_a_wide_embedding_on_parameter_servers(tmp_path: Path, reads: str) -> None:
    """From files that workers read, or the made-up log that the coordinator has, whose best AUC is printed."""
    example = [EXAMPLES / "wide_embedding.py", "--rows", "20000", "--batch", "128", "--epochs", "2"]
    source = ["--examples", "8000"]
    if reads == "the workers":
        output_of(sys.executable, example[0], "--write", "log", *source, folder=tmp_path)
        assert len(list((tmp_path / "log").glob("train-*.csv"))) == 4
        source = ["--dataset", "log"]
    outputs = [
        output_of(*launcher, *example, *source, folder=tmp_path, TF_NUM_INTRAOP_THREADS="1")
        for launcher in ([sys.executable], SERVERS)
    ]
    (one,), (servers,) = (numbers(r"test loss: (\d\.\d{4}), AUC: (\d\.\d{4})", output) for output in outputs)
    assert one[1] > 0.65  # 0.5 is a guess
    assert servers == pytest.approx(one, abs=0.02 if reads == "the workers" else 2e-3)
    if reads == "the coordinator":
        for output, (_, auc) in zip(outputs, (one, servers), strict=True):
            ((best,),) = numbers(r"best possible AUC: (\d\.\d{4})", output)
            assert 0.8 < best < 0.9
            assert auc < best + 0.01
