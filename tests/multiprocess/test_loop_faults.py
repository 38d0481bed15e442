"""Ranks that go out of step in a custom loop, where no Python of ours surrounds a collective."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.full, pytest.mark.alone]

FOUND_SECONDS = 40.0  # on a busy machine; on an idle one 5. Horovod's stall inspector would take 600

SCRIPT = """
import os, sys, time
import keras
import tensorflow as tf
import keras_dist as kd

case, folder = sys.argv[1], sys.argv[2]

def now():
    with open(os.path.join(folder, "failed"), "w") as file:
        file.write(str(time.monotonic()))

kd.init()
second = kd.rank() == 1
variable = keras.Variable([0.0])
optimizer = kd.distribute(keras.optimizers.SGD(0.1))
optimizer.build([variable])
x = tf.constant([float(kd.rank()), 2.0])

def loss(x):
    return tf.reduce_mean(x)

def mean(x):
    return kd.reduce("mean", kd.run(loss, (x,)))

def update(x):
    def step(x):
        optimizer.apply([tf.reduce_mean(x)[None]], [variable])
    kd.run(step, (x,))

if case != "eager":
    signature = [tf.TensorSpec([None])]  # with a known shape, the ranks would sum the numbers of examples only once
    mean, update = tf.function(mean, signature), tf.function(update, signature)
print("mean", float(mean(x)))
update(x)
kd.barrier()
mean(x)
now()
if second:
    if case == "update":
        update(x)
    else:
        mean(x)
elif case == "alone":
    time.sleep(100)
elif case == "update":
    kd.reduce("sum", tf.constant(1.0))
else:
    kd.barrier()
print("to the end")
"""


def run(folder: Path, case: str, backend: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs the script as two ranks; returns also the seconds from the last common call to the end."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--backend", backend, "--output", "all"]
    done = subprocess.run(
        [*command, str(script), case, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return done, time.monotonic() - float((folder / "failed").read_text())


BACKENDS = pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
OUT_OF_STEP = {
    "graph": "rank 0 called kd.barrier(); rank 1 called kd.run()",
    "eager": "rank 0 called kd.barrier(); rank 1 called kd.run()",
    "update": "rank 0 called kd.reduce(); rank 1 called kd.run()",
}


@BACKENDS
@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_both_calls_are_named(case: str, backend: str, tmp_path: Path) -> None:
    done, seconds = run(tmp_path, case, backend)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("mean 1.25") == 2
    assert "to the end" not in done.stdout
    assert "MismatchError: The ranks are in different calls, but all ranks must make the same call." in done.stderr
    assert f"Received: {OUT_OF_STEP[case]}" in done.stderr
    assert seconds < FOUND_SECONDS


def test_a_wait_has_a_limit(tmp_path: Path) -> None:
    """Horovod's stall inspector has its own limit."""
    done, seconds = run(tmp_path, "alone", "multi_worker", KERAS_DIST_WAIT_TIMEOUT="3")
    assert done.returncode == 1
    assert "MismatchError: Not all ranks have made the same call within 3 s." in done.stderr
    assert "Received: rank 1 of 2 waits in kd.run()" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("keras-dist: rank 1 exited with code 1.")
    assert "to the end" not in done.stdout
    assert seconds < FOUND_SECONDS + 3
