"""Ctrl-C outside of `fit`: all ranks end soon, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripts") / "until_stopped.py"
HOROVODRUN = Path(sys.executable).with_name("horovodrun")

pytestmark = [pytest.mark.timeout(240), pytest.mark.full, pytest.mark.alone]


def interrupted(folder: Path, *command: str, whole_group: bool = False) -> tuple[int, str, str]:
    """Presses Ctrl-C once both ranks run; returns the exit code and the output."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not all((folder / f"runs-{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the ranks don't run"
            time.sleep(0.05)
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
@pytest.mark.parametrize("case", ["evaluate", "predict", "loop"])
def test_under_our_launcher(case: str, backend: str, tmp_path: Path) -> None:
    """`evaluate` and `predict` stop on all ranks after the same step; a custom loop may stop anywhere."""
    launcher = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--backend", backend, "--log-dir", "logs"]
    code, _, err = interrupted(tmp_path, *launcher, str(SCRIPT), case)
    assert (code, err.splitlines()[-1]) == (130, "keras-dist: stopped by SIGINT.")
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert any("KeyboardInterrupt" in log for log in logs)
    assert ["stopped together" in log for log in logs] == [case != "loop"] * 2, logs


@pytest.mark.skipif(not HOROVODRUN.exists(), reason="there is no horovodrun")
def test_under_horovodrun(tmp_path: Path) -> None:
    command = [str(HOROVODRUN), "-np", "2", sys.executable, str(SCRIPT), "evaluate"]
    code, out, err = interrupted(tmp_path, *command, whole_group=True)
    assert code != 0, out + err
