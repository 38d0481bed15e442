"""Who of the parameter servers' processes may be killed, at a random moment, which FAULT_SEED draws again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forks import ForkServer
from tests.multiprocess.fault_runs import END_SECONDS, Run, assert_same, make_plan

SEED = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(10**6))
HANG_SECONDS = 4.0
FOUND_OUT_SECONDS = 90.0  # a few pings that aren't answered, each in a call that TensorFlow makes after the other
JOIN_SECONDS = 15.0  # of the coordinator, where somebody goes or hangs before he has come
RATE = 0.1  # of the script's asynchronous training
pytestmark = [pytest.mark.timeout(600), pytest.mark.full, pytest.mark.alone]

# What happens: in which mode, to whom, and who is started again.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "a worker": ("sync", ["worker-1"], []),
    "a worker that returns": ("sync", ["worker-1"], ["worker-1"]),
    "all workers": ("sync", ["worker-0", "worker-1"], ["worker-0", "worker-1"]),
    "a worker that hangs": ("sync", ["worker-0"], []),
    "the server": ("sync", ["ps-0"], []),
    "the coordinator": ("sync", ["chief-0"], []),
    "a worker, async": ("async", ["worker-0"], []),
    "all workers, async": ("async", ["worker-0", "worker-1"], ["worker-1", "worker-0"]),
    "the server that hangs": ("sync", ["ps-0"], []),
}
Start = Callable[..., Run]


@pytest.fixture(scope="module")
def undisturbed(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one plain process computes, by mode."""
    return {mode: Run.plain(forks, tmp_path_factory.mktemp(mode), {"mode": mode}) for mode in ("sync", "async")}


@pytest.fixture
def start(forks: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Starts a run of a case, whose processes are gone after the test."""
    runs: list[Run] = []

    def start(case: str) -> Run:
        mode, who, _ = CASES[case]
        plan = make_plan(case, list(CASES).index(case), SEED)
        hangs = "hangs" in case
        plan |= {"mode": mode, "who": who, "hangs": hangs, "hang_seconds": HANG_SECONDS if hangs else 600.0}
        plan["join"] = JOIN_SECONDS if hangs or who == ["ps-0"] else 120.0
        runs.append(Run(forks, tmp_path, plan))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def restarted(case: str, run: Run) -> list[str]:
    """Who is started again. A worker that goes before the first step has to: all must have come once."""
    _, who, returning = CASES[case]
    return who if run.moment == "start" and not returning else returning


@pytest.mark.parametrize("case", ["a worker", "a worker that returns", "all workers", "a worker that hangs"])
def test_lost_workers_change_no_number(case: str, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start(case)
    code = run.wait([] if "hangs" in case else restarted(case, run))
    with run.reported():
        if "hangs" in case and run.moment == "start" and code:  # it had not been connected to
            assert "PeerLostError: Not all workers and servers have come within" in run.output()
            assert "missing: worker 0 at 127.0.0.1:" in run.output()
            return
        assert code == 0
        assert_same(run.result(), undisturbed["sync"])
        assert run.seconds_since_fault() > 0
        if "hangs" in case and run.moment in ("step", "validation", "checkpoint"):
            assert f"is lost (no answer for {HANG_SECONDS:g} s); 1 of 2 continue." in run.output()
        if case == "all workers" and run.moment in ("step", "validation"):
            assert " is lost (" in run.output()
            assert " is back." in run.output()


@pytest.mark.parametrize("case", ["the server", "the server that hangs"])
def test_a_lost_server_is_an_error_at_once_and_the_next_start_resumes(
    case: str, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start(case)
    assert run.wait() == 1, run.report()
    with run.reported():
        assert "PeerLostError: " in run.output()
        assert "server 0 at 127.0.0.1:" in run.output()
        if "Not all workers and servers have come" not in run.output():  # it was there once, so nobody waits for it
            assert run.seconds_since_fault() < (FOUND_OUT_SECONDS if "hangs" in case else END_SECONDS)
            assert "Received: server 0 at 127.0.0.1:" in run.output()
            assert (" hangs, or is cut off" in run.output()) == ("hangs" in case)
        codes = run.codes_of_others()
        assert codes.pop("ps-0", None) == (None if "hangs" in case else -9)
        if run.moment != "start":  # else they may not have seen the coordinator, and wait for it
            assert codes == {"worker-0": 0, "worker-1": 0}
    run.close()
    assert_resumes(start(case), undisturbed)


def test_workers_and_servers_end_with_the_coordinator_and_the_next_start_resumes(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start("the coordinator")
    assert run.wait() == -9, run.report()
    with run.reported():
        codes = run.codes_of_others()
        assert codes.keys() == {"worker-0", "worker-1", "ps-0"}
        # At the start somebody may not have seen it yet, and waits for it.
        assert set(codes.values()) <= ({0, None} if run.moment == "start" else {0})
    run.close()
    assert_resumes(start("the coordinator"), undisturbed)


def assert_resumes(again: Run, undisturbed: dict[str, Any]) -> None:
    assert again.wait() == 0, again.report()
    with again.reported():
        result = again.result()
        assert_same(result, undisturbed["sync"])
        epochs = len(result["history"].get("loss", []))
        assert epochs == again.epochs_left(), "it began anew"


@pytest.mark.parametrize("case", ["a worker, async", "all workers, async"])
def test_async_counts_every_example_once(case: str, start: Start, undisturbed: dict[str, Any]) -> None:
    """A step whose worker died while it applied its gradients is made again; nothing else is."""
    run = start(case)
    assert run.wait(restarted(case, run)) == 0, run.report()
    with run.reported():
        result, expected, killed = run.result(), undisturbed["async"], len(CASES[case][1])
        for key in ("counted", "val_counted"):
            np.testing.assert_allclose(result["history"][key], expected["history"][key], rtol=1e-12, err_msg=key)
        assert 0 <= result["iterations"] - expected["iterations"] <= killed
        for own, weight, largest in zip(result["weights"], expected["weights"], (3.0, 1.0), strict=True):
            np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9 + killed * RATE * largest)
            if not result["iterations"] - expected["iterations"] and run.moment != "step":
                np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)
