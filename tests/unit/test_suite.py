"""A run of the tests: what is run, what is run once more, how it continues, what it says at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import results, suite

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


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    cached = ["-o", f"cache_dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "tests.suite", "test", "--results", str(folder / "results"), "--jobs", "0"]
    environ = {**os.environ, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # which takes longer than these tests
    done = subprocess.run(
        [*command, *options, *cached, str(folder)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_passes_once_more_is_unstable_and_does_not_fail_the_run(folder: Path) -> None:
    code, text = run(folder, passes=PASSES, unstable=UNSTABLE, alone=ALONE, full=FULL)
    assert code == 0, text
    assert "test_unstable failed, then passed alone. Mend it. It had failed with:" in text
    assert "    AssertionError: too slow this time" in text
    assert "3 passed, 0 skipped, 0 failed, 1 unstable" in text.splitlines()[-1]
    order = ["== side by side", "== one at a time", "== once more"]
    assert [line for line in text.splitlines() if line.startswith("== ") and line in order] == order


def test_what_runs_alone_stands_where_the_suite_looks() -> None:
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.alone" in path.read_text()}
    assert {path.parent for path in files - {Path(__file__)}} == {ROOT / suite.ALONE}


def test_a_test_that_fails_twice_fails_the_run(folder: Path) -> None:
    code, text = run(folder, passes=PASSES, fails=FAILS)
    assert code == 1
    assert text.count("test_fails(): assert 1 == 2") == 2
    assert "1 passed, 0 skipped, 1 failed, 0 unstable" in text.splitlines()[-1]


def test_with_x_a_failure_ends_the_run(folder: Path) -> None:
    code, text = run(folder, "-x", fails=FAILS, passes=PASSES)
    assert code == 1
    assert "== one at a time" not in text
    assert "0 passed, 0 skipped, 1 failed" in text.splitlines()[-1]


def test_a_run_goes_on_where_it_stopped(folder: Path) -> None:
    run(folder, a=PASSES, fails=FAILS)
    (folder / "test_fails.py").write_text(FAILS.replace("1 == 2", "1 == 1"))
    code, text = run(folder, b=PASSES)
    assert code == 0
    assert "2 passed, 1 deselected" in text
    assert "3 passed, 0 skipped, 0 failed" in text.splitlines()[-1]
    assert run(folder)[0] == 0  # nothing is left to run


def test_a_run_does_not_go_on_from_another_commit(folder: Path) -> None:
    run(folder, a=PASSES)
    (file,) = (folder / "results").glob("*.jsonl")
    first, *lines = file.read_text().splitlines()
    other = json.loads(first)
    other["environment"]["commit"] = "another"
    file.write_text("\n".join([json.dumps(other), *lines]) + "\n")
    code, text = run(folder)
    assert code != 0
    assert "has results of another commit or environment." in text
    assert "Delete the folder, or name another one with --results." in text


def test_each_test_is_in_one_shard() -> None:
    class Item:
        def __init__(self, name: str) -> None:
            self.nodeid = name

    items = [Item(f"tests/test_{file}.py::test_{case}") for file in range(40) for case in range(3)]
    shards = [results.of_shard(items, index, 8) for index in range(1, 9)]  # type: ignore[arg-type]
    assert sorted(item.nodeid for shard in shards for item in shard) == sorted(item.nodeid for item in items)
    assert all(len(shard) < 40 for shard in shards)
    files = [{item.nodeid.partition("::")[0] for item in shard} for shard in shards]
    assert sum(map(len, files)) == 40


def test_a_shard_that_makes_no_sense(folder: Path) -> None:
    code, text = run(folder, "--shard", "9/8", a=PASSES)
    assert code == 2
    assert "a shard is written as 2/8, the second of eight, not as '9/8'" in text


def test_the_report_says_where_the_time_went() -> None:
    lines = [
        {"test": "tests/unit/test_a.py::test_b", "outcome": "passed", "seconds": 1.0},
        {"test": "tests/unit/test_a.py::test_c", "outcome": "skipped", "seconds": 2.0},
        {"test": "tests/contract/test_d.py::test_e[horovod-2]", "outcome": "failed", "seconds": 40.0,
         results.CASE: ["row", "horovod", 2]},
    ]  # fmt: skip
    text = suite.report(lines, {"side by side": 30.0, "one at a time": 10.0}, 80.0, {})
    assert f"{'contract on horovod-2':32}{1:7}{40:9}\n{'unit':32}{2:7}{3:9}\n" in text
    assert "slowest:\n    40.0 s  tests/contract/test_d.py::test_e[horovod-2]\n" in text
    assert f"{'side by side':26}{30:9}      38%\n{'one at a time':26}{10:9}      12%\n" in text
    assert text.endswith("1 passed, 1 skipped, 1 failed, 0 unstable, in 40 s")
