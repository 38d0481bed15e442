"""The backend `multi_worker`: ranks in TF_CONFIG, joining with and without our launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keras_dist import environment, store
from keras_dist.comm.backend import Rendezvous
from keras_dist.environment import detect_launch
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import MultiWorkerCluster
from tests.limits import limit

CONTRACT_SECONDS = 10.0  # all ranks have ended so long after they went out of step

pytestmark = [pytest.mark.timeout(300), pytest.mark.full, pytest.mark.alone]

# --- TF_CONFIG ---

A, B, C = "host-a:2222", "host-b:2222", "host-b:2223"


def tf_config(cluster: dict[str, Any], job: str, index: int | str) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.mark.parametrize(
    ("jobs", "job", "index", "rank", "workers"),
    [
        ({"worker": [A, B]}, "worker", 1, 1, (A, B)),
        ({"worker": [A, B]}, "worker", "1", 1, (A, B)),
        ({"chief": [A], "worker": [B, C]}, "worker", 1, 2, (A, B, C)),
        ({"worker": [B, C], "chief": [A]}, "worker", 0, 1, (A, B, C)),
        ({"worker": [B, C], "chief": [A]}, "chief", 0, 0, (A, B, C)),
        ({"worker": [B], "master": [A]}, "master", 0, 0, (A, B)),
        ({"worker": {"1": B, "0": A}}, "worker", 0, 0, (A, B)),
        ({"evaluator": [C], "worker": [A, B]}, "worker", 1, 1, (A, B)),
        ({"worker": [A], "ps": []}, "worker", 0, 0, (A,)),
    ],
)
def test_ranks_of_tf_config(jobs: Any, job: str, index: Any, rank: int, workers: tuple[str, ...]) -> None:
    launch = detect_launch(tf_config(jobs, job, index))
    assert launch is not None
    assert (launch.launcher, launch.topology.rank, launch.topology.size) == ("TF_CONFIG", rank, len(workers))
    assert launch.workers == workers


def test_local_ranks_are_those_of_one_host() -> None:
    launches = [detect_launch(tf_config({"worker": [C, A, B]}, "worker", index)) for index in range(3)]
    places = [(launch.topology.local_rank, launch.topology.local_size) for launch in launches if launch]
    assert places == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize("text", [None, "", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_a_tf_config_without_cluster_is_no_launch(text: str | None) -> None:
    assert detect_launch({} if text is None else {"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("environ", "problem", "received"),
    [
        (tf_config({"worker": [A], "evaluator": [B]}, "evaluator", 0), "an evaluator", "'evaluator'"),
        (tf_config({"worker": [A]}, "evaluator", 0), "an evaluator", "'evaluator'"),
        (tf_config({"worker": [A], "ps": [B]}, "worker", 1), "not in its cluster", "worker 0, ps 0"),
        (tf_config({"worker": [A], "tpu_worker": [B]}, "worker", 0), "at most one 'chief'", "tpu_worker: 1"),
        (tf_config({"chief": [A, B]}, "chief", 0), "at most one 'chief'", "chief: 2"),
        (tf_config({"worker": [A, B]}, "worker", 2), "not in its cluster", "worker 0, worker 1"),
        (tf_config({"worker": [A, B]}, "chief", 0), "not in its cluster", "worker 0, worker 1"),
        (tf_config({"worker": "host"}, "worker", 0), "a list of 'host:port'", "'host'"),
        (tf_config({"worker": ["host"]}, "worker", 0), "a list of 'host:port'", "'host'"),
        ({"TF_CONFIG": "{cluster"}, "not JSON", "{cluster"),
        ({"TF_CONFIG": "[1]"}, "a JSON object", "[1]"),
    ],
)
def test_what_tf_config_must_not_say(environ: dict[str, str], problem: str, received: str) -> None:
    with pytest.raises(ConfigurationError) as info:
        detect_launch(environ)
    assert problem in info.value.problem
    assert received in str(info.value.received)
    assert info.value.remedy


def test_horovods_launchers_come_first() -> None:
    horovod = {f"HOROVOD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    horovod |= {f"HOROVOD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    launch = detect_launch({**tf_config({"worker": [A, B]}, "worker", 0), **horovod})
    assert launch is not None
    assert launch.workers == ()


def test_our_cluster_is_one_of_tf_config() -> None:
    inherited = {"HOME": "/home", "HOROVOD_RANK": "9", "HOROVOD_SIZE": "9", environment.INITIALIZED_BY: "1"}
    with MultiWorkerCluster(2, inherited) as cluster:
        launches = [detect_launch(cluster.environment(rank)) for rank in range(2)]
        assert cluster.environment(0)["HOME"] == "/home"
        assert environment.INITIALIZED_BY not in cluster.environment(0)
        assert [launch and launch.topology.rank for launch in launches] == [0, 1]
        assert launches[0] is not None
        assert launches[0].rendezvous == ("127.0.0.1", cluster.port)
        assert launches[0].launcher == "keras-dist run"
        assert len(set(launches[0].workers)) == 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.port), timeout=5)


def test_the_store_keeps_texts() -> None:
    server = store.serve()
    rendezvous = Rendezvous(("127.0.0.1", server.port))
    rendezvous.put("failed", "1 ValueError: größer")
    assert rendezvous.get("failed") == "1 ValueError: größer"
    assert rendezvous.get("left_0") is None
    rendezvous.put("failed", "x" * (2 << 20))
    assert rendezvous.get("failed") == "1 ValueError: größer", "too long for a message"
    server.close()
    assert rendezvous.get("failed") is None


# --- Processes ---

SCRIPT = """
import os, sys, time
import numpy as np
import keras
import keras_dist as kd

case, folder = sys.argv[1], sys.argv[2]

def now():
    with open(os.path.join(folder, "failed"), "w") as file:
        file.write(str(time.monotonic()))

class Fault(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch != 1:
            return
        if case == "calls" and kd.rank() == 1:
            now()
            kd.barrier()

kd.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
history = model.fit(x, y, batch_size=8, shuffle=False, epochs=3, verbose=0, callbacks=[Fault()])
print("trained as rank", kd.rank(), "to", repr(history.history["loss"][-1]), float(model.get_weights()[0].sum()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **more}


def seconds_since_the_fault(folder: Path) -> float:
    return time.monotonic() - float((folder / "failed").read_text())


def run_as_tf_config(
    script: Path, case: str, cluster: dict[str, list[str]], tasks: list[tuple[str, int]]
) -> list[tuple[int, str]]:
    """Runs plain processes, and returns the exit code and output of each."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), case, str(script.parent)],
            env=environ(**tf_config(cluster, *task)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in tasks
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_by_launcher(script: Path, case: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", "--backend", "multi_worker", "--output", "all"]
    return subprocess.run(
        [*command, str(script), case, str(script.parent)],
        env=environ(**more),
        capture_output=True,
        text=True,
        timeout=200,
    )


def free_addresses(count: int) -> list[str]:
    with MultiWorkerCluster(count, {}) as cluster:
        launch = detect_launch(cluster.environment(0))
    assert launch is not None
    return [*launch.workers]


def test_our_launcher_needs_no_horovod(script: Path, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text('raise ImportError("no compiler here")')
    done = run_by_launcher(script, "none", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "keras_dist: multi_worker (2 ranks, CPU; started by keras-dist run)" in done.stderr
    trained = sorted(line for line in done.stdout.splitlines() if "trained as" in line)
    assert len(trained) == 2
    plain = subprocess.run(
        [sys.executable, str(script), "none", str(tmp_path)], env=environ(), capture_output=True, text=True, timeout=200
    )
    expected = [float(word) for word in plain.stdout.split()[-2:]]
    for rank, line in enumerate(trained):
        assert line.startswith(f"[{rank}] trained as rank {rank} to ")
        assert [float(word) for word in line.split()[-2:]] == pytest.approx(expected, abs=1e-6)


def test_plain_processes_of_tf_config_name_both_calls(script: Path, tmp_path: Path) -> None:
    workers = free_addresses(2)
    outcomes = run_as_tf_config(
        script, "calls", {"worker": workers[1:], "chief": workers[:1]}, [("chief", 0), ("worker", 0)]
    )
    assert seconds_since_the_fault(tmp_path) < limit(CONTRACT_SECONDS)
    problem = "The ranks are in different calls, but all ranks must make the same call."
    received = "rank 0 called model.fit (end of epoch 2); rank 1 called kd.barrier()"
    for code, output in outcomes:
        assert code == 1, output
        assert "trained as" not in output
        assert problem not in output or f"{problem}\nReceived: {received}\nRemedy: " in output
    assert any(problem in output for _, output in outcomes)
    assert "keras_dist: multi_worker (2 ranks, CPU; started by TF_CONFIG)" in outcomes[0][1]


def test_plain_processes_of_tf_config_train(script: Path) -> None:
    outcomes = run_as_tf_config(script, "none", {"worker": free_addresses(2)}, [("worker", 0), ("worker", 1)])
    assert [code for code, _ in outcomes] == [0, 0]
    trained = [output.splitlines()[-1].split() for _, output in outcomes]
    assert trained[0][:4] == ["trained", "as", "rank", "0"]
    assert trained[0][4:] == trained[1][4:]


ONE_RANK = """
import sys
import tensorflow as tf
import keras_dist as kd
if sys.argv[1] == "late":
    tf.zeros([1])
kd.init()
"""


def run_one_rank(tmp_path: Path, case: str, workers: list[str]) -> tuple[int, str]:
    path = tmp_path / "one.py"
    path.write_text(ONE_RANK)
    done = subprocess.run(
        [sys.executable, str(path), case],
        env=environ(KERAS_DIST_JOIN_TIMEOUT="3", **tf_config({"worker": workers}, "worker", 0)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr


def test_an_address_where_nothing_listens_is_named(tmp_path: Path) -> None:
    workers = free_addresses(2)
    code, error = run_one_rank(tmp_path, "alone", workers)
    assert code == 1
    assert "PeerLostError: Not all ranks have joined within 3 s." in error
    assert f"Received: missing: rank 1 at {workers[1]}" in error


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        own = f"127.0.0.1:{taken.getsockname()[1]}"
        code, error = run_one_rank(tmp_path, "alone", [own, *free_addresses(1)])
    assert code == 1
    assert "ConfigurationError: Rank 0 of 2 can't listen at its address." in error
    assert f"Received: {own} (" in error


def test_tensorflow_must_not_have_started(tmp_path: Path) -> None:
    code, error = run_one_rank(tmp_path, "late", free_addresses(2))
    assert code == 1
    assert "ConfigurationError: TensorFlow has started before this process could join the others." in error
    assert "Remedy: Move `kd.init()` above everything that uses TensorFlow." in error
