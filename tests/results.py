"""What a run has shown: `pytest --results FOLDER` appends a line for each test, and resumes where it stopped."""

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Properties of a test, which go into its line.
CASE = "case"  # row, backend, size
FAULT = "fault"  # job and fault, what was found
SCHEDULE = "schedule"  # seed, what was found
_PACKAGES = ("keras_dist", "keras", "tensorflow", "tensorflow-cpu", "horovod")
_SHOWN_LINES = 12

Line = dict[str, Any]


class Recorder:
    """The plugin of pytest behind `--results` and `--shard`. Only the process that the user has started writes."""

    def __init__(self, folder: Path | None, shard: tuple[int, int] | None) -> None:
        self._shard = shard
        self._lines: dict[str, Line] = {}
        self._file = folder / f"{f'{shard[0]}-of-{shard[1]}' if shard else 'all'}.jsonl" if folder else None
        self._done: list[str] = []
        if folder:
            self._done = [line["test"] for line in read(folder) if line["outcome"] != "failed"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells the processes of `-n 2`, also one that replaces another, what was done when the run began."""
        node.workerinput["done"] = self._done

    @pytest.hookimpl(trylast=True)  # after `-m` and `-k`, in the order of the clusters
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = set(getattr(config, "workerinput", {}).get("done", self._done))
        kept = [item for item in items if item.nodeid not in done]
        if self._shard:
            kept = of_shard(kept, *self._shard)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None:
            return
        line = self._lines.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        line["seconds"] += report.duration
        if report.outcome == "failed" or (report.outcome == "skipped" and line["outcome"] == "passed"):
            line["outcome"], line["message"] = report.outcome, _message(report)
        if report.when == "teardown" or report.when not in ("setup", "call"):  # the latter: its process has died
            _append(self._file, {**line, **dict(report.user_properties)})
            del self._lines[report.nodeid]


def of_shard(items: list[pytest.Item], index: int, count: int) -> list[pytest.Item]:
    """Returns the tests of shard `index` of `count`, from 1. Which they are depends on their files alone."""
    return [item for item in items if zlib.crc32(item.nodeid.partition("::")[0].encode()) % count == index - 1]


def read(folder: Path) -> list[Line]:
    """Returns the last line of each test."""
    lines: dict[str, Line] = {}
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime):
        for text in file.read_text().splitlines()[1:]:
            line = json.loads(text)
            lines.pop(line["test"], None)
            lines[line["test"]] = line
    return list(lines.values())


def environment_of(folder: Path) -> dict[str, Any]:
    """Returns with what the tests of a folder were run; `{}` if there are none, an error if with several versions."""
    found = [json.loads(file.read_text().splitlines()[0])["environment"] for file in folder.glob("*.jsonl")]
    for other in found[1:]:
        check_same(folder, found[0], other)
    return found[0] if found else {}


def check_same(folder: Path, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises an error if results can't be those of one run. Its parts may run on machines with other cores."""
    if {**one, "cores": 0} != {**other, "cores": 0}:
        raise ValueError(
            f"{folder} has results of another commit or environment.\nReceived: {one} and {other}\n"
            "Delete the folder, or name another one with --results."
        )


@functools.cache
def environment() -> dict[str, Any]:
    """Returns with what tests are run here: versions, cores, the commit and what was changed since."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(), "packages": versions, "cores": os.cpu_count(), "commit": _commit(),
    }  # fmt: skip


def parts(lines: Iterable[Line]) -> dict[str, Any]:
    """Returns what the pages of the manual are made from. A case has passed on a cluster if all of its tests have."""
    rows: dict[str, dict[str, dict[str, str]]] = {}
    faults, schedules = {}, {}
    for line in lines:
        if CASE in line:
            row, backend, size = line[CASE]
            sizes = rows.setdefault(row, {}).setdefault(backend, {})
            if sizes.get(str(size), "passed") == "passed":
                sizes[str(size)] = line["outcome"]
        if FAULT in line:
            cell, found = line[FAULT]
            faults[cell] = {**found, "outcome": line["outcome"]}
        if SCHEDULE in line:
            seed, found = line[SCHEDULE]
            schedules[seed] = {**found, "outcome": line["outcome"]}
    return {"rows": rows, "faults": faults, "schedules": schedules}


def parse_shard(text: str) -> tuple[int, int]:
    """Returns `(2, 8)` for `"2/8"`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"a shard is written as 2/8, the second of eight, not as {text!r}")
    return int(match[1]), int(match[2])


def _append(file: Path, line: Line) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    begins = not file.exists()
    with file.open("a") as lines:  # whole lines only: an interrupted run resumes after the last one
        lines.write((json.dumps({"environment": environment()}) + "\n" if begins else "") + json.dumps(line) + "\n")


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = text.splitlines()
    if len(lines) > 2 * _SHOWN_LINES:  # the end of a job's output says why it ended
        lines = [*lines[:_SHOWN_LINES], "...", *lines[-_SHOWN_LINES:]]
    return "\n".join(lines)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("diff", "HEAD") + git("ls-files", "--others", "--exclude-standard")
        return git("rev-parse", "--short", "HEAD").strip() + (
            f" changed ({hashlib.sha256(changed.encode()).hexdigest()[:8]})" if changed else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
