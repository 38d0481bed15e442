"""Ranks that make different calls, or never join; Ctrl-C; a process that fails: all end soon, with the cause."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import limit
from tests.multiprocess.launches import (
    CONTRACT_SECONDS,
    RUN,
    SCRIPTS,
    Commands,
    finished,
    logs_of,
    run,
    seconds_since,
    until,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.timed]
TWO = [*RUN, "-np", "2", "--log-dir", "logs"]

LOOP_SECONDS = 40.0  # on a busy machine; on an idle one 5. Horovod's stall inspector would take 600
FULL = pytest.mark.full
BOTH = ("horovod", "multi_worker")
# What the error of each rank says, whichever detects it first.
OUT_OF_STEP = {
    "save_on_chief": "rank 0 called model.save('{}/model.keras'); rank 1 called model.fit (end of epoch 2)",
    "out_of_loop": "rank 0 called model.evaluate; rank 1 called kd.broadcast()",
    "caught": "rank 0 called model.predict (steps); rank 1 called model.predict",
    "barrier_on_one": "rank 0 called model.fit (end of epoch 2); rank 1 called kd.barrier()",
    "uneven": "rank 0 called model.fit (training steps); rank 1 called the end of an epoch or an evaluation",
    "loop_graph": "rank 0 called kd.barrier(); rank 1 called kd.run()",
    "loop_eager": "rank 0 called kd.barrier(); rank 1 called kd.run()",
    "loop_update": "rank 0 called kd.reduce(); rank 1 called kd.run()",
}


def outcome(folder: Path, case: str, backend: str, **variables: str) -> tuple[int, list[str], str]:
    """Returns how a job of two ranks ends: its exit code, the ranks' logs, the launcher's last line."""
    script = (SCRIPTS / "out_of_step.py", case, folder)
    done = run(*TWO, "--backend", backend, *script, folder=folder, **variables)
    logs = logs_of(folder)
    assert not any(line == "trained to the end" for log in logs for line in log.splitlines())
    return done.returncode, logs, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, marks=[] if case == "save_on_chief" else FULL)
        for case in OUT_OF_STEP
        for backend in (BOTH if case.startswith("loop_") else BOTH[:1])
    ],
)
def test_ranks_in_different_calls_are_both_named(case: str, backend: str, tmp_path: Path) -> None:
    code, logs, _ = outcome(tmp_path, case, backend)
    seconds = seconds_since(tmp_path / "failed")
    assert code == 1
    expected = "MismatchError: The ranks are in different calls, but all ranks must make the same call."
    received = OUT_OF_STEP[case].format(tmp_path)
    for log in logs:
        if expected in log:
            assert f"Received: {received}\nRemedy: Make the call on every rank" in log
    assert any(expected in log for log in logs)
    if case.startswith("loop_"):
        assert all(log.count("mean 1.25") == 1 for log in logs)
        assert seconds < LOOP_SECONDS
    elif case != "uneven":  # its clock starts before training does
        assert seconds < limit(CONTRACT_SECONDS)


@FULL
def test_a_wait_in_a_loop_has_a_limit(tmp_path: Path) -> None:
    """Horovod's stall inspector has its own limit."""
    code, logs, last = outcome(tmp_path, "loop_alone", "multi_worker", KERAS_DIST_WAIT_TIMEOUT="3")
    assert code == 1
    assert "MismatchError: Not all ranks have made the same call within 3 s." in logs[1]
    assert "Received: rank 1 of 2 waits in kd.run()" in logs[1]
    assert last.startswith("keras-dist: rank 1 exited with code 1.")
    assert seconds_since(tmp_path / "failed") < LOOP_SECONDS + 3


@FULL
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


# Ctrl-C: all ranks end soon, after the same step, and may save; one that is asked alone ends all.


Interrupted = Callable[[str, str], list[str]]


@pytest.fixture
def interrupted(commands: Commands, tmp_path: Path) -> Interrupted:
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


@FULL
@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("case", ["evaluate", "predict", "loop"])
def test_all_stop(case: str, backend: str, interrupted: Interrupted) -> None:
    """`evaluate` and `predict` stop on all ranks after the same step; a custom loop may stop anywhere."""
    logs = interrupted(case, backend)
    assert any("KeyboardInterrupt" in log for log in logs)
    assert ["stopped together" in log for log in logs] == [case != "loop"] * 2, logs


@FULL
def test_all_ranks_stop_after_the_same_step_and_save(interrupted: Interrupted, tmp_path: Path) -> None:
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


@FULL
@pytest.mark.parametrize("times", [1, 2])
def test_on_one_rank_only_it_ends_all(tmp_path: Path, times: int) -> None:
    """The rank waits for the others in vain, unless asked twice, then stops alone. They are told why."""
    command = ["--", sys.executable, "-c", ONE_IS_ASKED, str(times)]
    done = run(*TWO, *command, folder=tmp_path, KERAS_DIST_LOG="debug")
    chief, asked = logs_of(tmp_path)
    assert done.returncode != 0
    assert "PeerLostError: Rank 1 has failed, so rank 0 of 2 can't continue.\nReceived: KeyboardInterrupt" in chief
    has_waited = "keras_dist [1] DEBUG: stopped by Ctrl-C, though not all ranks are" in asked
    assert has_waited == (times == 1)


# A process that fails while a thread of tf.data runs a generator: `SLOW_GENERATOR BACKEND HOW`, a backend or none.
SLOW_GENERATOR = """
import sys, time
import keras, numpy as np, tensorflow as tf
backend, how = sys.argv[1:]

def batches():
    while True:
        for _ in range(3):
            time.sleep(0.01)  # after it, the thread waits for Python
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 9 and how == "error":
            raise ValueError("this callback is on fire")
        if batch == 9:
            sys.exit(3)

signature = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)
data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
if backend != "none":
    import keras_dist as kd
    kd.init(backend)
    model = kd.distribute(model)
model.compile("sgd", "mse")
model.fit(data, steps_per_epoch=20, epochs=10, verbose=0, callbacks=[Ends()])
"""


@pytest.mark.parametrize(("how", "code"), [("error", 1), pytest.param("exit", 3, marks=FULL)])
@pytest.mark.parametrize("backend", ["serial", pytest.param("mirrored", marks=FULL)])
def test_a_process_that_fails_ends(backend: str, how: str, code: int) -> None:
    done = run(sys.executable, "-c", SLOW_GENERATOR, backend, how, seconds=120)
    assert done.returncode == code, done.stderr
    assert ("ValueError: this callback is on fire" in done.stderr) == (how == "error")


@FULL
def test_plain_keras_hangs(commands: Commands) -> None:
    """Once it ends each time, `compat/tf_compat.py` can go. Today it does one time out of five."""

    def hangs() -> bool:
        process = commands(sys.executable, "-c", SLOW_GENERATOR, "none", "error")
        while (line := process.stderr.readline()) and "ValueError: this callback is on fire" not in line:
            pass
        try:
            process.wait(limit(5.0))  # after the traceback nothing is left to do
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return True
        return False

    assert any(hangs() for _ in range(6))
