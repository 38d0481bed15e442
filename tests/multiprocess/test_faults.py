"""Ranks that make different calls, in `fit` or in a custom loop, or never join: all end soon, with the cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.limits import limit
from tests.multiprocess.launches import CONTRACT_SECONDS, RUN, SCRIPTS, logs_of, run, seconds_since

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

LOOP_SECONDS = 40.0  # on a busy machine; on an idle one 5. Horovod's stall inspector would take 600
FULL = pytest.mark.full
# The tier, and what the error of each rank says, whichever detects it first.
OUT_OF_STEP = {
    "save_on_chief": ("", "rank 0 called model.save('{}/model.keras'); rank 1 called model.fit (end of epoch 2)"),
    "out_of_loop": ("", "rank 0 called model.evaluate; rank 1 called kd.broadcast()"),
    "barrier_on_one": ("full", "rank 0 called model.fit (end of epoch 2); rank 1 called kd.barrier()"),
    "uneven": ("full", "rank 0 called model.fit (training steps); rank 1 called the end of an epoch or an evaluation"),
    "loop_graph": ("full", "rank 0 called kd.barrier(); rank 1 called kd.run()"),
    "loop_eager": ("full", "rank 0 called kd.barrier(); rank 1 called kd.run()"),
    "loop_update": ("full", "rank 0 called kd.reduce(); rank 1 called kd.run()"),
}


def cases() -> list[object]:
    found = []
    for case, (tier, _) in OUT_OF_STEP.items():
        for backend in ("horovod", "multi_worker") if case.startswith("loop_") else ("horovod",):
            found.append(pytest.param(case, backend, marks=[FULL] if tier else []))
    return found


def outcome(folder: Path, case: str, backend: str, **variables: str) -> tuple[int, list[str], str]:
    """Returns how a job of two ranks ends: its exit code, the ranks' logs, the launcher's last line."""
    script = (SCRIPTS / "out_of_step.py", case, folder)
    done = run(*RUN, "-np", "2", "--backend", backend, "--log-dir", "logs", *script, folder=folder, **variables)
    logs = logs_of(folder)
    assert not any(line == "trained to the end" for log in logs for line in log.splitlines())
    return done.returncode, logs, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("case", "backend"), cases())
def test_ranks_in_different_calls_are_both_named(case: str, backend: str, tmp_path: Path) -> None:
    code, logs, _ = outcome(tmp_path, case, backend)
    seconds = seconds_since(tmp_path / "failed")
    assert code == 1
    expected = "MismatchError: The ranks are in different calls, but all ranks must make the same call."
    received = OUT_OF_STEP[case][1].format(tmp_path)
    for log in logs:
        if expected in log:
            assert f"Received: {received}\nRemedy: Make the call on every rank" in log
    assert any(expected in log for log in logs)
    if case.startswith("loop_"):
        assert all(log.count("mean 1.25") == 1 for log in logs)
        assert seconds < LOOP_SECONDS
    elif case != "uneven":  # its clock starts before training does
        assert seconds < limit(CONTRACT_SECONDS)


@pytest.mark.full
def test_a_wait_in_a_loop_has_a_limit(tmp_path: Path) -> None:
    """Horovod's stall inspector has its own limit."""
    code, logs, last = outcome(tmp_path, "loop_alone", "multi_worker", KERAS_DIST_WAIT_TIMEOUT="3")
    assert code == 1
    assert "MismatchError: Not all ranks have made the same call within 3 s." in logs[1]
    assert "Received: rank 1 of 2 waits in kd.run()" in logs[1]
    assert last.startswith("keras-dist: rank 1 exited with code 1.")
    assert seconds_since(tmp_path / "failed") < LOOP_SECONDS + 3


@pytest.mark.full
def test_evaluation_that_one_rank_stops_is_reported(tmp_path: Path) -> None:
    """The other rank is in a later step, or has finished."""
    code, logs, _ = outcome(tmp_path, "stop_evaluating", "horovod")
    assert code == 1
    expected = "rank 1 called the end of an epoch or an evaluation that model.stop_evaluating stopped"
    reports = [log for log in logs if f"; {expected}\n" in log]
    assert reports
    assert all("MismatchError: The ranks are in different calls" in log for log in reports)


def test_missing_rank_is_named(tmp_path: Path) -> None:
    late = "import os, time; os.environ['HOROVOD_RANK'] == '1' and time.sleep(60); import keras_dist as kd; kd.init()"
    done = run(*RUN, "-np", "2", "--", sys.executable, "-c", late, folder=tmp_path, KERAS_DIST_JOIN_TIMEOUT="3")
    assert done.returncode == 1
    assert "PeerLostError: Not all ranks have joined within 3 s." in done.stderr
    assert "Received: missing: rank 1 of 2" in done.stderr
