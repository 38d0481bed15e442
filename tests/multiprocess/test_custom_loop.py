"""The example of a custom training loop, on the command line: one process and two print the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_loop.py"
EPOCHS = 2
LINE = re.compile(r"^epoch (\d+): last batch's loss (\d+\.\d{6}), accuracy (\d\.\d{4})$", re.MULTILINE)

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]


def printed(ranks: int, folder: Path) -> np.ndarray:
    """Returns epoch, loss and accuracy of each line that the example prints."""
    command = [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks), str(EXAMPLE), "--epochs", str(EPOCHS)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.asarray(LINE.findall(done.stdout), "float64")


def test_two_ranks_print_what_one_prints(tmp_path: Path) -> None:
    """1,797 images in batches of 64: the last batch has 5, which two ranks do not divide."""
    one, two = printed(1, tmp_path), printed(2, tmp_path)
    np.testing.assert_array_equal(one[:, 0], np.arange(1, EPOCHS + 1))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
