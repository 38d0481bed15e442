"""Clusters in TF_CONFIG: ranks of multi_worker, roles of parameter servers; who joins, with our launcher or without."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_dist import store
from keras_dist.backends import choose
from keras_dist.comm.backend import Rendezvous
from keras_dist.environment import detect_launch
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.nodes import free_ports
from tests.limits import limit
from tests.multiprocess.launches import (
    RUN,
    SCRIPTS,
    SMALL_MODEL,
    Commands,
    assert_close,
    found,
    logs_of,
    output_of,
    run,
    seconds_since,
)

pytestmark = pytest.mark.timeout(300)
CONTRACT_SECONDS = 10.0  # all ranks have ended so long after they went out of step, without a launcher
A, B, C = "host-a:2222", "host-b:2222", "host-b:2223"
SERVED = {"chief": [A], "worker": [B], "ps": [C]}


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
def test_ranks(jobs: Any, job: str, index: Any, rank: int, workers: tuple[str, ...]) -> None:
    launch = detect_launch(tf_config(jobs, job, index))
    assert (launch.launcher, launch.topology.rank, launch.topology.size) == ("TF_CONFIG", rank, len(workers))
    assert launch.workers == workers


def test_local_ranks_are_those_of_one_host() -> None:
    launches = [detect_launch(tf_config({"worker": [C, A, B]}, "worker", index)) for index in range(3)]
    places = [(launch.topology.local_rank, launch.topology.local_size) for launch in launches if launch]
    assert places == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("jobs", "job", "index", "task"),
    [
        (SERVED, "chief", 0, ("chief", 0)),
        ({"coordinator": [A], "worker": [B], "ps": [C]}, "coordinator", "0", ("chief", 0)),
        ({"chief": [A], "worker": {"0": B, "1": C}, "ps": [A]}, "worker", "1", ("worker", 1)),
        (SERVED, "ps", 0, ("ps", 0)),
    ],
)
def test_roles(jobs: Any, job: str, index: Any, task: tuple[str, int]) -> None:
    """`kd.init()` must not train each of its processes as a serial one."""
    launch = detect_launch(tf_config(jobs, job, index))
    assert (launch.task, launch.jobs["chief"], launch.topology.size, launch.workers) == (task, [A], 1, ())
    cls, priority = choose(launch)
    assert (cls.name, priority.reason) == ("parameter_server", "started by TF_CONFIG")


def test_without_cluster_it_is_no_launch() -> None:
    assert detect_launch({}) is None
    for text in ("", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'):
        assert detect_launch({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("environ", "problem", "received"),
    [
        (tf_config({"worker": [A], "evaluator": [B]}, "evaluator", 0), "an evaluator", "'evaluator'"),
        (tf_config({"worker": [A]}, "evaluator", 0), "an evaluator", "'evaluator'"),
        (tf_config({"worker": [A], "ps": [B]}, "worker", 1), "not in its cluster", "worker 0, ps 0"),
        (tf_config(SERVED, "ps", 1), "not in its cluster", "task 'ps' 1, cluster of chief 0, worker 0, ps 0"),
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
def test_what_it_must_not_say(environ: dict[str, str], problem: str, received: str) -> None:
    with pytest.raises(ConfigurationError) as info:
        detect_launch(environ)
    assert problem in info.value.problem
    assert received in str(info.value.received)
    assert info.value.remedy


def test_horovods_launchers_come_first() -> None:
    places = {"RANK": "1", "LOCAL_RANK": "1", "SIZE": "2", "LOCAL_SIZE": "2"}
    horovod = {f"HOROVOD_{name}": value for name, value in places.items()}
    launch = detect_launch({**tf_config({"worker": [A, B]}, "worker", 0), **horovod})
    assert launch.workers == ()


def test_the_store_keeps_texts() -> None:
    server = store.Server()
    rendezvous = Rendezvous(("127.0.0.1", server.port))
    rendezvous.put("failed", "1 ValueError: größer")
    assert rendezvous.get("failed") == "1 ValueError: größer"
    assert rendezvous.get("left_0") is None
    rendezvous.put("failed", "x" * (2 << 20))
    assert rendezvous.get("failed") == "1 ValueError: größer", "too long for a message"
    server.close()
    assert rendezvous.get("failed") is None


@pytest.mark.full
@pytest.mark.timed
def test_our_launcher_needs_no_horovod(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text('raise ImportError("no compiler here")')
    train = "model.fit(x, y, batch_size=8, shuffle=False, epochs=3, verbose=0)"
    tell = "print('found:', [weight.tolist() for weight in model.get_weights()])"
    (tmp_path / "script.py").write_text(f"{SMALL_MODEL}\n{train}\n{tell}\n")
    command = ("-np", "2", "--backend", "multi_worker", "--log-dir", "logs", "script.py")
    done = run(*RUN, *command, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "keras_dist: multi_worker (2 ranks, CPU; started by keras-dist run)" in done.stderr
    expected = found(output_of(sys.executable, "script.py", folder=tmp_path))
    for log in logs_of(tmp_path):
        assert_close(found(log), expected)


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@pytest.mark.full
@pytest.mark.timed
def test_plain_processes_name_both_calls(commands: Commands, tmp_path: Path) -> None:
    chief, worker = free_addresses(2)
    command = [sys.executable, str(SCRIPTS / "out_of_step.py"), "barrier_on_one", str(tmp_path)]
    configs = [tf_config({"worker": [worker], "chief": [chief]}, job, 0) for job in ("chief", "worker")]
    ranks = [commands(*command, **config) for config in configs]
    outputs = ["".join(rank.communicate(timeout=200)) for rank in ranks]
    assert seconds_since(tmp_path / "failed") < limit(CONTRACT_SECONDS)
    problem = "The ranks are in different calls, but all ranks must make the same call."
    received = "rank 0 called model.fit (end of epoch 2); rank 1 called kd.barrier()"
    assert [rank.returncode for rank in ranks] == [1, 1]
    for output in outputs:
        assert "trained to the end\n" not in output
        assert problem not in output or f"{problem}\nReceived: {received}\nRemedy: " in output
    assert any(problem in output for output in outputs)
    assert "keras_dist: multi_worker (2 ranks, CPU; started by TF_CONFIG)" in outputs[0]


INIT = "import keras_dist as kd; kd.init()"
LATE = "import tensorflow as tf; tf.zeros([1]); " + INIT
SERVERS = "import keras_dist as kd; kd.init(kd.ParameterServer())"


def why_not(program: str, cluster: dict[str, list[str]], job: str) -> str:
    """Returns why a process can't join the others of its cluster, which don't come."""
    done = run(sys.executable, "-c", program, KERAS_DIST_JOIN_TIMEOUT="3", **tf_config(cluster, job, 0))
    assert done.returncode == 1
    return done.stderr


@pytest.mark.full
def test_who_does_not_come_is_named() -> None:
    first, second, third = free_addresses(3)
    error = why_not(INIT, {"worker": [first, second]}, "worker")
    assert "PeerLostError: Not all ranks have joined within 3 s." in error
    assert f"Received: missing: rank 1 at {second}" in error
    jobs = {"chief": [first], "worker": [second], "ps": [third]}
    error = why_not(SERVERS, jobs, "chief")
    assert "PeerLostError: Not all workers and servers have come within 3 s." in error
    assert f"missing: worker 0 at {second}, server 0 at {third}" in error
    assert "keras_dist: server 0 ends: the coordinator did not come within 3 s" in why_not(SERVERS, jobs, "ps")


@pytest.mark.full
@pytest.mark.parametrize(("program", "job"), [(INIT, "worker"), (SERVERS, "chief"), (SERVERS, "worker")])
def test_an_address_that_is_taken_is_named(program: str, job: str) -> None:
    addresses = free_addresses(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1" if program == SERVERS else "", 0))
        taken.listen()
        own = f"127.0.0.1:{taken.getsockname()[1]}"
        jobs = dict(zip(("chief", "worker", "ps"), ([address] for address in addresses), strict=True))
        cluster = {**jobs, job: [own]} if program == SERVERS else {"worker": [own, addresses[0]]}
        error = why_not(program, cluster, job)
    assert f"can't listen at its address.\nReceived: {own} (" in error
    assert program == SERVERS or "ConfigurationError: Rank 0 of 2 can't listen" in error


@pytest.mark.full
def test_tensorflow_must_not_have_started() -> None:
    error = why_not(LATE, {"worker": free_addresses(2)}, "worker")
    assert "ConfigurationError: TensorFlow has started before this process could join the others." in error
    assert "Remedy: Move `kd.init()` above everything that uses TensorFlow." in error
