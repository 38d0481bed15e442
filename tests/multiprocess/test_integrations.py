"""Libraries on top of Keras give the numbers of one process: `make test-integrations` installs them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.multiprocess.launches import ROOT, SCRIPTS, assert_close, output_of

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
