"""Ranks that go out of step, or never join: all end soon, with the cause in the error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import limit

CONTRACT_SECONDS = 5.0  # all ranks have ended so long after one fails

pytestmark = [pytest.mark.timeout(180), pytest.mark.alone]

SCRIPT = """
import os, sys, time
import numpy as np
import tensorflow as tf
import keras
import keras_dist as kd

case, folder = sys.argv[1], sys.argv[2]

def now():
    with open(os.path.join(folder, "failed"), "w") as file:
        file.write(str(time.monotonic()))

kd.init()
second = kd.rank() == 1
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")

class Fault(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch != 1:
            return
        if case == "save_on_chief" and kd.is_chief():
            now()
            model.save(os.path.join(folder, "model.keras"))
        if case == "barrier_on_one" and second:
            now()
            kd.barrier()

class StopEvaluating(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = second

def batches():
    count = 4 if case == "uneven" and second else 8
    for index in range(count):
        yield x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]

spec = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)
data = tf.data.Dataset.from_generator(batches, output_signature=spec)
if case == "uneven":
    now()
model.fit(data, epochs=4, verbose=0, callbacks=[Fault()])
if case == "stop_evaluating":
    now()
    model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[StopEvaluating()])
if case == "out_of_loop" and kd.is_chief():
    now()
    model.evaluate(x, y, verbose=0)
if case == "out_of_loop" and not kd.is_chief():
    kd.broadcast(1)
print("trained to the end")
"""


class Outcome:
    """How a job of two ranks ended."""

    def __init__(self, folder: Path, case: str) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--log-dir", str(folder / "logs")]
        done = subprocess.run(
            [*command, str(script), case, str(folder)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        failed = folder / "failed"
        self.seconds = time.monotonic() - float(failed.read_text()) if failed.exists() else 0.0
        self.code = done.returncode
        self.logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]


# What the error of each rank says, whichever rank detects it first.
OUT_OF_STEP = {
    "save_on_chief": "rank 0 called model.save('{folder}/model.keras'); rank 1 called model.fit (end of epoch 2)",
    "barrier_on_one": "rank 0 called model.fit (end of epoch 2); rank 1 called kd.barrier()",
    "uneven": "rank 0 called model.fit (training steps); rank 1 called the end of an epoch or an evaluation",
    "out_of_loop": "rank 0 called model.evaluate; rank 1 called kd.broadcast()",
}


USUAL = ("save_on_chief", "out_of_loop")


@pytest.mark.parametrize(
    "case", [*USUAL, *(pytest.param(case, marks=pytest.mark.full) for case in OUT_OF_STEP if case not in USUAL)]
)
def test_ranks_in_different_calls_are_both_named(case: str, tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, case)
    assert outcome.code == 1
    expected = "MismatchError: The ranks are in different calls, but all ranks must make the same call."
    for log in outcome.logs:
        if expected in log:
            assert f"Received: {OUT_OF_STEP[case].format(folder=tmp_path)}\n" in log
            assert "Remedy: Make the call on every rank" in log
    assert any(expected in log for log in outcome.logs)
    assert not any(line == "trained to the end" for log in outcome.logs for line in log.splitlines())
    if case != "uneven":  # its clock starts before training does
        assert outcome.seconds < limit(CONTRACT_SECONDS)


@pytest.mark.full
def test_evaluation_that_one_rank_stops_is_reported(tmp_path: Path) -> None:
    """The other rank is in a later step, or has finished."""
    outcome = Outcome(tmp_path, "stop_evaluating")
    assert outcome.code == 1
    expected = "rank 1 called the end of an epoch or an evaluation that model.stop_evaluating stopped"
    reports = [log for log in outcome.logs if f"; {expected}\n" in log]
    assert reports
    assert all("MismatchError: The ranks are in different calls" in log for log in reports)
    assert not any(line == "trained to the end" for log in outcome.logs for line in log.splitlines())


def test_missing_rank_is_named(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    time.sleep(60)\n"
        "import keras_dist as kd\n"
        "kd.init()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist", "run", "-np", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "KERAS_DIST_JOIN_TIMEOUT": "3", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 1
    assert "PeerLostError: Not all ranks have joined within 3 s." in done.stderr
    assert "Received: missing: rank 1 of 2" in done.stderr
