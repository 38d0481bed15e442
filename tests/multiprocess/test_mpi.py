"""Horovod over Open MPI, by `mpirun`: numbers, Adasum, faults. `make test-mpi` runs this."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.limits import limit
from tests.multiprocess import launches
from tests.multiprocess.launches import (
    CONTRACT_SECONDS,
    SMALL_MODEL,
    Commands,
    assert_close,
    finished,
    processes_of,
    seconds_since,
)


def built_with_mpi() -> bool:
    """True if the installed Horovod is linked with MPI. Importing it would take seconds."""
    found = importlib.util.find_spec("horovod")
    libraries = Path(str(found.origin)).parent.glob("tensorflow/mpi_lib*.so") if found else ()
    return any(b"\0libmpi" in library.read_bytes() for library in libraries)


pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: apt-get install -y openmpi-bin"),
    pytest.mark.skipif(not built_with_mpi(), reason="Horovod was built without MPI: `make test-mpi`"),
]
MPIRUN = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-np"]

TRAIN = f"""
import json, os, signal, sys, time
from pathlib import Path
{SMALL_MODEL}

class Fault(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if kd.rank() == 1 and len(sys.argv) > 1 and epoch == 1:
            (Path(__file__).parent / "failed").write_text(str(time.monotonic()))
            if sys.argv[1] == "raise":
                raise ValueError("this callback is on fire")
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[Fault()])
if kd.is_chief():
    print("found:", json.dumps([weight.tolist() for weight in model.get_weights()]))
"""

ADASUM = """
import json
import keras, numpy as np
import keras_dist as kd
import horovod.tensorflow as hvd
kd.init(kd.Horovod(op="adasum"))
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
model = keras.Sequential([keras.Input([6]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
before = model.get_weights()
model = kd.distribute(model)
model.compile(keras.optimizers.SGD(1.0), "mse")
model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
if kd.is_chief():
    print("found:", json.dumps({
        "before": [w.tolist() for w in before], "after": [w.tolist() for w in model.get_weights()],
        "x": x.tolist(), "y": y.tolist(),
    }))
"""


Ended = tuple[int, str, str]
Run = Callable[..., Ended]


@pytest.fixture
def run(commands: Commands, tmp_path: Path) -> Run:
    """Runs a script; returns the code, stdout and stderr. It must leave no process and no segment of memory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def run(source: str, command: list[str], *arguments: str, **variables: str) -> Ended:
        (tmp_path / "train.py").write_text(source)
        shared = set(Path("/dev/shm").iterdir())
        ended = finished(commands(*command, "train.py", *arguments, TMPDIR=str(temporary), **variables), 120)
        assert processes_of(tmp_path) == set()
        left = [path.name for path in set(Path("/dev/shm").iterdir()) - shared if path.name.startswith("vader")]
        assert (left, [path.name for path in temporary.iterdir()]) == ([], [])
        return ended

    return run


def found(ended: Ended) -> Any:
    code, out, err = ended
    assert code == 0, out + err
    return launches.found(out)


def test_the_numbers_are_those_of_one_process(run: Run) -> None:
    one = found(run(TRAIN, [sys.executable]))
    by_mpirun = run(TRAIN, [*MPIRUN, "2", sys.executable])
    assert "keras_dist: horovod (2 ranks, CPU; started by mpirun)" in by_mpirun[2]
    assert_close(found(by_mpirun), one)


@pytest.mark.parametrize("size", [2, 4])
def test_adasum_is_that_of_the_paper(run: Run, size: int) -> None:
    """One step of SGD with learning rate 1 subtracts the combined gradient."""
    values = found(run(ADASUM, [*MPIRUN, str(size), sys.executable]))
    x, y = np.array(values["x"]), np.array(values["y"])
    before = [np.array(weight) for weight in values["before"]]
    gradients = [gradients_of(before, *share) for share in zip(np.split(x, size), np.split(y, size), strict=True)]
    for index, (old, new) in enumerate(zip(before, values["after"], strict=True)):
        of_ranks = [gradient[index] for gradient in gradients]
        np.testing.assert_allclose(old - np.array(new), adasum(of_ranks), rtol=1e-9, atol=1e-9)
        # Neither the mean nor the sum, which a wrong operation would give.
        for other in (np.mean(of_ranks, 0), np.sum(of_ranks, 0)):
            assert np.abs(adasum(of_ranks) - other).max() > 1e-3


def test_adasum_of_several_devices_of_a_rank_is_refused(run: Run) -> None:
    source = "import keras_dist as kd; kd.init(kd.Horovod(op='adasum', devices=['CPU:0', 'CPU:1']))"
    code, _, err = run(source, [*MPIRUN, "2", sys.executable])
    assert code == 1
    assert (
        "Adasum combines the gradients of ranks, each of which has one device.\n"
        "Received: op='adasum' on 2 devices of each rank\nRemedy: Start a rank for each device"
    ) in err


def gradients_of(weights: list[Any], x: Any, y: Any) -> list[Any]:
    """Returns the gradients of the mean squared error, by hand."""
    kernel, bias, kernel_2, bias_2 = weights
    hidden = np.tanh(x @ kernel + bias)
    error = 2 * (hidden @ kernel_2 + bias_2 - y) / y.size
    inner = error @ kernel_2.T * (1 - hidden**2)
    return [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]


def adasum(gradients: list[Any]) -> Any:
    """Maleki et al. 2020, https://arxiv.org/abs/2006.02924: neighbours first, then the pairs of them."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    product = np.sum(a * b)
    return (1 - product / (2 * np.sum(a * a))) * a + (1 - product / (2 * np.sum(b * b))) * b


def test_what_horovod_would_ignore_is_refused(run: Run) -> None:
    source = "import keras_dist as kd; kd.init(kd.Horovod(hierarchical_allreduce=True))"
    code, _, err = run(source, [*MPIRUN, "2", sys.executable])
    assert code == 1
    assert "The option `hierarchical_allreduce` needs a Horovod built with NCCL and MPI." in err


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_a_fault(run: Run, tmp_path: Path, fault: str) -> None:
    code, out, err = run(TRAIN, [*MPIRUN, "2", sys.executable], fault)
    assert seconds_since(tmp_path / "failed") < limit(CONTRACT_SECONDS)
    assert code != 0
    assert ("ValueError: this callback is on fire" if fault == "raise" else "process rank 1 with PID") in out + err
