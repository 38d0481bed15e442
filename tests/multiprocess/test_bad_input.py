"""Errors in a call, on one rank, or of a machine have a problem, what was received, and a remedy."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.backends import BACKENDS
from keras_dist.testing import WorkerError
from tests.multiprocess.launches import ROOT, RUN, found, logs_of, output_of, run

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]
HOST = "no-such-keras-dist-host"


def python_without(folder: Path, package: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a Python that lacks one package."""
    folder.mkdir()
    for packages in {Path(path) for path in sys.path if path.endswith("site-packages")}:
        for entry in packages.iterdir():
            if not entry.name.startswith(package) and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return [sys.executable, "-S"], {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


ON_TENSORFLOW = (
    'Set KERAS_BACKEND=tensorflow before Keras is imported, or "backend": "tensorflow" in ~/.keras/keras.json.'
)
KNOWN = f"Use one of {', '.join(map(repr, ['auto', *BACKENDS]))}."
LAUNCHED = "dict(HOROVOD_RANK='0', HOROVOD_SIZE='2', HOROVOD_LOCAL_RANK='0'"
OPTIONS = "compression, op, hierarchical_allreduce, fusion_threshold_mb, cycle_time_ms, devices"

# What a process without Horovod calls, one after the other; the problem, what was received, the remedy. What a script
# may not pass to `kd.distribute` and `kd.reduce`, rows of the promised cases have.
REFUSED = [
    ("kd.rank()", "keras_dist is not initialized.", "a call before kd.init()",
     "Call kd.init() first, at the top of the script."),
    ("kd.init('mpi')", "Unknown backend.", "backend='mpi'", KNOWN),
    ("with_environ(dict(KERAS_DIST_BACKEND='mpi'))", "Unknown backend.", "backend='mpi'", KNOWN),
    ("kd.init(4)", "`backend` must be a name or a backend object.", "backend=4", "For example kd.init('horovod')."),
    ("kd.init('horovod', compresion='fp16')", "The backend 'horovod' does not have these options.",
     "compresion='fp16'", f"Its options: {OPTIONS}. See help(kd.Horovod)."),
    ("kd.init('serial', compression='fp16')", "The backend 'serial' does not have these options.",
     "compression='fp16'", "Its options: none. See help(kd.Serial)."),
    ("kd.init(kd.Serial(), compression='fp16')",
     "kd.init() takes options only with the name of a backend, not with a backend object.",
     "backend=Serial(), {'compression': 'fp16'}", "Pass the options to the object: kd.init(Serial(...))."),
    ("kd.Horovod(compression='zip')", "Unknown value for the Horovod option `compression`.", "compression='zip'",
     "Use one of None, 'fp16', 'bf16'."),
    ("kd.Horovod(cycle_time_ms=-1)", "The Horovod option `cycle_time_ms` must be positive.", "cycle_time_ms=-1",
     "Leave it out (None) for Horovod's default."),
    ("on_jax()", "keras_dist trains with Keras on TensorFlow.", "Keras on 'jax'", ON_TENSORFLOW),
    ("with_environ(dict(KERAS_DIST_LOG='loud'))", "Unknown log level.", "KERAS_DIST_LOG=loud",
     "Use one of debug, info, warning, error."),
    ("kd.init('horovod')", "The backend 'horovod' needs a launcher, which tells each process its rank.",
     "a process started by plain `python`",
     "Start the script with `keras-dist run -np N script.py` or `horovodrun -np N python script.py`, "
     "or use backend='auto', which is serial under plain `python`."),
    (f"with_environ({LAUNCHED}, HOROVOD_LOCAL_SIZE='2'))", "Horovod for TensorFlow is not installed.",
     "ModuleNotFoundError: No module named 'horovod'",
     "Build and install it for your TensorFlow with `keras-dist install-horovod`."),
    (f"with_environ({LAUNCHED}))", "The launcher's environment is incomplete: HOROVOD_LOCAL_SIZE must be an integer.",
     "HOROVOD_LOCAL_SIZE=None",
     "Start the script with `keras-dist run -np N train.py` or `horovodrun -np N python train.py`, "
     "or unset the HOROVOD_* variables of an earlier launch."),
    ("[kd.init('serial'), kd.init('serial'), kd.init(), kd.init(kd.Horovod(compression='fp16'))]",
     "kd.init() was called before with another backend or other options. A process cannot change its cluster.",
     "kd.init('horovod', compression='fp16', op='average', hierarchical_allreduce=False, "
     "fusion_threshold_mb=None, cycle_time_ms=None) after kd.init('serial')",
     "Call kd.init() once per process. In a notebook, restart the kernel to change it."),
    ("kd.distribute(keras.Sequential(), data='shard')", "Unknown value for the option `data`.", "data='shard'",
     "Use one of 'split', 'chief', 'sharded'."),
]  # fmt: skip
CALLS = """
import json, os, sys
from unittest import mock
import keras
import keras_dist as kd

def with_environ(variables):
    with mock.patch.dict(os.environ, variables):
        kd.init()

def on_jax():  # as if Keras ran on it; it is not installed
    with mock.patch.object(keras.backend, "backend", lambda: "jax"):
        kd.init()

told = {}
for call in json.loads(sys.argv[1]):
    try:
        eval(call)
    except Exception as error:
        told[call] = [type(error).__name__, str(error)]
print("found:", json.dumps(told))
"""


def test_a_bad_call_is_told_what_is_wrong(tmp_path: Path) -> None:
    command, variables = python_without(tmp_path / "packages", "horovod")
    told = found(output_of(*command, "-c", CALLS, json.dumps([call for call, *_ in REFUSED]), **variables))
    for call, problem, received, remedy in REFUSED:
        kind = "DistributionError" if call == "kd.rank()" else "ConfigurationError"
        assert told.get(call) == [kind, f"{problem}\nReceived: {received}\nRemedy: {remedy}"]


@pytest.mark.parametrize(
    ("package", "variables", "problem", "remedy"),
    [
        ("tensorflow", {}, "TensorFlow is not installed.",
         "Install it with an extra of keras_dist: `pip install '.[cpu]'`, '.[gpu]' or '.[tpu]' in a clone of it."),
        ("torch", {"KERAS_BACKEND": "torch"}, "keras_dist trains with Keras on TensorFlow.", ON_TENSORFLOW),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(
    tmp_path: Path, package: str, variables: dict[str, str], problem: str, remedy: str
) -> None:
    command, path = python_without(tmp_path / "packages", package)
    done = run(*command, "-c", "import keras_dist as kd\nkd.init()", **path, **variables)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"keras_dist.errors.ConfigurationError: {problem}\n"
        f"Received: ModuleNotFoundError: No module named '{package}'\nRemedy: {remedy}\n"
    )


# Of different layers the promised case "stops-different-models" tells.
PLAN = "The ranks would train for different numbers of epochs or steps, and some would wait forever."
SAME_PLAN = r"Pass the same arguments, and data of the same size, to `fit` on every rank\."
SAME_MODEL = (
    r"Build and compile the same model on every rank\. Only files and printing belong under `if kd\.is_chief\(\):`\."
)
MODELS = "The ranks have different models."
DISAGREE = {
    "optimizers": (MODELS, "rank 0 has 'SGD' where rank 1 has 'Adam'", SAME_MODEL),
    "losses": (
        MODELS,
        r"rank 0 has \"loss=Huber\(delta=1.0, reduction='sum_over_batch_size'\)\" "
        r"where rank 1 has \"loss=Huber\(delta=2.0, reduction='sum_over_batch_size'\)\"",
        SAME_MODEL,
    ),
    "metrics": (MODELS, r"rank 0 has \"metrics=\['mae'\]\" where rank 1 has \"metrics=\['mae', 'mse'\]\"", SAME_MODEL),
    "epochs": (PLAN, r"rank 0: {'epochs': 1, 'steps': 4}; rank 1: {'epochs': 2, 'steps': 4}", SAME_PLAN),
    "steps": (PLAN, r"rank 0: {'epochs': 1, 'steps': 4}; rank 1: {'epochs': 1, 'steps': 3}", SAME_PLAN),
    "data": (
        "The ranks read different data, but every rank must pass the same data.",
        r"rank 1 of 2 read a different batch than the rest \(fingerprints [0-9a-f]{6}, [0-9a-f]{6}\)",
        r"Usual causes: .* Set the seed, or let the chief read for all ranks: kd\.distribute\(model, data='chief'\)\. "
        r"If each rank reads its own shard, .*: kd\.distribute\(model, data='sharded'\)\.",
    ),
}  # fmt: skip


def test_ranks_that_disagree_are_told_in_what_and_can_go_on(pools: Any, tmp_path: Path) -> None:
    def disagree() -> dict[str, list[str]]:
        """Returns what each rank is told as it disagrees in one thing after the other; then training continues."""
        os.chdir(tmp_path)
        second = kd.rank()

        def model_of(optimizer: str = "sgd", loss: Any = "mse", metrics: Any = None) -> Any:
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)])
            model = kd.distribute(model)
            model.compile(optimizer, loss, metrics=metrics)
            return model

        def fit(model: Any, count: int = 25, epochs: int = 1, first: float = 0.0) -> None:
            x = np.arange(count * 4).reshape(count, 4) / 100
            x[0, 0] = first
            model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0)

        Path("a-file").touch()  # which nobody, not even root, can write into as if it were a folder
        actions = {
            "optimizers": lambda: fit(model_of(optimizer="adam" if second else "sgd")),
            "losses": lambda: fit(model_of(loss=keras.losses.Huber(1.0 + second))),
            "metrics": lambda: fit(model_of(metrics=["mae", "mse"] if second else ["mae"])),
            "epochs": lambda: fit(model_of(), epochs=1 + second),
            "steps": lambda: fit(model_of(), count=25 - 8 * second),
            "data": lambda: fit(model_of(), first=1.0 * second),
            "unwritable": lambda: model_of().save("somewhere.keras" if second else "a-file/model.keras"),
            "nothing": lambda: fit(model_of()),
        }
        told = {}
        for name, action in actions.items():
            kd.barrier()
            try:
                action()
                told[name] = ["nothing", ""]
            except Exception as error:
                told[name] = [type(error).__name__, str(error)]
        return told

    told, other = pools.get("horovod", 2).run(disagree)
    for case, (problem, received, remedy) in DISAGREE.items():
        assert told[case] == other[case]
        assert told[case][0] == "MismatchError"
        assert re.fullmatch(f"{re.escape(problem)}\nReceived: {received}\nRemedy: {remedy}", told[case][1])
    assert told["unwritable"][0] == "NotADirectoryError"
    assert other["unwritable"] == [
        "DistributionError",
        "The chief could not write the file.\n"
        f"Received: model.save('somewhere.keras') on rank 0: NotADirectoryError: {told['unwritable'][1]}\n"
        "Remedy: Pass a path that rank 0 can write to, on a disk with space left.",
    ]
    assert told["nothing"] == other["nothing"] == ["nothing", ""]


def test_different_options_of_init_are_told(tmp_path: Path) -> None:
    script = "import os, keras_dist as kd; second = os.environ['HOROVOD_RANK'] == '1'; "
    script += "kd.init('horovod', compression='fp16' if second else None, seed=1)"
    done = run(*RUN, "-np", "2", "--log-dir", "logs", "--", sys.executable, "-c", script, folder=tmp_path)
    assert done.returncode == 1
    first, second = (rf"Horovod\(compression={value}, .*\), seed=1" for value in (None, "'fp16'"))
    for log in logs_of(tmp_path):
        assert "MismatchError: The ranks called kd.init() with different arguments.\n" in log
        assert re.search(f"Received: rank 0: {first}; rank 1: {second}\n", log)
        assert "Remedy: Pass the same backend, options and seed on every rank.\n" in log


def in_own_folder(common: str, loads: bool = False) -> Any:
    """As on two hosts: training is broken off, resumed from a backup and saved. Or loads what the chief has saved."""
    own = Path(common, f"host-{kd.rank()}")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    x = np.random.RandomState(0).normal(size=(25, 4))

    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if epoch == 2:
                raise RuntimeError("power cut")

    def train(*callbacks: keras.callbacks.Callback) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, x.sum(1), batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
        return model

    whole = train()
    if loads:
        whole.load_weights("model.keras")
    with contextlib.suppress(RuntimeError):
        train(keras.callbacks.BackupAndRestore("backup"), Break())
    resumed = train(keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False))
    resumed.save("model.keras")
    weights = [[weight.tolist() for weight in model.get_weights()] for model in (whole, resumed)]
    return weights, sorted(str(path) for path in Path().iterdir())


def test_ranks_without_a_folder_in_common(pools: Any, tmp_path: Path) -> None:
    """A backup needs none, as the chief sends it to all. The error names a rank that lacks a file."""
    ranks = pools.get("horovod", 2).run(in_own_folder, str(tmp_path))
    for (whole, resumed), _ in ranks:
        assert resumed == whole == ranks[0][0][0]
    assert [files for _, files in ranks] == [["backup", "model.keras"], []]
    with pytest.raises(WorkerError, match="(?s)Rank 1 raised.*No such file or directory"):
        pools.get("horovod", 2).run(in_own_folder, str(tmp_path), True)


def test_a_host_whose_name_has_no_address(tmp_path: Path) -> None:
    """Without our patch of Horovod, Gloo would crash silently. The host is this one, under another name."""
    renamed = ["unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOST]
    if subprocess.run([*renamed, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody give a process another host name (unshare --uts)")
    command = [*renamed, *RUN, "-np", "2", "--", sys.executable, "-c"]
    script = "import keras_dist as kd; kd.init(); kd.barrier(); print('together', kd.size())"
    assert output_of(*command, script) == "together 2\n"
    done = run(*command, f"import horovod; del horovod.patched_by_keras_dist; {script}")
    assert done.returncode == 1
    assert "The name of this host has no address. This Horovod's Gloo needs one, and would crash." in done.stderr
    assert f"Received: host name '{HOST}'" in done.stderr
    assert f"with a line of /etc/hosts: 127.0.1.1, and {HOST}." in done.stderr


def test_a_generator_that_predicts_is_told_how(pools: Any) -> None:
    def train_on_predictions() -> None:
        """As in distillation: the labels are what a distributed model predicts. Only the chief reads a generator."""

        def compiled() -> Any:
            model = kd.distribute(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]))
            model.compile("sgd", "mse")
            return model

        teacher, x = compiled(), np.ones((8, 3))
        compiled().fit(((x, teacher.predict_on_batch(x)) for _ in range(20)), verbose=0)

    says = r"(?s)All ranks must make this call together.*predict_on_batch\(\) of 'sequential' in the thread "
    says += r"'.*', beside fit\(\)\nRemedy: Call the model itself, model\(x, training=False\)"
    with pytest.raises(WorkerError, match=says):
        pools.get("horovod", 2).run(train_on_predictions)
