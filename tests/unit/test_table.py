"""The tables of the promised cases and of the faults: made from a run, complete."""

from __future__ import annotations

from typing import Any

import pytest

from keras_dist.backends import BACKENDS
from tests import fault_table, make_table, results
from tests.contract.rows import PROMISED

# Backends whose column need not be complete yet.
PARTLY_RUN: set[str] = set()


ENVIRONMENT = {"python": "3.11", "packages": {"keras": "3.15.1"}, "cores": 2, "commit": "abc"}


def results_of(*lines: tuple[str, tuple[str, int], str]) -> dict[str, Any]:
    cases = [{"test": "t", results.CASE: [row, *cluster], "outcome": outcome} for row, cluster, outcome in lines]
    return {**ENVIRONMENT, **results.parts(cases)}


def test_a_case_has_passed_if_all_of_its_tests_have() -> None:
    rows = results_of(
        ("save", ("horovod", 2), "passed"),
        ("save", ("horovod", 2), "failed"),
        ("save", ("horovod", 2), "passed"),
        ("save", ("serial", 1), "passed"),
    )["rows"]
    assert rows == {"save": {"horovod": {"2": "failed"}, "serial": {"1": "passed"}}}


def test_cells() -> None:
    assert make_table.cell({"4": "passed", "2": "passed", "3": "failed"}) == "✓ 2, 4; ✗ 3"
    assert make_table.cell({}) == "not run"


def test_the_table_has_every_row_and_backend() -> None:
    text = make_table.table(results_of(("save", ("horovod", 2), "passed")))
    assert make_table.rows_in(text) == list(PROMISED)
    header = next(line for line in text.splitlines() if line.startswith("| |"))
    assert {name.strip() for name in header.strip("|").split("|")} == {"", *BACKENDS}
    (line,) = [line for line in text.splitlines() if "<!-- save -->" in line]
    assert line.endswith(f"| not run | ✓ 2 |{' not run |' * (len(BACKENDS) - 2)}")


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = f"before\n{make_table.BEGIN}\nold\n{make_table.END}\nafter\n"
    changed = make_table.replaced(page, "new")
    assert make_table.between_markers(changed).endswith("-->\n\nnew")
    assert make_table.replaced(changed, "new") == changed
    assert changed.startswith("before\n")
    assert changed.endswith("\nafter\n")
    with pytest.raises(ValueError, match="no lines"):
        make_table.replaced("nothing", "new")


def test_the_table_of_runs_that_went_on() -> None:
    def schedule(*faults: tuple[str, int, float]) -> dict[str, Any]:
        named = [{"signal": signal, "again": again, "seconds": seconds} for signal, again, seconds in faults]
        return {"backend": "horovod", "faults": named}

    found = [
        {"test": "a", results.SCHEDULE: [4, schedule(("SIGKILL", 2, 9.0), ("SIGKILL", 5, 11.0))], "outcome": "passed"},
        {"test": "b", results.SCHEDULE: [5, schedule(("ENOSPC", 6, 10.4))], "outcome": "failed"},
    ]
    lines = make_table.schedules({**ENVIRONMENT, **results.parts(found)}).splitlines()
    assert "`make chaos N=2 SEED=4`: 1 of 2 schedules ended with the numbers of the undisturbed run; not" in lines[0]
    assert lines[-2:] == [
        "| horovod | `kill -9` of one rank, or of all | 2 | 2 to 5 | 10 s |",
        "| horovod | The disk with the commits is full | 1 | 6 to 6 | 10 s |",
    ]


def test_the_page_has_exactly_the_promised_rows() -> None:
    text = make_table.between_markers(make_table.PAGE.read_text())
    assert text is not None
    assert make_table.rows_in(text) == list(PROMISED)
    header = next(line for line in text.splitlines() if line.startswith("| |"))
    assert {name.strip() for name in header.strip("|").split("|")} == {"", *BACKENDS}
    assert "✗" not in text
    for line in text.splitlines():
        if "<!-- " in line and line.startswith("|"):
            cells = dict(zip(header.strip("|").split("|"), line.strip("|").split("|"), strict=True))
            missing = [backend.strip() for backend, cell in cells.items() if "not run" in cell]
            assert set(missing) <= PARTLY_RUN, line


# Faults.

FOUND = {"seconds": 0.34, "code": 137, "says": "rank 1 was killed by SIGKILL", "left": []}


def results_of_fault(outcome: str, **found: Any) -> dict[str, Any]:
    line = {"test": "t", results.FAULT: ["run-horovod-kill", {**FOUND, **found}], "outcome": outcome}
    return {**ENVIRONMENT, **results.parts([line])}


def line_of(cell: str, found: dict[str, Any]) -> str:
    (line,) = [line for line in make_table.faults(found).splitlines() if f"<!-- {cell} -->" in line]
    return line.split("-->")[1]


def test_a_row_says_how_a_job_ended() -> None:
    found = results_of_fault("passed")
    assert line_of("run-horovod-kill", found) == " | 0.3 s | 137 | ``rank 1 was killed by SIGKILL`` | nothing |"
    assert line_of("run-horovod-term", found) == " |  |  | not run |  |"
    assert line_of("tf-config-launcher", found) == " |  |  | there is none |  |"
    assert line_of("run-horovod-kill", results_of_fault("failed")) == " |  |  | ✗ |  |"
    silent = results_of_fault("passed", says="", left=["a file"])
    assert line_of("run-horovod-kill", silent).endswith(" | nothing: nobody is left who could | a file |")


def test_a_row_shows_the_error_that_the_output_shows_before_its_last_line() -> None:
    cells = make_table.fault_cells("run-horovod", "raise", {**FOUND, "says": "rank 1", "outcome": "passed"})
    assert cells[2] == "``rank 1``, and before it `ValueError: this callback is on fire`"


def test_the_page_has_exactly_the_declared_faults() -> None:
    text = make_table.between_markers(make_table.FAULTS_PAGE.read_text())
    assert text is not None
    assert make_table.rows_in(text) == [f"{job}-{fault}" for job in fault_table.JOBS for fault in fault_table.FAULTS]
    assert "✗" not in text
    assert "not run" not in text


def test_each_usual_cell_is_possible() -> None:
    cells = [*fault_table.USUAL, *fault_table.CI]
    assert len(set(cells)) == len(cells)
    for job, fault in cells:
        assert fault_table.promise(job, fault) is not None
