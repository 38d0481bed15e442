"""The backend `parameter_server`: roles, the numbers of one process, asynchronous steps."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist import environment
from keras_dist.backends import choose
from keras_dist.comm import watchdog
from keras_dist.environment import detect_launch
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import ParameterServerCluster
from keras_dist.testing import WorkerPool
from tests.multiprocess.coordinators import in_mode
from tests.multiprocess.fault_runs import assert_same

SCRIPT = Path(__file__).parent / "scripts" / "parameter_server.py"
SECONDS = 400  # for a whole run on a busy machine
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one plain process computes."""
    folder = tmp_path_factory.mktemp("plain")
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=environ, check=True, timeout=SECONDS)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.full
def test_the_same_script_in_every_role(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "keras_dist", "run", "--workers", "2", "--ps", "2", "--output", "all"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert_same(result, undisturbed)
    assert result["devices"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
    for line in ("[1] keras_dist: worker 0 ends: the coordinator has gone", "[4] keras_dist: server 1 ends"):
        assert line in done.stderr, done.stderr
    assert "keras_dist: parameter_server (2 workers, 2 servers, sync" in done.stderr


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


@pytest.mark.full
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


def counted(max_staleness: int | None = None) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_dist as kd

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(203, 4))
    y = x.sum(axis=1, keepdims=True)
    with in_mode("async", max_staleness):
        model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        # At rate 0 the weights stay, so each epoch's loss is that of all examples: one lost or twice would show.
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], steps_per_execution=3)
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        error = x @ model.get_weights()[0] + model.get_weights()[1] - y
        still = history["loss"], history["mae"], [float(np.mean(error**2))] * 2, [float(np.mean(np.abs(error)))] * 2
        iterations = int(model.optimizer.iterations)
        # Slow enough to converge however stale a step is.
        model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
        trained = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return {"still": still, "iterations": iterations, "trained": trained, "weights": model.get_weights()}


def serial() -> dict[str, Any]:
    import keras
    import numpy as np

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(203, 4))
    y = x.sum(axis=1, keepdims=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
    trained = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return {"trained": trained, "weights": model.get_weights()}


@pytest.mark.full
def test_async_loses_no_step_and_no_example(pool: WorkerPool) -> None:
    (result,) = pool.run(counted, timeout=SECONDS)
    loss, mae, expected_loss, expected_mae = result["still"]
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(mae, expected_mae, rtol=1e-12)
    assert result["iterations"] == 2 * 51
    assert result["trained"][-1] < result["trained"][0]


@pytest.mark.full
def test_async_without_staleness_is_one_process(pool: WorkerPool) -> None:
    (result,) = pool.run(counted, 0, timeout=SECONDS)
    (expected,) = pool.run(serial, timeout=SECONDS)
    np.testing.assert_allclose(result["trained"], expected["trained"], rtol=1e-9)
    for own, weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)


def committed(folder: str) -> dict[str, Any]:
    """Trains asynchronously at rate 0 in two calls of `fit`, of which the first one is interrupted."""
    import keras
    import numpy as np

    import keras_dist as kd

    class Crashing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("after the epoch, before it is committed")

    keras.config.set_floatx("float64")
    x = np.random.default_rng(0).normal(size=(203, 4))
    y = x.sum(axis=1, keepdims=True)

    def fit(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(1)
        with in_mode("async", None):
            model = kd.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
            model.compile(keras.optimizers.SGD(0.0), "mse")
            commit = kd.callbacks.Commit(folder, every=20)
            return model, model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[commit, *callbacks])

    try:
        fit(Crashing())
    except RuntimeError as error:
        crash = str(error)
    model, history = fit()
    error = x @ model.get_weights()[0] + model.get_weights()[1] - y
    steps = [entry.step for entry in kd.callbacks.Commit(folder).commits.list()]
    iterations = int(model.optimizer.iterations)
    return {"crash": crash, "loss": history.history["loss"], "all": float(np.mean(error**2)), "steps": steps,
            "iterations": iterations}  # fmt: skip


@pytest.mark.full
def test_a_commit_waits_for_the_steps_that_have_begun(pool: WorkerPool, tmp_path: Path) -> None:
    (result,) = pool.run(committed, str(tmp_path / "commits"), timeout=SECONDS)
    assert result["crash"] == "after the epoch, before it is committed"
    np.testing.assert_allclose(result["loss"], [result["all"]] * 2, rtol=1e-12)
    assert (result["iterations"], result["steps"]) == (2 * 51, [80, 100, 102])


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


@pytest.mark.full
def test_a_sharded_embedding_is_one_table(pool: WorkerPool, tmp_path: Path) -> None:
    (result,) = pool.run(embedded, str(tmp_path), True, timeout=SECONDS)
    (expected,) = pool.run(embedded, str(tmp_path), False, timeout=SECONDS)
    for key, value in expected.items():
        np.testing.assert_allclose(result[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


def own_step(kind: str, distributed: bool) -> Any:
    """Returns the weights after training by a step of one's own, or the error."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist as kd

    class Own(keras.Sequential):
        def step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)

            def apply() -> bool:
                self.optimizer.apply(gradients, self.trainable_variables)
                return True

            if kind == "applied on a condition":
                tf.cond(loss > 0.0, apply, lambda: True)
            else:
                apply()
            if kind == "assigned on a condition":
                tf.cond(loss > 0.0, lambda: self.layers[0].bias.assign([1.0]), lambda: [0.0])
            return {metric.name: metric.result() for metric in self.metrics}

        train_step = tf.function(step) if kind == "a tf.function" else step

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    model = Own([keras.Input((4,)), keras.layers.Dense(1)])
    model = kd.distribute(model) if distributed else model
    model.compile("sgd", "mse")
    try:
        model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
    except kd.NotSupportedError as error:
        return error.problem, error.received
    return model.get_weights()


@pytest.mark.full
def test_a_step_that_is_a_function_has_the_numbers_of_one_process(pool: WorkerPool) -> None:
    (result,) = pool.run(own_step, "a tf.function", True, timeout=SECONDS)
    (expected,) = pool.run(own_step, "a tf.function", False, timeout=SECONDS)
    for own, weight in zip(result, expected, strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "what", "received"),
    [
        ("applied on a condition", "applies gradients", "optimizer 'sgd'"),
        ("assigned on a condition", "assigns a variable", "variable 'own/dense/bias'"),
    ],
)
def test_what_a_step_does_on_a_condition_is_refused(pool: WorkerPool, kind: str, what: str, received: str) -> None:
    ((problem, own),) = pool.run(own_step, kind, True, timeout=SECONDS)
    assert problem.startswith(f"The step {what} inside `tf.cond`, `tf.while_loop`, `tf.map_fn` or a `tf.function`.")
    assert own == received


def how_it_calls() -> dict[str, str | None]:
    import os

    from keras_dist.comm import watchdog

    return {name: os.environ.get(name) for name in (*watchdog.SINGLE_CALLS, *watchdog.KEEPALIVE)}


@pytest.mark.full
def test_no_call_of_the_coordinator_is_without_an_end(pool: WorkerPool) -> None:
    assert pool.run(how_it_calls, timeout=SECONDS) == [{**watchdog.SINGLE_CALLS, **watchdog.KEEPALIVE}]


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
