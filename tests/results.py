"""What a run has shown: of each promised case, by backend and number of ranks; of each fault, by launcher; of each
schedule of faults, by its seed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import pytest

SCHEDULE = "schedule"  # a property of a test: the seed, and what it has found
_PACKAGES = ("keras_dist", "keras", "tensorflow", "tensorflow-cpu", "horovod")


class Results:
    """Collects the outcomes: a case has passed on a cluster if all of its tests have."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, dict[str, str]]] = {}
        self._faults: dict[str, dict[str, Any]] = {}
        self._schedules: dict[str, dict[str, Any]] = {}

    def add(self, row: str, cluster: tuple[str, int], report: pytest.TestReport) -> None:
        """Takes in one phase of one test."""
        if report.when != "call" and report.outcome == "passed":
            return
        backend, size = cluster
        sizes = self._rows.setdefault(row, {}).setdefault(backend, {})
        if sizes.get(str(size), "passed") == "passed":
            sizes[str(size)] = report.outcome

    def add_fault(self, cell: str, found: dict[str, Any], report: pytest.TestReport) -> None:
        """Takes in how a job ended in which a fault happened."""
        if report.when == "call" or report.outcome == "failed":
            self._faults[cell] = {**found, "outcome": report.outcome}

    def add_schedule(self, seed: int, found: dict[str, Any], report: pytest.TestReport) -> None:
        """Takes in how a training went on after the faults of a schedule."""
        if report.when == "call" or report.outcome == "failed":
            self._schedules[str(seed)] = {**found, "outcome": report.outcome}

    def as_json(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "packages": _versions(),
            "cores": os.cpu_count(),
            "rows": self._rows,
            "faults": self._faults,
            "schedules": self._schedules,
        }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
