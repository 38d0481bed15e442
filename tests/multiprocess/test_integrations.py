"""Libraries on top of Keras, and Ray Train, give the numbers of one process: `make test-integrations` installs them."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launches import EXAMPLES, ROOT, SCRIPTS, assert_close, found, output_of, run

CASES = (
    "text_classifier", "masked_language_model", "causal_language_model", "lora", "retrieval", "ranking", "scikit_learn",
    "tracked", "checkpoints",
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
        # With scikit-learn, unlike other tests.
        output_of(sys.executable, *launcher, SCRIPTS / "integrations.py", "numbers.json", folder=folder,
                  PYTHONPATH=str(ROOT), **environ)  # fmt: skip
        found[engine] = json.loads((folder / "numbers.json").read_text())
    return found


@pytest.mark.parametrize("engine", ["horovod", "mirrored"])
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_numbers_of_one_process(case: str, engine: str, results: dict[str, dict[str, Any]]) -> None:
    if case not in results["serial"]:
        pytest.skip("a library is not installed: make test-integrations")
    assert_close(results[engine][case], results["serial"][case], rtol=1e-4, atol=1e-4)


PATHS = f"{ROOT}:{EXAMPLES}"
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-integrations"
)


def expected(folder: Path) -> tuple[str, str]:
    """Returns loss and accuracy of the same training in one process."""
    printed = output_of(sys.executable, EXAMPLES / "multi_worker.py", folder=folder, PYTHONPATH=PATHS)
    loss, accuracy = re.findall(r"loss ([\d.]+), accuracy ([\d.]+)", printed)[-1]
    return loss, accuracy


@NEEDS_RAY
def test_the_example_of_ray_train(tmp_path: Path) -> None:
    printed = output_of(sys.executable, EXAMPLES / "ray_train.py", folder=tmp_path, PYTHONPATH=PATHS)
    line = re.search(r"^loss ([\d.]+), accuracy ([\d.]+): (.*)$", printed, re.MULTILINE)
    assert line is not None, printed
    assert line.groups()[:2] == expected(tmp_path)
    assert Path(line[3], "digits.keras").exists()


@NEEDS_RAY
def test_the_workers_of_horovod_under_ray(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    script = SCRIPTS / "ray_horovod.py"
    done = run(sys.executable, script, EXAMPLES / "multi_worker.py", folder=tmp_path, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keras_dist: horovod (2 ranks, " in done.stdout + done.stderr
    for metrics in found(done.stdout):
        assert metrics["size"] == 2
        assert (f"{metrics['loss']:.6f}", f"{metrics['accuracy']:.4f}") == expected(tmp_path)


@NEEDS_RAY
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_fails_on_one_of_two_nodes(tmp_path: Path, how: str) -> None:
    script = SCRIPTS / "ray_killed.py"
    done = run(sys.executable, script, tmp_path, "70", how, folder=tmp_path, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    assert re.search(r"resumes after step [67]0 \(epoch 3, batch", done.stderr), done.stderr  # Ray shows it
    metrics = found(done.stdout)
    assert (f"{metrics['loss']:.6f}", f"{metrics['accuracy']:.4f}") == expected(tmp_path)
