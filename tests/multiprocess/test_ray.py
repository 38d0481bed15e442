"""The example of Ray Train has the numbers of one process: `make test-integrations` installs Ray."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess.launches import ROOT, SCRIPTS, found, output_of, run

EXAMPLES = ROOT / "examples"
PATHS = f"{ROOT}:{EXAMPLES}"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-integrations"),
]


def expected(folder: Path) -> tuple[str, str]:
    """Returns loss and accuracy of the same training in one process."""
    printed = output_of(sys.executable, EXAMPLES / "multi_worker.py", folder=folder, PYTHONPATH=PATHS)
    loss, accuracy = re.findall(r"loss ([\d.]+), accuracy ([\d.]+)", printed)[-1]
    return loss, accuracy


def test_the_example(tmp_path: Path) -> None:
    printed = output_of(sys.executable, EXAMPLES / "ray_train.py", folder=tmp_path, PYTHONPATH=PATHS)
    line = re.search(r"^loss ([\d.]+), accuracy ([\d.]+): (.*)$", printed, re.MULTILINE)
    assert line is not None, printed
    assert line.groups()[:2] == expected(tmp_path)
    assert Path(line[3], "digits.keras").exists()


def test_the_workers_of_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    script = SCRIPTS / "ray_horovod.py"
    done = run(sys.executable, script, EXAMPLES / "multi_worker.py", folder=tmp_path, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keras_dist: horovod (2 ranks, " in done.stdout + done.stderr
    for metrics in found(done.stdout):
        assert metrics["size"] == 2
        assert (f"{metrics['loss']:.6f}", f"{metrics['accuracy']:.4f}") == expected(tmp_path)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_fails_on_one_of_two_nodes(tmp_path: Path, how: str) -> None:
    script = SCRIPTS / "ray_killed.py"
    done = run(sys.executable, script, tmp_path, "70", how, folder=tmp_path, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    assert re.search(r"resumes after step [67]0 \(epoch 3, batch", done.stderr), done.stderr  # Ray shows it
    metrics = found(done.stdout)
    assert (f"{metrics['loss']:.6f}", f"{metrics['accuracy']:.4f}") == expected(tmp_path)
