"""Ctrl-C: all ranks end soon, after the same step, and may save; one that is asked alone ends all."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launches import RUN, SCRIPTS, Commands, finished, logs_of, run, until

pytestmark = [pytest.mark.timeout(240), pytest.mark.full, pytest.mark.alone]
TWO = [*RUN, "-np", "2", "--log-dir", "logs"]


@pytest.fixture
def interrupted(commands: Commands, tmp_path: Path) -> Callable[[str, str], list[str]]:
    """Presses Ctrl-C once both ranks run; returns their logs."""

    def of(case: str, backend: str) -> list[str]:
        process = commands(*TWO, "--backend", backend, str(SCRIPTS / "until_interrupted.py"), case)
        ready = [tmp_path / f"runs-{rank}" for rank in (0, 1)]
        until(lambda: process.poll() is not None or all(path.exists() for path in ready), 180)
        process.send_signal(signal.SIGINT)
        code, _, err = finished(process, 30)
        assert (code, err.splitlines()[-1]) == (130, "keras-dist: stopped by SIGINT.")
        return logs_of(tmp_path)

    return of


@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
@pytest.mark.parametrize("case", ["evaluate", "predict", "loop"])
def test_all_stop(case: str, backend: str, interrupted: Any) -> None:
    """`evaluate` and `predict` stop on all ranks after the same step; a custom loop may stop anywhere."""
    logs = interrupted(case, backend)
    assert any("KeyboardInterrupt" in log for log in logs)
    assert ["stopped together" in log for log in logs] == [case != "loop"] * 2, logs


def test_all_ranks_stop_after_the_same_step_and_save(interrupted: Any, tmp_path: Path) -> None:
    """The script catches it, saves, trains on, and catches the next one."""
    logs = interrupted("fit", "horovod")
    stopped = [re.findall(r"^(apart|together) after (\d+) (\w+)$", log, re.MULTILINE) for log in logs]
    assert stopped[0] == stopped[1], logs
    apart, saved_apart, together, saved_together = stopped[0]
    assert apart == saved_apart
    assert together == saved_together
    assert apart[:2] == ("apart", "36")
    assert together[0] == "together"
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["apart.keras", "together.keras"]


ONE_IS_ASKED = """
import os, signal, sys
import keras, numpy as np
import keras_dist as kd

class Ask(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if kd.rank() == 1 and epoch == 2:
            for _ in range(int(sys.argv[1])):
                os.kill(os.getpid(), signal.SIGINT)

kd.init()
x = np.ones([64, 4])
model = kd.distribute(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=10**6, verbose=0, callbacks=[Ask()])
"""


@pytest.mark.parametrize("times", [1, 2])
def test_on_one_rank_only_it_ends_all(tmp_path: Path, times: int) -> None:
    """The rank waits for the others in vain, unless asked twice, then stops alone. They are told why."""
    command = [*TWO, "--", sys.executable, "-c", ONE_IS_ASKED, str(times)]
    done = run(*command, folder=tmp_path, KERAS_DIST_LOG="debug")
    chief, asked = logs_of(tmp_path)
    assert done.returncode != 0
    assert "PeerLostError: Rank 1 has failed, so rank 0 of 2 can't continue.\nReceived: KeyboardInterrupt" in chief
    has_waited = "keras_dist [1] DEBUG: stopped by Ctrl-C, though not all ranks are" in asked
    assert has_waited == (times == 1)
