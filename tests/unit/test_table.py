"""The pages that are made from a run of the tests are complete; in a run nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fault_table, make_table, results, suite
from tests.contract.rows import PROMISED

ENVIRONMENT = {"python": "3.11", "packages": {"keras": "3.15.1"}, "cores": 2, "commit": "abc"}
FAULT_ROWS = [f"{job}-{fault}" for job in fault_table.JOBS for fault in fault_table.FAULTS]


def results_of(*lines: dict[str, Any]) -> dict[str, Any]:
    return {**ENVIRONMENT, **results.parts(lines)}


def case(row: str, backend: str, size: int, outcome: str) -> dict[str, Any]:
    return {"test": "t", results.CASE: [row, backend, size], "outcome": outcome}


def test_a_case_has_passed_if_all_of_its_tests_have() -> None:
    found = results_of(*(case("save", "horovod", 2, outcome) for outcome in ("passed", "failed", "passed")))
    assert found["rows"] == {"save": {"horovod": {"2": "failed"}}}


@pytest.mark.parametrize(("part", "rows"), [("rows", [*PROMISED]), ("faults", FAULT_ROWS)])
def test_a_committed_page_has_exactly_the_declared_rows(part: str, rows: list[str]) -> None:
    path, write = make_table.PAGES[part]
    text = path.read_text()
    assert [*make_table.rows_in(text)] == rows
    assert "✗" not in text
    empty = {**results_of(), "schedules": {}}
    heads = [line for line in write(empty).splitlines() if not line.endswith("` |") and "3.15.1" not in line]
    assert [line for line in text.splitlines() if not line.endswith("` |") and "3.15.1" not in line] == heads
    assert not [row for row, line in make_table.rows_in(text).items() if "| not run |" in line]


def test_each_usual_cell_is_possible() -> None:
    cells = [*fault_table.USUAL, *fault_table.CI]
    assert len(set(cells)) == len(cells)
    assert None not in [fault_table.promise(job, fault) for job, fault in cells]


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
TIMED = "import pytest\n@pytest.mark.timed\ndef test_timed(): pass\n"
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
    code, text = run(folder, passes=PASSES, unstable=UNSTABLE, fails=FAILS, timed=TIMED, full=FULL)
    assert code == 1, text
    assert "test_unstable failed, then passed alone. Mend it. It had failed with:" in text
    assert "3 passed, 0 skipped, 1 failed, 1 unstable" in text.splitlines()[-1]


def test_what_is_timed_stands_where_the_suite_looks() -> None:
    assert {*filter(suite.is_timed, (ROOT / "tests").rglob("test_*.py"))} - {Path(__file__)} == {*suite.TIMED_FILES}
