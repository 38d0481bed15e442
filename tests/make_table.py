"""Writes the tables of pages of the manual from the results of a run: the promised cases (`make table`), the faults
(`make faults`), the runs that resumed after a fault (`make chaos`). A table is written if the run has results for it.
"""

import argparse
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_dist.backends import BACKENDS
from tests import fault_table
from tests.contract import rows
from tests.results import environment_of, parts, read

DOCS = Path(__file__).resolve().parents[1] / "docs"
_SIGNALS = {
    "SIGKILL": "`kill -9` of one rank, or of all",
    "SIGTERM": "SIGTERM to one rank, or to all",
    "ENOSPC": "The disk with the commits is full",
}
_COLUMNS = ("serial", *(backend for backend in BACKENDS if backend != "serial"))
_SIGNS = {"passed": "✓", "failed": "✗", "skipped": "–"}


def promised_cases(results: Mapping[str, Any]) -> str:
    """Returns the page with a row per promised case, a column per registered backend."""
    lines = [f"{_versions(results)} A cell shows on how many processes the case passed.", ""]
    lines += [f"| | {' | '.join(_COLUMNS)} | id |", f"|---{'|:---:' * len(_COLUMNS)}|---|"]
    for title, group in rows.GROUPS.items():
        lines.append(f"| **{title}** |{' |' * len(_COLUMNS)} |")
        for row, text in group.items():
            outcomes = results["rows"].get(row, {})
            cells = [cell(outcomes.get(backend, {})) for backend in _COLUMNS]
            lines.append(f"| {text} | {' | '.join(cells)} | `{row}` |")
    return page("rows", lines)


def faults(results: Mapping[str, Any]) -> str:
    """Returns the page of the faults: for each way to start a job a row per fault."""
    lines = [f"{_versions(results)} {results['cores']} cores.", ""]
    lines += ["| | Ends after | Exit code | What it says | Left behind | id |", "|---|---:|---:|---|---|---|"]
    for job, title in fault_table.JOBS.items():
        lines.append(f"| **{title}** | | | | | |")
        for fault, text in fault_table.FAULTS.items():
            found = results["faults"].get(f"{job}-{fault}", {})
            lines.append(f"| {text} | {' | '.join(fault_cells(job, fault, found))} | `{job}-{fault}` |")
    return page("faults", lines)


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
    """Returns the page of the runs that resumed: for each backend a row per kind of fault."""
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
            if found := [fault for fault in faults if fault["signal"] == signal]:
                again = sorted(fault["again"] for fault in found)
                seconds = statistics.median(fault["seconds"] for fault in found)
                cells = f"{len(found)} | {again[0]} to {again[-1]} | {seconds:.0f} s"
                lines.append(f"| {backend} | {text} | {cells} |")
    return page("schedules", lines)


PAGES = {
    "rows": (rows.PAGE, promised_cases),
    "faults": (DOCS / "faults.md", faults),
    "schedules": (DOCS / "survival.md", schedules),
}


def page(part: str, lines: list[str]) -> str:
    """Returns a page with the introduction that somebody has written, which ends before the versions."""
    introduction, _, _ = PAGES[part][0].read_text().partition("\nPython ")
    return "\n".join([introduction, *lines, ""])


def cell(outcomes: Mapping[str, str]) -> str:
    """Returns `✓ 1, 2` for what passed; what did not pass is named with its sign."""
    parts = []
    for outcome, sign in _SIGNS.items():
        if sizes := sorted(int(size) for size, its in outcomes.items() if its == outcome):
            parts.append(f"{sign} {', '.join(map(str, sizes))}")
    return "; ".join(parts) or "not run"


def rows_in(text: str) -> dict[str, str]:
    """Returns the lines of a page's table by the ids in their last column."""
    return {match[1]: match[0] for match in re.finditer(r"^\|.*\| `([a-z0-9-]+)` \|$", text, re.MULTILINE)}


def _versions(results: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    return f"Python {results['python']}, {packages}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the folder of `pytest --results=FOLDER`")
    folder = parser.parse_args().results
    results = {**environment_of(folder), **parts(read(folder))}
    for part, (path, write) in PAGES.items():
        if results[part]:
            path.write_text(write(results))


if __name__ == "__main__":
    main()
