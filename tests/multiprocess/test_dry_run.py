"""The real TPU compiler, without a TPU. The first run installs it (1 GB, a minute or two)."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from keras_dist.diagnostics import process
from keras_dist.diagnostics.process import python_of
from tests.multiprocess.launches import KERAS_DIST, SCRIPTS, Commands, finished, run

SCRIPT = SCRIPTS / "tpu_compiles.py"
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first run makes the environment

IMPORTS = "import numpy as np\nimport keras\nimport keras_dist as kd\nL = keras.layers\n"
HEAD = f"{IMPORTS}kd.init(kd.TPU('local'))\n"
TAIL = """
model = kd.distribute(model)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=64)
"""
MLP = "x, y = np.zeros((99, 20)), np.zeros(99, 'int32')\nmodel = keras.Sequential([L.Dense(64, 'relu'), L.Dense(10)])"


def reports_of(*names: str, timeout: float) -> dict[str, Any]:
    """What tests/multiprocess/scripts/tpu_compiles.py prints, in the compiler's environment; makes that if need be."""
    python = python_of(sys.stderr)
    start = f"import runpy, sys; sys.path += {process.user_paths()!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import sys; sys.argv = {[str(SCRIPT), *names]!r}; {start}"
    with tempfile.TemporaryDirectory() as logs:
        done = run(python, "-c", code, seconds=timeout, **process.SETTINGS, TPU_LOG_DIR=logs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WHAT_IS_FORBIDDEN = {"numpy_function": "Python can't run", "ragged": ""}


def test_what_compiles_and_what_does_not() -> None:
    reductions = {"dense": 4, "convolution": 6, "embedding": 3, "mixed_bfloat16": 4}
    reports = reports_of(*reductions, "too_big", *WHAT_IS_FORBIDDEN, timeout=300)
    for name, expected in reductions.items():
        assert_trains(reports[name], expected)
    too_big = reports["too_big"]
    assert (too_big["compiles"], too_big["fits"]) == (True, False)
    assert too_big["memory"]["total"] > too_big["memory"]["available"] > 15 * 2**30
    for name, why in WHAT_IS_FORBIDDEN.items():
        found = reports[name]["forbidden"]
        assert not reports[name]["compiles"], name
        assert {one["layer"] for one in found} == {"odd"}, name
        assert any(why in one["why"] for one in found), name


@pytest.mark.parametrize(
    ("name", "weights", "reductions"), [("resnet50", 25_636_712, 214), ("transformer", 3_630_090, 35)]
)
def test_what_compiles_slowly(name: str, weights: int, reductions: int) -> None:
    report = reports_of(name, timeout=1700)[name]
    assert_trains(report, reductions)
    assert report["parameters"] == weights


def assert_trains(report: dict[str, Any], reductions: int) -> None:
    assert report["ok"], report
    assert report["forbidden"] == []
    assert report["gradient_reductions"] == reductions
    memory = report["memory"]
    assert 0 < memory["arguments"] <= memory["total"] < memory["available"]
    assert report["flops"] > 0
    assert report["bytes_accessed"] > 0


def test_the_largest_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + MLP + TAIL)
    options = ("--json", "--target", "v5e-1", "--batch", "40000000")  # too many for one chip
    done = run(*KERAS_DIST, "dry-run", script, *options, seconds=1700)
    assert done.returncode == 1, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["ok"], report["fits"]) == (False, False)
    assert 10_000_000 < report["largest_batch"] < report["too_large_batch"] < 1.05 * report["largest_batch"]


@pytest.mark.parametrize("whom", ["the command", "the compiler"])
def test_a_signal_ends_it_quietly(whom: str, commands: Commands, tmp_path: Path) -> None:
    """By then the compiler is loaded, which prints a stack of C++ at SIGTERM."""
    script, logs = tmp_path / "train.py", tmp_path / "temporary"
    script.write_text(HEAD + MLP + TAIL)
    logs.mkdir()
    command = [*KERAS_DIST, "dry-run", str(script), "--target", "v5e-8", "--no-cache"]
    process = commands(*command, TMPDIR=str(logs))
    next(line for line in process.stderr if "trial 1 of at most 6: compiling batch 96" in line)
    if whom == "the command":  # and all that a shell or `timeout` signals with it
        os.killpg(process.pid, signal.SIGTERM)
    else:
        (compiler,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(compiler), signal.SIGTERM)
    code, out, err = finished(process)
    assert "compiles:      yes\n" in out
    if whom == "the command":
        assert code == 143
        assert out.endswith("missing:       largest batch; stopped by SIGTERM\n")
        assert err.splitlines()[-1] == "keras-dist dry-run: stopped by SIGTERM"
    else:
        assert code == 2
        assert "Received: exit code -15\n" in err
    assert "stack trace" not in err
    assert list(logs.iterdir()) == []


def test_a_model_that_is_there(tmp_path: Path) -> None:
    code = f"{IMPORTS}\n{MLP}\n"
    code += "model.compile('adam', 'sparse_categorical_crossentropy')\nmodel.build((None, 20))\n"
    code += "print(kd.tpu_dry_run(model, (x[:32], y[:32]), target='v5e-8', trials=0).gradient_reductions)\n"
    done = run(sys.executable, "-c", code, seconds=1700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4"
