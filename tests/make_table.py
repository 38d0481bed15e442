"""Writes pages of the manual from the results of a run: the promised cases (`make table`), the faults (`make faults`),
the runs that resumed after a fault (`make chaos`). A page is written if the run has results for it.
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
_SIGNALS = {
    "SIGKILL": "`kill -9` of one rank, or of all",
    "SIGTERM": "SIGTERM to one rank, or to all",
    "ENOSPC": "The disk with the commits is full",
}
_COLUMNS = ("serial", *(backend for backend in BACKENDS if backend != "serial"))
_SIGNS = {"passed": "✓", "failed": "✗", "skipped": "–"}
PROMISED_CASES = """\
# The promised cases

Each row is a test that compares the result with plain Keras in one process: weights, history and predictions. A cell
shows on how many processes the case passed (for mirrored and central_storage: on how many devices; for
parameter_server: on how many workers; 4 for multi_worker: on 2 processes with 2 devices each). `–` means that the
backend refuses the case by name, or has no such option; the test checks that refusal. `not run` means that the run did
not include the case. The tpu column is TPU cores that were emulated on the CPU.

`make table` runs all cases, or takes the results of `make test-full`, and writes this page from them and from
`tests/contract/rows.py`. [What is proven](../README.md#what-is-proven) says what no test covers.
"""
FAULTS = """\
# The table of faults

Each row is a test that lets a fault happen to a real job. [When something fails](reliability.md) says what it means.

Something happens to rank 1 in the second epoch, and with parameter servers to the second worker (rank 2 of the job) or,
if the script does it, to the coordinator (rank 0). Only the chief, rank 0, saves: the faults of a disk happen to it.
"Ends after" is the time from the fault to the end of the last process, on a machine that did other work too. The time
limits for an answer are 4 s in the tests. After a pause, and where training continues, it includes the rest of the
training.

`make faults` runs all of this and writes this page: 26 minutes on two cores that did other work too. `make test` runs
one row and CI eight more, with longer time limits: other programs may run beside them.
"""
SCHEDULES = """\
# What survives what

Trainings of 52 batches that commit after every third batch, killed at seeded random moments, one or two faults each:
one rank or all, while a commit is written or later. Each is started again by the same command, and its weights,
optimizer, history, CSV file and TensorBoard events are compared with those of a run that nobody has disturbed: they are
equal, bit for bit. "Batches computed again" is what was lost: a commit that was not complete yet, and the batches since
the last one. "Until the next batch" is the time from the last batch before the fault to the first one after it, on a
busy machine, so most of it is the import of TensorFlow. A seed that `make chaos` prints repeats its schedule.

`make chaos` writes this page. [When something fails](reliability.md) says how to start again.
"""


def promised_cases(results: Mapping[str, Any]) -> str:
    """Returns the page with a row per promised case, a column per registered backend."""
    lines = [f"{_versions(results)} A cell shows on how many processes the case passed.", ""]
    lines += [f"| | {' | '.join(_COLUMNS)} | id |", f"|---{'|:---:' * len(_COLUMNS)}|---|"]
    for title, group in GROUPS.items():
        lines.append(f"| **{title}** |{' |' * len(_COLUMNS)} |")
        for row, text in group.items():
            outcomes = results["rows"].get(row, {})
            cells = [cell(outcomes.get(backend, {})) for backend in _COLUMNS]
            lines.append(f"| {text} | {' | '.join(cells)} | `{row}` |")
    return page(PROMISED_CASES, lines)


def faults(results: Mapping[str, Any]) -> str:
    """Returns the page of the faults: for each way to start a job a row per fault."""
    lines = [f"{_versions(results)} {results['cores']} cores.", ""]
    lines += ["| | Ends after | Exit code | What it says | Left behind | id |", "|---|---:|---:|---|---|---|"]
    for job, title in fault_table.JOBS.items():
        lines.append(f"| **{title}** | | | | | |")
        for fault, text in fault_table.FAULTS.items():
            found = results["faults"].get(f"{job}-{fault}", {})
            lines.append(f"| {text} | {' | '.join(fault_cells(job, fault, found))} | `{job}-{fault}` |")
    return page(FAULTS, lines)


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
    return page(SCHEDULES, lines)


PAGES = {
    "rows": (DOCS / "promised_cases.md", promised_cases),
    "faults": (DOCS / "faults.md", faults),
    "schedules": (DOCS / "survival.md", schedules),
}


def page(introduction: str, lines: list[str]) -> str:
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
