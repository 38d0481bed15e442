"""Each fault, in a job that was started in each way: it ends in time, names the cause, and leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import CI, FAULTS, JOBS, ON_DISK, USUAL, promise
from tests.limits import limit
from tests.multiprocess import fault_jobs
from tests.results import FAULT

pytestmark = [pytest.mark.timeout(240), pytest.mark.alone]


def cells() -> list[Any]:
    tiers: dict[Any, list[pytest.MarkDecorator]] = {**dict.fromkeys(USUAL, []), **dict.fromkeys(CI, [pytest.mark.ci])}
    return [
        pytest.param(job, fault, id=f"{job}-{fault}", marks=tiers.get((job, fault), [pytest.mark.full]))
        for job in JOBS
        for fault in FAULTS
        if promise(job, fault) is not None
    ]


@pytest.mark.parametrize(("job", "fault"), cells())
def test_fault(job: str, fault: str, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    promised = promise(job, fault)
    assert promised is not None
    if (reason := fault_jobs.why_not(fault)) is not None:
        pytest.skip(reason)
    outcome = fault_jobs.run(job, fault, tmp_path)
    says = "\n".join(outcome.says[-promised.lines :])
    found = promised.says and re.search(promised.says, says)
    named = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", found[0]) if found else ""
    result = {"seconds": outcome.seconds, "code": outcome.code, "says": named, "left": outcome.stays}
    record_property(FAULT, [f"{job}-{fault}", result])

    assert outcome.happened, outcome.output
    assert outcome.code == promised.code, outcome.output
    assert promised.says is None or found, f"no {promised.says!r} in the last lines of\n{outcome.output}"
    assert re.search(promised.shows, outcome.output), f"no {promised.shows!r} in\n{outcome.output}"
    assert not blames_a_victim(job, fault, says), outcome.output
    assert ("trained to the end" in outcome.output) == promised.goes_on
    assert outcome.left == [], outcome.output
    assert outcome.seconds < limit(promised.seconds), outcome.output


def blames_a_victim(job: str, fault: str, says: str) -> bool:
    """True if one of the last lines names the rank that goes on, or would, as the one that failed."""
    if job in ("one-process", "run-parameter-server"):
        return False  # there is no other rank that runs the script
    victim = 1 if fault in ON_DISK else 0
    manner = r"(was (killed|stopped)|exited|at \S+ (has|does)|has (ended|failed)|shows no life)"
    return re.search(rf"[Rr]ank {victim} {manner}", says) is not None
