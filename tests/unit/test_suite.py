"""A run of the tests: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import suite

ROOT = Path(__file__).resolve().parents[2]

PASSES = "def test_passes(): pass\n"
# Fails in the first run, and passes in the second.
UNSTABLE = """
from pathlib import Path
def test_unstable():
    file = Path(__file__).with_name("was-here")
    was_here = file.exists()
    file.touch()
    assert was_here, "too slow this time"
"""
FAILS = "def test_fails(): assert 1 == 2\n"
ALONE = "import pytest\n@pytest.mark.alone\ndef test_alone(): pass\n"
FULL = "import pytest\n@pytest.mark.full\ndef test_full(): pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for tests, of which pytest runs `tests/conftest.py` as it does with those of the project."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    return tmp_path


def run(folder: Path, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    cached = ["-o", f"cache_dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "tests.suite", "test", "--results", str(folder / "results"), "--jobs", "0"]
    environ = {**os.environ, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # which takes longer than these tests
    done = subprocess.run(
        [*command, *cached, str(folder)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_passes_once_more_is_unstable_and_one_that_fails_again_fails_the_run(folder: Path) -> None:
    code, text = run(folder, passes=PASSES, unstable=UNSTABLE, fails=FAILS, alone=ALONE, full=FULL)
    assert code == 1, text
    assert "test_unstable failed, then passed alone. Mend it. It had failed with:" in text
    assert "3 passed, 0 skipped, 1 failed, 1 unstable" in text.splitlines()[-1]


def test_what_runs_alone_stands_where_the_suite_looks() -> None:
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.alone" in path.read_text()}
    assert {path.parent for path in files - {Path(__file__)}} == {ROOT / suite.ALONE}
