"""Writes tables of the manual from the results of a run: the promised cases (`make table`), the faults (`make
faults`), the runs that resumed after a fault (`make chaos`).

Only the tables are written of which the run has results.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_dist.backends import BACKENDS
from tests import fault_table
from tests.contract.rows import GROUPS
from tests.results import environment_of, parts, read

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "promised_cases.md"
FAULTS_PAGE = DOCS / "reliability.md"
BEGIN = "<!-- table: begin -->"
END = "<!-- table: end -->"
SCHEDULES = "schedules"  # the name of the other table of `FAULTS_PAGE`
_SIGNALS = {
    "SIGKILL": "`kill -9` of one rank, or of all",
    "SIGTERM": "SIGTERM to one rank, or to all",
    "ENOSPC": "The disk with the commits is full",
}
_COLUMNS = ("serial", *(backend for backend in BACKENDS if backend != "serial"))
_SIGNS = {"passed": "✓", "failed": "✗", "skipped": "–"}


def table(results: Mapping[str, Any]) -> str:
    """Returns the table in Markdown: a row per promised case, a column per registered backend."""
    lines = [f"{_versions(results)} A cell shows on how many processes the case passed.", ""]
    lines += [f"| | {' | '.join(_COLUMNS)} |", f"|---{'|:---:' * len(_COLUMNS)}|"]
    for title, group in GROUPS.items():
        lines.append(f"| **{title}** |{' |' * len(_COLUMNS)}")
        for row, text in group.items():
            outcomes = results["rows"].get(row, {})
            cells = [cell(outcomes.get(backend, {})) for backend in _COLUMNS]
            lines.append(f"| {text} <!-- {row} --> | {' | '.join(cells)} |")
    return "\n".join(lines)


def faults(results: Mapping[str, Any]) -> str:
    """Returns the table of the faults in Markdown: for each way to start a job a row per fault."""
    lines = [f"{_versions(results)} {results['cores']} cores.", ""]
    lines += ["| | Ends after | Exit code | What it says | Left behind |", "|---|---:|---:|---|---|"]
    for job, title in fault_table.JOBS.items():
        lines.append(f"| **{title}** | | | | |")
        for fault, text in fault_table.FAULTS.items():
            found = results["faults"].get(f"{job}-{fault}", {})
            lines.append(f"| {text} <!-- {job}-{fault} --> | {' | '.join(fault_cells(job, fault, found))} |")
    return "\n".join(lines)


def fault_cells(job: str, fault: str, found: Mapping[str, Any]) -> list[str]:
    """Returns what a row says of one fault."""
    if (job, fault) in fault_table.IMPOSSIBLE:
        return ["", "", fault_table.IMPOSSIBLE[job, fault], ""]
    if found.get("outcome") != "passed":
        return ["", "", {"failed": "✗"}.get(found.get("outcome", ""), "not run"), ""]
    silent = "nothing: it was told to end" if found["code"] == 0 else "nothing: nobody is left who could"
    says = f"``{found['says']}``" if found["says"] else silent
    promised, error = fault_table.promise(job, fault), fault_table.ERRORS.get(fault)
    if promised is not None and error is not None and promised.shows == re.escape(error):
        says += f", and before it `{error}`"
    return [f"{found['seconds']:.1f} s", str(found["code"]), says, ", ".join(found["left"]) or "nothing"]


def schedules(results: Mapping[str, Any]) -> str:
    """Returns the table of the runs that resumed, in Markdown: for each backend a row per kind of fault."""
    runs = {int(seed): run for seed, run in results["schedules"].items()}
    outcomes = [run["outcome"] for run in runs.values()]
    failed = sorted(seed for seed, run in runs.items() if run["outcome"] == "failed")
    lines = [
        f"{_versions(results)} {results['cores']} cores. `make chaos N={len(runs)} SEED={min(runs)}`: "
        f"{outcomes.count('passed')} of {len(runs)} schedules ended with the numbers of the undisturbed run"
        f"{f'; not those of the seeds {failed}' if failed else ''}.",
        "",
        "| | | Faults | Batches computed again | Until the next batch |",
        "|---|---|---:|---:|---:|",
    ]
    for backend in _COLUMNS:
        faults = [fault for run in runs.values() if run["backend"] == backend for fault in run["faults"]]
        for signal, text in _SIGNALS.items():
            found = [fault for fault in faults if fault["signal"] == signal]
            if found:
                again = sorted(fault["again"] for fault in found)
                seconds = statistics.median(fault["seconds"] for fault in found)
                cells = f"{len(found)} | {again[0]} to {again[-1]} | {seconds:.0f} s"
                lines.append(f"| {backend} | {text} | {cells} |")
    return "\n".join(lines)


def markers(name: str) -> tuple[str, str]:
    """Returns the lines before and after a table."""
    return BEGIN.replace("table", name), END.replace("table", name)


def _versions(results: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    return f"Python {results['python']}, {packages}."


def cell(outcomes: Mapping[str, str]) -> str:
    """Returns `✓ 1, 2` for what passed; what did not pass is named with its sign."""
    parts = []
    for outcome, sign in _SIGNS.items():
        sizes = sorted(int(size) for size, its in outcomes.items() if its == outcome)
        if sizes:
            parts.append(f"{sign} {', '.join(map(str, sizes))}")
    return "; ".join(parts) or "not run"


def between_markers(page: str, name: str = "table") -> str | None:
    """Returns a table of a page, `None` if it has no markers."""
    begin, end = markers(name)
    match = re.search(re.escape(begin) + "(.*?)" + re.escape(end), page, re.DOTALL)
    return match and match[1].strip()


def rows_in(text: str) -> list[str]:
    """Returns the ids of the rows of a table."""
    return re.findall(r"^\|.*<!-- ([a-z0-9-]+) -->", text, re.MULTILINE)


def replaced(page: str, text: str, source: str = "tests/contract/rows.py", name: str = "table") -> str:
    """Returns a page with another table.

    Args:
        page: The text of the page.
        text: The table.
        source: The file to change instead of the table.
        name: The name in its markers.

    Raises:
        ValueError: If it has no markers.
    """
    begin, end = markers(name)
    if between_markers(page, name) is None:
        raise ValueError(f"the page has no lines {begin!r} and {end!r}")
    before, rest = page.split(begin, 1)
    text = f"<!-- generated by `python -m tests.make_table`: change {source} instead -->\n\n{text}"
    return f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the folder of `pytest --results=FOLDER`")
    folder = parser.parse_args().results
    results = {**environment_of(folder), **parts(read(folder))}
    if results["rows"]:
        PAGE.write_text(replaced(PAGE.read_text(), table(results)))
    if results["schedules"]:
        source = "tests/multiprocess/test_resume.py"
        FAULTS_PAGE.write_text(replaced(FAULTS_PAGE.read_text(), schedules(results), source, SCHEDULES))
    if results["faults"]:
        FAULTS_PAGE.write_text(replaced(FAULTS_PAGE.read_text(), faults(results), "tests/fault_table.py"))


if __name__ == "__main__":
    main()
