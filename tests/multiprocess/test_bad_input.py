"""Errors in a script, in a call, on one rank or on the chief's disk have a problem and a remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_dist.backends import BACKENDS
from keras_dist.testing import WorkerError

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("scripts")

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]
HOST = "no-such-keras-dist-host"


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **more}


def python_without(folder: Path, package: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a Python that lacks one package."""
    folder.mkdir()
    for packages in {Path(path) for path in sys.path if path.endswith("site-packages")}:
        for entry in packages.iterdir():
            if not entry.name.startswith(package) and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return [sys.executable, "-S"], environ(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


# --- One process ---


ON_TENSORFLOW = (
    'Set KERAS_BACKEND=tensorflow before Keras is imported, or "backend": "tensorflow" in ~/.keras/keras.json.'
)
BEFORE = "Call kd.init() first, at the top of the script."
KNOWN = f"Use one of {', '.join(map(repr, ['auto', *BACKENDS]))}."
AFTER = "kd.init() was called before with another backend or other options. A process cannot change its cluster."
KEEP = "Call kd.init() once per process. In a notebook, restart the kernel to change it."
OPTIONS = "compression, op, hierarchical_allreduce, fusion_threshold_mb, cycle_time_ms"

REFUSED = {
    "rank before init": ("DistributionError", "keras_dist is not initialized.", "a call before kd.init()", BEFORE),
    "distribute before init": (
        "DistributionError", "keras_dist is not initialized.", "a call before kd.init()", BEFORE,
    ),
    "unknown backend": ("ConfigurationError", "Unknown backend.", "backend='mpi'", KNOWN),
    "unknown backend in the environment": ("ConfigurationError", "Unknown backend.", "backend='mpi'", KNOWN),
    "backend of another type": (
        "ConfigurationError", "`backend` must be a name or a backend object.", "backend=4",
        "For example kd.init('horovod').",
    ),
    "unknown option": (
        "ConfigurationError", "The backend 'horovod' does not have these options.", "compresion='fp16'",
        f"Its options: {OPTIONS}. See help(kd.Horovod).",
    ),
    "option of a backend without options": (
        "ConfigurationError", "The backend 'serial' does not have these options.", "compression='fp16'",
        "Its options: none. See help(kd.Serial).",
    ),
    "options beside a backend": (
        "ConfigurationError", "kd.init() takes options only with the name of a backend, not with a backend object.",
        "backend=Serial(), {'compression': 'fp16'}", "Pass the options to the object: kd.init(Serial(...)).",
    ),
    "unknown value of an option": (
        "ConfigurationError", "Unknown value for the Horovod option `compression`.", "compression='zip'",
        "Use one of None, 'fp16', 'bf16'.",
    ),
    "negative value of an option": (
        "ConfigurationError", "The Horovod option `cycle_time_ms` must be positive.", "cycle_time_ms=-1",
        "Leave it out (None) for Horovod's default.",
    ),
    "another backend of Keras": (
        "ConfigurationError", "keras_dist trains with Keras on TensorFlow.", "Keras on 'jax'", ON_TENSORFLOW,
    ),
    "unknown log level": (
        "ConfigurationError", "Unknown log level.", "KERAS_DIST_LOG=loud", "Use one of debug, info, warning, error.",
    ),
    "horovod without a launcher": (
        "ConfigurationError", "The backend 'horovod' needs a launcher, which tells each process its rank.",
        "a process started by plain `python`",
        "Start the script with `keras-dist run -np N script.py` or `horovodrun -np N python script.py`, "
        "or use backend='auto', which is serial under plain `python`.",
    ),
    "horovod without Horovod": (
        "ConfigurationError", "Horovod for TensorFlow is not installed.",
        "ModuleNotFoundError: No module named 'horovod'",
        "Build and install it for your TensorFlow with `keras-dist install-horovod`.",
    ),
    "half of a launcher's environment": (
        "ConfigurationError", "The launcher's environment is incomplete: HOROVOD_LOCAL_SIZE must be an integer.",
        "HOROVOD_LOCAL_SIZE=None",
        "Start the script with `keras-dist run -np N train.py` or `horovodrun -np N python train.py`, "
        "or unset the HOROVOD_* variables of an earlier launch.",
    ),
    "another backend after init": ("ConfigurationError", AFTER, "kd.init('horovod') after kd.init('serial')", KEEP),
    "a backend with options after init": (
        "ConfigurationError", AFTER,
        "kd.init('horovod', compression='fp16', op='average', hierarchical_allreduce=False, "
        "fusion_threshold_mb=None, cycle_time_ms=None) after kd.init('serial')", KEEP,
    ),
    "distribute a layer": (
        "ConfigurationError", "Only a Keras model or optimizer can be distributed.",
        "keras.src.layers.core.dense.Dense",
        "Pass a keras.Model, compiled or not. Models of tf_keras (Keras 2) are not supported.",
    ),
    "unknown kind of data": (
        "ConfigurationError", "Unknown value for the option `data`.", "data='shard'",
        "Use one of 'split', 'chief', 'sharded'.",
    ),
    "unknown reduction": ("ConfigurationError", "Unknown reduction.", "op='max'", "Use one of 'sum', 'mean'."),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The errors of one process without Horovod, by call."""
    command, variables = python_without(tmp_path_factory.mktemp("python") / "packages", "horovod")
    done = subprocess.run(
        [*command, str(SCRIPTS / "bad_calls.py")], env=variables, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1].removeprefix("told: "))
    return found


@pytest.mark.parametrize("call", REFUSED)
def test_a_bad_call_is_told_what_is_wrong(told: dict[str, list[str]], call: str) -> None:
    kind, problem, received, remedy = REFUSED[call]
    assert told[call] == [kind, f"{problem}\nReceived: {received}\nRemedy: {remedy}"]


def test_every_bad_call_is_among_them(told: dict[str, list[str]]) -> None:
    assert told.keys() == REFUSED.keys()


def test_without_tensorflow_the_extras_are_named(tmp_path: Path) -> None:
    command, variables = python_without(tmp_path / "packages", "tensorflow")
    done = subprocess.run(
        [*command, "-c", "import keras_dist as kd\nkd.init()"],
        env=variables, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith(
        "keras_dist.errors.ConfigurationError: TensorFlow is not installed.\n"
        "Received: ModuleNotFoundError: No module named 'tensorflow'\n"
        "Remedy: Install it with an extra of keras_dist: `pip install '.[cpu]'`, '.[gpu]' or '.[tpu]' in a clone "
        "of it.\n"
    )


def test_keras_on_another_backend_is_refused(tmp_path: Path) -> None:
    command, variables = python_without(tmp_path / "packages", "torch")
    done = subprocess.run(
        [*command, "-c", "import keras_dist as kd\nkd.init()"],
        env={**variables, "KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith(
        "keras_dist.errors.ConfigurationError: keras_dist trains with Keras on TensorFlow.\n"
        f"Received: ModuleNotFoundError: No module named 'torch'\nRemedy: {ON_TENSORFLOW}\n"
    )


# --- Several ranks ---


PLAN = "The ranks would train for different numbers of epochs or steps, and some would wait forever."
SAME_PLAN = "Pass the same arguments, and data of the same size, to `fit` on every rank."
SAME_MODEL = "Build and compile the same model on every rank. Only files and printing belong under `if kd.is_chief():`."

DISAGREE = {
    "models": (
        "MismatchError", "The ranks have different models.",
        r"rank 0 has \('kernel', \(4, 3\), 'float32'\) where rank 1 has \('kernel', \(4, 4\), 'float32'\)",
        re.escape(SAME_MODEL),
    ),
    "optimizers": (
        "MismatchError", "The ranks have different models.", "rank 0 has 'SGD' where rank 1 has 'Adam'",
        re.escape(SAME_MODEL),
    ),
    "losses": (
        "MismatchError", "The ranks have different models.",
        r"rank 0 has \"loss=Huber\(delta=1.0, reduction='sum_over_batch_size'\)\" "
        r"where rank 1 has \"loss=Huber\(delta=2.0, reduction='sum_over_batch_size'\)\"",
        re.escape(SAME_MODEL),
    ),
    "metrics": (
        "MismatchError", "The ranks have different models.",
        r"rank 0 has \"metrics=\['mae'\]\" where rank 1 has \"metrics=\['mae', 'mse'\]\"", re.escape(SAME_MODEL),
    ),
    "epochs": (
        "MismatchError", PLAN,
        r"rank 0: {'epochs': 1, 'steps': 4}; rank 1: {'epochs': 2, 'steps': 4}", re.escape(SAME_PLAN),
    ),
    "steps": (
        "MismatchError", PLAN,
        r"rank 0: {'epochs': 1, 'steps': 4}; rank 1: {'epochs': 1, 'steps': 3}", re.escape(SAME_PLAN),
    ),
    "data": (
        "MismatchError", "The ranks read different data, but every rank must pass the same data.",
        r"rank 1 of 2 read a different batch than the rest \(fingerprints [0-9a-f]{6}, [0-9a-f]{6}\)",
        r"Usual causes: .* Set the seed, or let the chief read for all ranks: kd\.distribute\(model, data='chief'\)\. "
        r"If each rank reads its own shard, .*: kd\.distribute\(model, data='sharded'\)\.",
    ),
    "calls": (
        "MismatchError", "The ranks are in different calls, but all ranks must make the same call.",
        r"rank 0 called model\.fit \(start\); rank 1 called kd\.barrier\(\)",
        r"Make the call on every rank: move it out of `if kd\.is_chief\(\):` .*, and run the same script "
        r"on the same data on all ranks\.",
    ),
}  # fmt: skip


def run(folder: Path, *target: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs two ranks in a folder. Returns the finished launcher, and the log of each rank."""
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--log-dir", "logs", *target],
        cwd=folder, env=environ(**variables), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    return done, [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def disagreed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """The errors of each of two ranks, by case."""
    folder = tmp_path_factory.mktemp("disagree")
    done, _ = run(folder, str(SCRIPTS / "disagree.py"))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_that_disagree_are_told_in_what(disagreed: list[dict[str, list[str]]], case: str) -> None:
    """The same on both ranks."""
    kind, problem, received, remedy = DISAGREE[case]
    assert disagreed[0][case] == disagreed[1][case]
    assert disagreed[0][case][0] == kind
    assert re.fullmatch(f"{re.escape(problem)}\nReceived: {received}\nRemedy: {remedy}", disagreed[0][case][1])


def test_all_ranks_are_told_that_the_chief_could_not_write(disagreed: list[dict[str, list[str]]]) -> None:
    (kind, text), (other_kind, other_text) = (told["unwritable"] for told in disagreed)
    assert kind == "NotADirectoryError"
    assert other_kind == "DistributionError"
    problem, received, remedy = other_text.splitlines()
    assert problem == "The chief could not write the file."
    assert received == f"Received: model.save('somewhere.keras') on rank 0: NotADirectoryError: {text}"
    assert remedy == "Remedy: Pass a path that rank 0 can write to, on a disk with space left."


def test_init_in_a_child_process_of_a_rank_is_refused(disagreed: list[dict[str, list[str]]]) -> None:
    problem, received, remedy = disagreed[0]["child"][1].splitlines()[-3:]
    assert problem.endswith("ConfigurationError: kd.init() was called in a child process of a rank.")
    assert re.fullmatch(r"Received: process \d+, started by rank process \d+", received)
    assert remedy.startswith("Remedy: Put the script's body under `if __name__ == '__main__':`")


def test_ranks_that_have_disagreed_can_go_on(disagreed: list[dict[str, list[str]]]) -> None:
    assert [told["nothing"] for told in disagreed] == [["nothing", ""], ["nothing", ""]]


def test_different_scripts_are_told_by_their_calls(tmp_path: Path) -> None:
    begin = "import keras, keras_dist as kd, numpy as np\nkd.init()\nx = np.ones([8, 4])\n" \
        "model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))\n" \
        "model.compile('sgd', 'mse')\n"  # fmt: skip
    (tmp_path / "script-0.py").write_text(begin + "model.fit(x, x[:, :1], verbose=0)\n")
    (tmp_path / "script-1.py").write_text(begin + "model.predict(x, verbose=0)\n")
    done, logs = run(tmp_path, "--", "sh", "-c", f"exec {sys.executable} script-$HOROVOD_RANK.py")
    assert done.returncode == 1
    for log in logs:
        assert "MismatchError: The ranks are in different calls, but all ranks must make the same call." in log
        assert "Received: rank 0 called model.fit (start); rank 1 called model.predict\n" in log


def test_different_options_of_init_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nimport keras_dist as kd\n"
        "kd.init('horovod', compression='fp16' if os.environ['HOROVOD_RANK'] == '1' else None, seed=1)\n"
    )
    done, logs = run(tmp_path, str(script))
    assert done.returncode == 1
    for log in logs:
        assert "MismatchError: The ranks called kd.init() with different arguments.\n" in log
        first, second = (rf"Horovod\(compression={value}, .*\), seed=1" for value in (None, "'fp16'"))
        assert re.search(f"Received: rank 0: {first}; rank 1: {second}\n", log)
        assert "Remedy: Pass the same backend, options and seed on every rank.\n" in log


def test_a_full_disk_of_the_chief_ends_all(tmp_path: Path, full_folder: tuple[Path, int]) -> None:
    folder, limit = full_folder
    done, (chief, other) = run(tmp_path, str(SCRIPTS / "checkpoints.py"), str(folder), str(limit))
    assert done.returncode == 1
    assert "rank 0 exited with code 1" in done.stderr.splitlines()[-1]
    (error,) = re.findall(r"^OSError: (.*(?:No space left on device|File too large).*)$", chief, re.MULTILINE)
    assert "PeerLostError: Rank 0 has failed, so rank 1 of 2 can't continue.\n" in other
    assert f"Received: OSError: {error}\n" in other
    assert "Remedy: Fix the error on rank 0.\n" in other
    assert "trained to the end" not in chief + other
    assert list(folder.iterdir()) == []


def test_ranks_without_a_folder_in_common(tmp_path: Path) -> None:
    """A backup needs none, as the chief sends it to all. The error names a rank that lacks a file."""
    done, (_, other) = run(tmp_path, str(SCRIPTS / "own_folders.py"))
    found: list[Any] = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    for whole, resumed in (one["weights"] for one in found):
        assert resumed == whole == found[0]["weights"][0]
    assert [one["files"] for one in found] == [["backup", "model.keras"], []]
    assert done.returncode == 1
    assert "No such file or directory" in other
    assert "rank 1 exited with code 1" in done.stderr.splitlines()[-1]


def test_a_host_whose_name_has_no_address(tmp_path: Path) -> None:
    """Without our patch of Horovod, Gloo would crash silently. The host is this one, under another name."""
    renamed = ["unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOST]
    if subprocess.run([*renamed, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody give a process another host name (unshare --uts)")
    script = tmp_path / "train.py"
    script.write_text("import keras_dist as kd\nkd.init()\nkd.barrier()\nprint('together', kd.size())\n")
    command = [*renamed, sys.executable, "-m", "keras_dist", "run", "-np", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "together 2\n"), done.stderr
    script.write_text("import horovod\ndel horovod.patched_by_keras_dist\n" + script.read_text())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "The name of this host has no address. This Horovod's Gloo needs one, and would crash." in done.stderr
    assert "Received: host name 'no-such-keras-dist-host'" in done.stderr
    assert "with a line of /etc/hosts: 127.0.1.1, and no-such-keras-dist-host." in done.stderr


def train_on_predictions() -> None:
    """As in distillation: the labels are what a distributed model predicts. Only the chief reads a generator."""
    import keras
    import numpy as np

    import keras_dist as kd

    def compiled() -> Any:
        model = kd.distribute(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        return model

    teacher, x = compiled(), np.ones((8, 3))
    compiled().fit(((x, teacher.predict_on_batch(x)) for _ in range(20)), verbose=0)


def test_a_generator_that_predicts_is_told_how(pools: Any) -> None:
    says = r"(?s)All ranks must make this call together.*predict_on_batch\(\) of 'sequential' in the thread "
    says += r"'.*', beside fit\(\)\nRemedy: Call the model itself, model\(x, training=False\)"
    with pytest.raises(WorkerError, match=says):
        pools.get("horovod", 2).run(train_on_predictions)
