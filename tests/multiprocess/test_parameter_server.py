"""The backend `parameter_server`: roles, the numbers of one process, asynchronous steps, and who may be killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist import environment
from keras_dist.backends import choose
from keras_dist.environment import detect_launch
from keras_dist.errors import ConfigurationError
from keras_dist.launch.cluster import ParameterServerCluster
from keras_dist.testing import WorkerError, WorkerPool

SCRIPT = Path(__file__).parent / "scripts" / "parameter_server.py"
SECONDS = 400  # for a whole run on a busy machine
END_SECONDS = 10.0  # after the coordinator has gone
pytestmark = [pytest.mark.timeout(900)]

# --- Roles ---

A, B, C = "host-a:2222", "host-b:2222", "host-b:2223"


def tf_config(cluster: dict[str, Any], job: str, index: int | str) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.mark.parametrize(
    ("jobs", "job", "index", "task"),
    [
        ({"chief": [A], "worker": [B], "ps": [C]}, "chief", 0, ("chief", 0)),
        ({"coordinator": [A], "worker": [B], "ps": [C]}, "coordinator", "0", ("chief", 0)),
        ({"chief": [A], "worker": {"0": B, "1": C}, "ps": [A]}, "worker", "1", ("worker", 1)),
        ({"chief": [A], "worker": [B], "ps": [C]}, "ps", 0, ("ps", 0)),
    ],
)
def test_roles_of_tf_config(jobs: Any, job: str, index: Any, task: tuple[str, int]) -> None:
    launch = detect_launch(tf_config(jobs, job, index))
    assert launch is not None
    assert launch.task == task
    assert launch.jobs["chief"] == [A]
    assert launch.topology.size == 1
    assert launch.workers == ()


def test_a_cluster_with_servers_is_for_parameter_servers() -> None:
    """`kd.init()` must not train each of its processes as a serial one."""
    cls, affinity = choose(detect_launch(tf_config({"chief": [A], "worker": [B], "ps": [C]}, "worker", 0)))
    assert (cls.name, affinity.reason) == ("parameter_server", "started by TF_CONFIG")


def test_a_task_that_is_not_in_the_cluster() -> None:
    with pytest.raises(ConfigurationError) as info:
        detect_launch(tf_config({"chief": [A], "worker": [B], "ps": [C]}, "ps", 1))
    assert info.value.received == "task 'ps' 1, cluster of chief 0, worker 0, ps 0"


def test_our_cluster_gives_each_process_its_role() -> None:
    with ParameterServerCluster(2, {"HOME": "/home"}, servers=3) as cluster:
        launches = [detect_launch(cluster.environment(rank)) for rank in range(cluster.size)]
    tasks = [launch.task for launch in launches if launch is not None]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1), ("ps", 2)]


# --- Real processes ---


class Run:
    """A coordinator, workers and servers, each a process of its own, started without a launcher."""

    def __init__(self, case: str, folder: Path, script: Path = SCRIPT, servers: int = 1, **more: str) -> None:
        with ParameterServerCluster(2, {}, servers=servers) as cluster:
            configs = [cluster.environment(rank)[environment.TF_CONFIG] for rank in range(cluster.size)]
        self._command = [sys.executable, str(script), case, str(folder)]
        self._folder = folder
        self._environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", **more}
        self._configs = {self._name(config): config for config in configs}
        self.processes = {name: self._start(name) for name in self._configs}

    def _name(self, config: str) -> str:
        task = json.loads(config)["task"]
        return f"{task['type']}-{task['index']}"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        output = (self._folder / f"{name}.log").open("ab")
        return subprocess.Popen(
            self._command,
            env={**self._environ, environment.TF_CONFIG: self._configs[name]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def output(self, name: str = "chief-0") -> str:
        return (self._folder / f"{name}.log").read_text()

    def wait(self, restart: Sequence[str] = ()) -> int:
        """Waits for the coordinator; starts processes again that were killed, where that is asked for."""
        deadline = time.monotonic() + SECONDS
        restart = list(restart)
        while (code := self.processes["chief-0"].poll()) is None:
            assert time.monotonic() < deadline, self.output()
            for name in [name for name in restart if self.processes[name].poll() is not None]:
                assert self.processes[name].returncode == -9, self.output(name)
                self.processes[name] = self._start(name)
                restart.remove(name)
            time.sleep(0.05)
        return code

    def codes_of_others(self) -> dict[str, int]:
        """Returns how workers and servers ended, which have to within some seconds."""
        deadline = time.monotonic() + END_SECONDS
        others = {name: process for name, process in self.processes.items() if name != "chief-0"}
        return {name: process.wait(max(deadline - time.monotonic(), 0.01)) for name, process in others.items()}

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self._folder / "result.json").read_text())
        return result

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one plain process computes."""
    folder = tmp_path_factory.mktemp("plain")
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), "none", str(folder)], env=environ, check=True, timeout=SECONDS)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, values in expected["history"].items():
        # A resumed run knows its own epochs only.
        own = result["history"][key]
        np.testing.assert_allclose(own, values[-len(own) :], rtol=1e-9, atol=1e-9, err_msg=key)
    for own, weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)
    assert result["iterations"] == expected["iterations"]


@pytest.mark.more
def test_the_same_script_in_every_role(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "keras_dist", "run", "--workers", "2", "--ps", "2", "--output", "all"]
    done = subprocess.run(
        [*command, str(SCRIPT), "none", str(tmp_path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert_same(result, undisturbed)
    assert result["devices"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
    for line in ("[1] keras_dist: worker 0 ends: the coordinator has gone", "[4] keras_dist: server 1 ends"):
        assert line in done.stderr, done.stderr
    assert "keras_dist: parameter_server (2 workers, 2 servers, sync" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "restart", "lost"),
    [
        ("worker", [], "); 1 of 2 go on."),
        ("worker", ["worker-1"], "is back."),
        ("workers", ["worker-0", "worker-1"], "is back."),
        ("hang", [], "is lost (no answer for 6 s); 1 of 2 go on."),
    ],
    ids=["one", "one that returns", "all, which return", "hangs"],
)
def test_lost_workers_change_no_number(
    case: str, restart: list[str], lost: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = Run(case, tmp_path)
    try:
        code = run.wait(restart)
        assert code == 0, run.output()
        assert_same(run.result(), undisturbed)
        assert (tmp_path / "fault").exists()
        if lost != "is back.":  # the run may be over before it is
            assert lost in run.output()
    finally:
        run.close()


@pytest.mark.full
@pytest.mark.parametrize("case", ["server", "coordinator"])
def test_the_next_start_resumes(case: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run = Run(case, tmp_path)
    try:
        code = run.wait()
        seconds = time.monotonic() - float((tmp_path / "fault").read_text())
        if case == "server":
            assert code == 1, run.output()
            assert "PeerLostError: A parameter server has gone, and with it the variables" in run.output()
            assert "Received: server 0 at 127.0.0.1:" in run.output()
            assert seconds < END_SECONDS
        else:
            assert code == -9
        others = dict.fromkeys(("worker-0", "worker-1", "ps-0"), 0) | ({"ps-0": -9} if case == "server" else {})
        assert run.codes_of_others() == others
    finally:
        run.close()
    again = Run(case, tmp_path)
    try:
        assert again.wait() == 0, again.output()
        assert_same(again.result(), undisturbed)
        assert len(again.result()["history"]["loss"]) < len(undisturbed["history"]["loss"]), "it began anew"
    finally:
        again.close()


@pytest.mark.full
@pytest.mark.parametrize("case", ["async-worker", "async-workers"])
def test_async_goes_on_without_a_worker(case: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run = Run(case, tmp_path)
    try:
        code = run.wait(["worker-0", "worker-1"] if case == "async-workers" else [])
        assert code == 0, run.output()
        result = run.result()
        # A step whose worker died between applying and answering is made once more.
        assert 0 <= result["iterations"] - undisturbed["iterations"] <= 2
        assert result["history"]["loss"][-1] < result["history"]["loss"][0]
    finally:
        run.close()


# --- Joining ---

JOIN = """
import keras_dist as kd
kd.init(kd.ParameterServer())
"""


def join(tmp_path: Path, jobs: dict[str, list[str]], job: str) -> tuple[int, str]:
    path = tmp_path / "join.py"
    path.write_text(JOIN)
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "KERAS_DIST_JOIN_TIMEOUT": "3", **tf_config(jobs, job, 0)},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    return done.returncode, done.stderr


def free_jobs() -> dict[str, list[str]]:
    with ParameterServerCluster(1, {}) as cluster:
        jobs: dict[str, list[str]] = json.loads(cluster.environment(0)[environment.TF_CONFIG])["cluster"]
    return jobs


@pytest.mark.more
def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    jobs = free_jobs()
    code, error = join(tmp_path, jobs, "chief")
    assert code == 1
    assert "PeerLostError: Not all workers and servers have come within 3 s." in error
    assert f"missing: worker 0 at {jobs['worker'][0]}, server 0 at {jobs['ps'][0]}" in error


@pytest.mark.full
def test_a_server_whose_coordinator_does_not_come_ends(tmp_path: Path) -> None:
    code, error = join(tmp_path, free_jobs(), "ps")
    assert code == 1
    assert "keras_dist: server 0 ends: the coordinator did not come within 3 s" in error


@pytest.mark.full
@pytest.mark.parametrize("job", ["chief", "worker"])
def test_an_address_that_is_taken_is_named(job: str, tmp_path: Path) -> None:
    jobs = free_jobs()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        jobs[job] = [f"127.0.0.1:{taken.getsockname()[1]}"]
        code, error = join(tmp_path, jobs, job)
    assert code == 1
    assert f"can't listen at its address.\nReceived: {jobs[job][0]} (" in error


# --- What the coordinator computes ---


@pytest.fixture
def pool(pools: Any) -> WorkerPool:
    """A coordinator with two workers and a server, which live on from test to test."""
    pool: WorkerPool = pools.get("parameter_server", 2)
    return pool


def counted(max_staleness: int | None = None) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_dist as kd
    from keras_dist.cluster import current_backend

    backend: Any = current_backend()
    backend._options.update(mode="async", max_staleness=max_staleness)
    try:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=(203, 4))
        y = x.sum(axis=1, keepdims=True)
        model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        # At rate 0 the weights stay, so each epoch's loss is that of all examples: one lost or twice would show.
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], steps_per_execution=3)
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        error = x @ model.get_weights()[0] + model.get_weights()[1] - y
        still = history["loss"], history["mae"], [float(np.mean(error**2))] * 2, [float(np.mean(np.abs(error)))] * 2
        iterations = int(model.optimizer.iterations)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        trained = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        return {"still": still, "iterations": iterations, "trained": trained, "weights": model.get_weights()}
    finally:
        backend._options.update(mode="sync", max_staleness=None)


def serial() -> dict[str, Any]:
    import keras
    import numpy as np

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(203, 4))
    y = x.sum(axis=1, keepdims=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    trained = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return {"trained": trained, "weights": model.get_weights()}


@pytest.mark.more
def test_async_loses_no_step_and_no_example(pool: WorkerPool) -> None:
    (result,) = pool.run(counted, timeout=SECONDS)
    loss, mae, expected_loss, expected_mae = result["still"]
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(mae, expected_mae, rtol=1e-12)
    assert result["iterations"] == 2 * 51
    assert result["trained"][-1] < result["trained"][0]


@pytest.mark.more
def test_async_without_staleness_is_one_process(pool: WorkerPool) -> None:
    (result,) = pool.run(counted, 0, timeout=SECONDS)
    (expected,) = pool.run(serial, timeout=SECONDS)
    np.testing.assert_allclose(result["trained"], expected["trained"], rtol=1e-9)
    for own, weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)


def embedded(folder: str, sharded: bool) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_dist as kd

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    ids = np.random.default_rng(0).integers(0, 11, size=(20, 3))
    initializer = keras.initializers.RandomUniform(seed=3)
    kind = kd.layers.ShardedEmbedding if sharded else keras.layers.Embedding
    options = {"shards": 3} if sharded else {}
    words = kind(11, 4, embeddings_initializer=initializer, **options)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), words, keras.layers.Flatten(), keras.layers.Dense(1)])
    model = kd.distribute(model) if sharded else model
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(ids, ids.sum(1) / 10, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    file = f"{folder}/words.weights.h5"
    if sharded:
        model.save_weights(file)
        trained = words.table
    else:
        trained = np.array(words.embeddings)
        model.load_weights(file)
        np.testing.assert_allclose(words.embeddings, trained, rtol=1e-9, atol=1e-12)
    return {"losses": losses, "table": trained, "predictions": model.predict(ids, verbose=0)}


@pytest.mark.more
def test_a_sharded_embedding_is_one_table(pool: WorkerPool, tmp_path: Path) -> None:
    (result,) = pool.run(embedded, str(tmp_path), True, timeout=SECONDS)
    (expected,) = pool.run(embedded, str(tmp_path), False, timeout=SECONDS)
    for key, value in expected.items():
        np.testing.assert_allclose(result[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


def read_after_apply() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist as kd

    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return super().train_step(data)

    model = kd.distribute(Twice([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.fit(np.zeros([8, 4]), np.zeros([8, 1]), verbose=0)
    tf.zeros([])


@pytest.mark.more
def test_a_step_that_reads_what_it_has_applied_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as info:
        pool.run(read_after_apply, timeout=SECONDS)
    assert "NotSupportedError" in str(info.value)
    assert "The step reads weights after it has applied gradients to them" in str(info.value)


def bound_to() -> str:
    import os
    import socket

    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode())
        except OSError:
            continue
    return ",".join(sorted(found))


@pytest.mark.more
def test_the_coordinator_listens_on_the_loopback_interface_only(pool: WorkerPool) -> None:
    assert pool.run(bound_to, timeout=SECONDS) == ["lo"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "eventually"}, "Unknown value for the option `mode`."),
        ({"max_staleness": 2}, "`max_staleness` is a number of steps, and for mode='async'."),
        ({"mode": "async", "max_staleness": -1}, "`max_staleness` is a number of steps, and for mode='async'."),
        ({"hang_seconds": 0}, "`hang_seconds` must be positive."),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], problem: str) -> None:
    import keras_dist as kd

    with pytest.raises(ConfigurationError) as info:
        kd.ParameterServer(**options)
    assert info.value.problem == problem
