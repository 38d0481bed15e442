"""Libraries on top of Keras give the numbers of one process with the two lines.

KerasHub, KerasRS and mlflow are not among the packages of the tests: `make test-integrations` installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scripts") / "integrations.py"
CASES = (
    "text_classifier", "masked_language_model", "causal_language_model", "lora", "retrieval", "ranking", "scikit_learn",
    "tracked",
)  # fmt: skip
ENGINES: dict[str, tuple[list[str], dict[str, str]]] = {
    "serial": ([], {"KERAS_DIST_BACKEND": "serial"}),
    "horovod": (["-m", "keras_dist", "run", "-np", "2"], {}),
    "mirrored": ([], {"KERAS_DIST_BACKEND": "mirrored", "DEVICES": "2"}),
}

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each engine has computed: all cases in one start of TensorFlow."""
    found = {}
    for engine, (launcher, environ) in ENGINES.items():
        folder = tmp_path_factory.mktemp(engine)
        command = [sys.executable, *launcher, str(SCRIPT), "numbers.json"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}  # with scikit-learn, unlike other tests
        run = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert run.returncode == 0, run.stderr[-5000:]
        found[engine] = json.loads((folder / "numbers.json").read_text())
    return found


@pytest.mark.parametrize("engine", ["horovod", "mirrored"])
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_numbers_of_one_process(case: str, engine: str, results: dict[str, dict[str, Any]]) -> None:
    if case not in results["serial"]:
        pytest.skip("a library is not installed: make test-integrations")
    expected, actual = results["serial"][case], results[engine][case]
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-4, atol=1e-4, err_msg=name)
