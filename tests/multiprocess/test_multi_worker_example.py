"""The example of multi_worker as its docstring says to run it: two shells, and the launcher. All print the same."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_dist.environment import detect_launch
from keras_dist.launcher.cluster import MultiWorkerCluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "multi_worker.py"
LINE = re.compile(r"^epoch (\d+): loss (\d+\.\d{6}), accuracy (\d\.\d{4})$", re.MULTILINE)

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


def commands() -> list[str]:
    """Returns the lines of the docstring that are for a shell, with this Python and ports that are free."""
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text())) or ""
    with MultiWorkerCluster(2, {}) as cluster:
        launch = detect_launch(cluster.environment(0))
    assert launch is not None
    for port, address in zip(("2222", "2223"), launch.workers, strict=True):
        text = text.replace(port, address.rpartition(":")[2])
    python = shlex.quote(sys.executable)
    text = text.replace("keras-dist run", f"{python} -m keras_dist run").replace(" python ", f" {python} ")
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", command.replace("examples/multi_worker.py", shlex.quote(str(EXAMPLE)))],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(*commands: str) -> list[np.ndarray]:
    """Runs commands side by side, and returns the numbers that each prints."""
    processes = [start(command) for command in commands]
    try:
        outputs = [process.communicate(timeout=140) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(commands), outputs
    return [np.asarray(LINE.findall(out), "float64") for out, _ in outputs]


def test_two_shells_and_the_launcher_print_what_one_process_prints() -> None:
    cluster, first, second, launcher = commands()
    (plain,) = printed(f"{shlex.quote(sys.executable)} examples/multi_worker.py")
    np.testing.assert_array_equal(plain[:, 0], np.arange(1, 6))
    assert plain[-1, 1] < plain[0, 1] / 2
    chiefs, others = printed(f"{cluster}; {first}", f"{cluster}; {second}")
    assert others.size == 0
    np.testing.assert_allclose(chiefs, plain, rtol=0, atol=1e-4)
    np.testing.assert_allclose(printed(launcher)[0], plain, rtol=0, atol=1e-4)
