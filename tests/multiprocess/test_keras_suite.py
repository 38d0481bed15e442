"""Keras's own tests, every model distributed over two replicas. What fails is listed, and what is listed fails."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACED_TWICE = "each replica traces the step"

# By pattern of the test's name.
DIFFER = {
    "trainers": {
        "TestTrainer.test_loss_scaling_prevents_underflow": "its model sets `layers`, which keras.Model reserves",
        "TestTrainer.test_retracing": TRACED_TWICE,
    },
    "callbacks": {"SwapEMAWeightsTest.test_swap_ema_weights_with_tf_distribute": "a strategy scope of its own"},
    "models": {"FunctionalTest.test_warning_for_mismatched_inputs_structure": f"{TRACED_TWICE}: so does its warning"},
    "saving": {},
}  # fmt: skip
FILES = {
    "trainers": ("trainers/trainer_test.py",),
    "callbacks": ("callbacks/*_test.py",),
    "models": ("models/*_test.py",),
    "saving": ("saving/saving_lib_test.py",),
}
# They need what is not installed, in plain Keras too.
LEFT_OUT = "not jax and not torch and not grain and not legacy_load_skips_missing"


def runs() -> list[tuple[str, str]]:
    return [(engine, part) for engine in ("mirrored", "central_storage") for part in FILES]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not importlib.metadata.version("keras").startswith("3.15."), reason="the tests of Keras 3.15")
@pytest.mark.parametrize(("engine", "part"), runs())
def test_keras_own_tests(engine: str, part: str, tmp_path: Path) -> None:
    failed = _failed(engine, FILES[part], tmp_path)
    listed = {name for name in failed if any(fnmatch.fnmatch(name, pattern) for pattern in DIFFER[part])}
    assert failed.keys() == listed, "\n".join(f"{name}: {failed[name]}" for name in failed.keys() - listed)
    assert not [pattern for pattern in DIFFER[part] if not fnmatch.filter(failed, pattern)], "these pass now"


def _failed(engine: str, patterns: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Runs tests of Keras and returns the messages of those that fail, by `Class.test`."""
    spec = importlib.util.find_spec("keras.src")
    assert spec is not None
    assert spec.origin is not None
    source, report = Path(spec.origin).parent, folder / "report.xml"
    files = [str(path) for pattern in patterns for path in sorted(source.glob(pattern)) if "orbax" not in path.name]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), "--noconftest",
               "-p", "tests.keras_suite", "-p", "no:cacheprovider", "--engine", engine, "-k", LEFT_OUT, "--tb=line",
               f"--junitxml={report}", *files]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.exists(), result.stdout + result.stderr
    cases = ET.parse(report).getroot().findall(".//testcase")
    assert len(cases) > 20, result.stdout
    return {
        f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}": str(problem.get("message"))
        for case in cases
        if (problem := next((part for part in case if part.tag in ("failure", "error")), None)) is not None
    }
