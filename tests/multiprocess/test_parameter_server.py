"""Parameter servers: the numbers of one process; asynchronous steps, whoever is faster; standing clusters."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.backends.parameter_server.cluster import Log, log_of
from keras_dist.backends.parameter_server.engine import SyncEngine
from keras_dist.backends.parameter_server.exchange import Outputs
from keras_dist.backends.parameter_server.shards import DatasetFunction
from keras_dist.cli import main
from keras_dist.cluster import current_backend
from keras_dist.comm import watchdog
from keras_dist.errors import NotSupportedError
from keras_dist.launcher import serve
from keras_dist.testing import WorkerPool
from tests.multiprocess.launches import RUN, SMALL_MODEL, Commands, assert_close, found, output_of, run, until

SECONDS = 400  # for a whole run on a busy machine
pytestmark = [pytest.mark.timeout(900)]
SCRIPT = f"""
import json
{SMALL_MODEL}
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=8, shuffle=False, epochs=4, verbose=0)
devices = sorted({{variable.value.device for variable in (*model.variables, *model.optimizer.variables)}})
weights = [weight.tolist() for weight in model.get_weights()]
print("found:", json.dumps({{"history": history.history, "weights": weights, "devices": devices,
                            "iterations": int(model.optimizer.iterations)}}))
"""


@pytest.mark.full
def test_the_same_script_in_every_role(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(*RUN, "--workers", "2", "--ps", "2", "--log-dir", "logs", script, folder=tmp_path, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    result, expected = found((tmp_path / "logs" / "rank-0.log").read_text()), found(output_of(sys.executable, script))
    assert result.pop("devices") == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
    assert len(expected.pop("devices")) == 1
    assert_close(result, expected)
    for rank, line in ((1, "worker 0 ends: the coordinator has gone"), (4, "server 1 ends")):
        assert f"keras_dist: {line}" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert "keras_dist: parameter_server (2 workers, 2 servers, sync" in done.stderr


def assert_same_numbers(pool: WorkerPool, trained: Callable[[bool], Any], **tolerances: float) -> None:
    """Compares what a function returns of a model that is distributed and of a plain one."""
    (result,), (expected,) = (pool.run(trained, distribute, timeout=SECONDS) for distribute in (True, False))
    assert_close(result, expected, **tolerances)


@pytest.mark.full
def test_a_sharded_embedding_is_one_table(pool: WorkerPool, tmp_path: Path) -> None:
    def embedded(sharded: bool) -> dict[str, Any]:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        ids = np.random.default_rng(0).integers(0, 11, size=(20, 3))
        initializer = keras.initializers.RandomUniform(seed=3)
        kind = kd.layers.ShardedEmbedding if sharded else keras.layers.Embedding
        options = {"shards": 3} if sharded else {}
        words = kind(11, 4, embeddings_initializer=initializer, **options)
        layers = [words, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model = kd.distribute(model) if sharded else model
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(ids, ids.sum(1) / 10, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        file = f"{tmp_path}/words.weights.h5"
        if sharded:
            model.save_weights(file)
            trained = words.table
        else:
            trained = np.array(words.embeddings)
            model.load_weights(file)
            np.testing.assert_allclose(words.embeddings, trained, rtol=1e-9, atol=1e-12)
        return {"losses": losses, "table": trained, "predictions": model.predict(ids, verbose=0)}

    assert_same_numbers(pool, embedded)


def own_step(distributed: bool) -> Any:
    """Returns the weights after training by a step that is a `tf.function`."""

    class Own(keras.Sequential):
        @tf.function
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {metric.name: metric.result() for metric in self.metrics}

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    model = Own([keras.Input((4,)), keras.layers.Dense(1)])
    model = kd.distribute(model) if distributed else model
    model.compile("sgd", "mse")
    model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.full
def test_a_step_that_is_a_function_has_the_numbers_of_one_process(pool: WorkerPool) -> None:
    assert_same_numbers(pool, own_step, rtol=1e-6, atol=1e-7)


@pytest.mark.full
def test_no_call_of_the_coordinator_is_without_an_end(pool: WorkerPool) -> None:
    def how_it_calls() -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in (*watchdog.SINGLE_CALLS, *watchdog.KEEPALIVE)}

    assert pool.run(how_it_calls, timeout=SECONDS) == [{**watchdog.SINGLE_CALLS, **watchdog.KEEPALIVE}]


def test_options_without_meaning_are_refused() -> None:
    staleness = "`max_staleness` is a number of steps, and for mode='async'."
    for options, problem in (
        ({"mode": "eventually"}, "Unknown value for the option `mode`."),
        ({"max_staleness": 2}, staleness),
        ({"mode": "async", "max_staleness": -1}, staleness),
        ({"hang_seconds": 0}, "`hang_seconds` must be positive."),
    ):
        with pytest.raises(kd.ConfigurationError) as info:
            kd.ParameterServer(**options)
        assert info.value.problem == problem


# Asynchronous training: no update is lost, none is too stale, a commit has all of them.

ROWS, BATCH, STEPS = 203, 4, 51
OTHERS = 3  # batches that are under way beside a step: two for each of two workers are
SLOW = 1e3  # targets above it mark the batch whose step is a slow one


@contextlib.contextmanager
def in_mode(mode: str, max_staleness: int | None = None) -> Iterator[None]:
    """Lets the coordinator of a pool, which is in `"sync"` mode, train in another mode while this is entered."""
    backend: Any = current_backend()
    backend._options.update(mode=mode, max_staleness=max_staleness)
    try:
        yield
    finally:
        backend._options.update(mode="sync", max_staleness=None)


def in_async(pool: WorkerPool, function: Callable[..., Any], *args: Any, max_staleness: int | None = None) -> Any:
    """Returns what a function returns on the coordinator in asynchronous mode."""

    def called() -> Any:
        with in_mode("async", max_staleness):
            return function(*args)

    return pool.run(called, timeout=SECONDS)[0]


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    return x, x.sum(axis=1, keepdims=True)


def built(*layers: Any, distribute: bool = True, **options: Any) -> Any:
    """Returns a model of one number, of the same weights each time."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, **options)])
    return kd.distribute(model) if distribute else model


@pytest.mark.full
@pytest.mark.parametrize("together", [1, 3])
def test_no_gradient_and_no_example_is_lost(pool: WorkerPool, together: int) -> None:
    def gradients_applied() -> Any:
        """The loss is linear in the weights: each batch's gradient is the same whatever they are; so is the metric."""

        def size(y_true: Any, y_pred: Any) -> Any:
            return tf.abs(y_true)[:, 0]

        model = built(use_bias=False)
        before = model.get_weights()[0]
        model.compile(keras.optimizers.SGD(0.01), lambda y, p: p[:, 0], metrics=[size], steps_per_execution=together)
        history = model.fit(*data(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
        return before - model.get_weights()[0], history["size"], int(model.optimizer.iterations)

    applied, sizes, iterations = in_async(pool, gradients_applied)
    x, y = data()
    of_epoch = sum(x[start : start + BATCH].mean(axis=0) for start in range(0, ROWS, BATCH))
    np.testing.assert_allclose(applied[:, 0], 3 * 0.01 * of_epoch, rtol=1e-10)
    np.testing.assert_allclose(sizes, [np.abs(y).mean()] * 3, rtol=1e-12)
    assert iterations == 3 * STEPS


@pytest.mark.full
def test_without_staleness_it_is_one_process(pool: WorkerPool) -> None:
    def trained(distribute: bool) -> dict[str, Any]:
        model = built(distribute=distribute)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse")
        (x, y), others = data(), {"batch_size": BATCH, "verbose": 0}
        losses = model.fit(x, y, epochs=2, shuffle=False, **others).history["loss"]
        on_batch = [model.train_on_batch(x[:BATCH], y[:BATCH]) for _ in range(2)]
        looked = {"evaluated": model.evaluate(x, y, **others), "predicted": model.predict(x, **others)}
        return {"losses": losses, "on_batch": on_batch, **looked, "weights": model.get_weights()}

    (expected,) = pool.run(trained, False, timeout=SECONDS)
    assert_close(in_async(pool, trained, True, max_staleness=0), expected)


@pytest.mark.full
def test_a_commit_waits_for_the_steps_that_have_begun(pool: WorkerPool, tmp_path: Any) -> None:
    def committed() -> Any:
        """Trains at rate 0 in two calls of `fit`, of which the first one is interrupted."""

        class Crashing(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                raise RuntimeError("after the epoch, before it is committed")

        x, y = data()

        def fit(*callbacks: Any) -> Any:
            model = built()
            model.compile(keras.optimizers.SGD(0.0), "mse")
            commit = kd.callbacks.Commit(tmp_path / "commits", every=20)
            return model, model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[commit, *callbacks])

        with pytest.raises(RuntimeError, match="before it is committed"):
            fit(Crashing())
        model, history = fit()
        error = x @ model.get_weights()[0] + model.get_weights()[1] - y
        steps = [entry.step for entry in kd.callbacks.Commit(tmp_path / "commits").commits.list()]
        return history.history["loss"], float(np.mean(error**2)), int(model.optimizer.iterations), steps

    losses, expected, iterations, steps = in_async(pool, committed)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert (iterations, steps) == (2 * STEPS, [80, 100, 102])


@pytest.mark.full
def test_what_needs_steps_one_after_the_other_is_refused(pool: WorkerPool) -> None:
    def refused() -> dict[str, str]:
        """Returns how a custom loop, and a verification, are refused."""
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        calls = {
            "kd.distribute": lambda: kd.distribute(keras.optimizers.SGD()),
            "kd.shard": lambda: kd.shard(tf.data.Dataset.range(4).batch(2)),
            "kd.run": lambda: kd.run(len, (tf.zeros([2]),)),
            "verify=True": lambda: kd.distribute(model, verify=True),
        }
        texts = {}
        for name, call in calls.items():
            with pytest.raises(kd.NotSupportedError) as info:
                call()
            texts[name] = str(info.value)
        return texts

    texts = in_async(pool, refused)
    verification = texts.pop("verify=True")
    assert "A verification compares steps with those of one process, but asynchronous workers" in verification
    assert "Received: verify=True" in verification
    assert "Remedy: Leave `verify` out" in verification
    for name, text in texts.items():
        assert "A custom training loop waits for the result of each step" in text
        assert f"Received: {name}" in text
        assert "mode='async')\nRemedy: Use mode='sync'" in text


def staleness(seconds: float) -> tuple[int, float]:
    """Returns how many steps of others came between a step's reading of weights and its applying of gradients.

    Once more as the mean that `Timing` logs.

    The first step is a slow one: it waits until `OTHERS` have come between, for so many seconds at most. The others
    wait until it has read.
    """
    def wait_until(is_so: Any) -> Any:
        end = tf.timestamp() + seconds
        return tf.while_loop(lambda so: ~so & (tf.timestamp() < end), lambda so: (is_so(),), (is_so(),))[0]

    class Watched(keras.Sequential):
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.others = keras.metrics.Sum(name="others")
            with tf.device("/job:ps/task:0"):  # a weight that isn't trained is assigned after the step
                self.has_read = tf.Variable(False, trainable=False)

        def train_step(self, batch: Any) -> Any:
            is_slow = tf.reduce_any(batch[1] > SLOW)
            before = tf.identity(self.optimizer.iterations.value)
            with tf.control_dependencies([before]):
                tf.cond(is_slow, lambda: self.has_read.assign(True), lambda: False)
            passed = wait_until(
                lambda: tf.where(is_slow, self.optimizer.iterations.value - before >= OTHERS, self.has_read)
            )
            with tf.control_dependencies([passed]):
                self.others.update_state(tf.where(is_slow, self.optimizer.iterations.value - before, 0))
                return {**super().train_step(batch), "others": self.others.result()}

    keras.config.set_floatx("float64")
    x, y = data()
    y[0] = 2 * SLOW
    model = kd.distribute(Watched([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[kd.callbacks.Timing()]).history
    return int(model.others.result()), history["staleness"][0]


@pytest.mark.full
@pytest.mark.parametrize("bound", [0, 2, None])
def test_staleness_is_bounded(pool: WorkerPool, bound: int | None) -> None:
    """It is seen where it is not bounded, so the test could fail."""
    seconds = 60.0 if bound is None else 5.0
    others, mean = in_async(pool, staleness, seconds, max_staleness=bound)
    assert others == OTHERS if bound is None else others <= bound
    assert mean >= OTHERS / STEPS if bound is None else 0 <= mean <= bound


# A standing cluster: notebooks come and go, and each finds new servers.

IMPORTS = "import json, keras, numpy as np"
DATA = """
keras.config.set_floatx("float64")
x = np.random.default_rng(0).normal(size=(20, 4)); y = x.sum(axis=1, keepdims=True)
"""
START = f"""
{IMPORTS}
import keras_dist as kd
from keras_dist import distribute
kd.init(kd.ParameterServer(cluster="cluster.json"))
{DATA}
"""
TRAIN = """
keras.utils.set_random_seed(1)
model = distribute(keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(width, "tanh") for width in {widths}]]))
model.compile(keras.optimizers.Adam(0.01), "mse")
losses = model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]
print(json.dumps([losses, len({{v.value.device for v in model.weights}}), model.weights[0].value.device]))
"""
MODELS = [TRAIN.format(widths=widths) for widths in ([1], [7, 1])]
TELL = """
import sys, threading, tensorflow as tf
class Tell(keras.layers.Layer):
    def call(self, x):
        tf.print("a step at", tf.timestamp())
        return x
seen, shown, write = set(), threading.Event(), sys.stderr.write
def note(text):
    write(text)
    seen.update(line[:10] for line in text.splitlines() if "a step at" in line)
    len(seen) == 2 and shown.set()
sys.stderr.write = note
model = distribute(keras.Sequential([keras.Input((4,)), Tell(), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, y, batch_size=8, verbose=0)
assert shown.wait(60), seen
sys.stderr.flush()
"""
ENDLESS = """
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        open("trains", "w").close()
model = distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(x, y, batch_size=2, epochs=10**6, verbose=0, callbacks=[Tell()])
"""
END_SECONDS = 10  # after Ctrl-C


@pytest.fixture
def standing(commands: Commands, tmp_path: Path) -> subprocess.Popen[str]:
    """Two workers and a server, whose addresses are in cluster.json."""
    process = commands(*RUN, "--workers", "2", "--ps", "1", "--serve")
    until(lambda: process.poll() is not None or (tmp_path / "cluster.json").exists(), SECONDS)
    return process


def run_notebook(folder: Path) -> list[list[float]]:
    """Trains both models in a kernel of its own, and one that prints on the workers; returns the losses of the two."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (START, *MODELS, TELL)])
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    losses = []
    for cell in notebook.cells[1:-1]:
        (text,) = [output["text"] for output in cell["outputs"] if output.get("name") == "stdout"]
        own, count, device = json.loads(text)
        assert (count, device) == (1, "/job:ps/replica:0/task:0/device:CPU:0")
        losses.append(own)
    told = "".join(output["text"] for output in notebook.cells[-1]["outputs"] if output.get("name") == "stderr")
    lines = [line for line in told.splitlines() if "a step at" in line]
    assert {line.partition("a step at")[0] for line in lines} == {"[worker 0] ", "[worker 1] "}
    assert len(set(lines)) == len(lines), "a line was shown twice"
    return losses


@pytest.mark.full
def test_notebooks_train_on_a_standing_cluster(
    standing: subprocess.Popen[str], commands: Commands, tmp_path: Path
) -> None:
    """Between them, one that trains is killed."""
    first = run_notebook(tmp_path)
    process = commands(sys.executable, "-c", START + ENDLESS)
    until(lambda: process.poll() is not None or (tmp_path / "trains").exists(), SECONDS)
    time.sleep(random.SystemRandom().uniform(0, 0.2))  # any moment will do
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert run_notebook(tmp_path) == first, "the servers kept something"
    plain = output_of(sys.executable, "-c", "".join([IMPORTS, DATA, "distribute = lambda model: model", *MODELS]))
    assert_close(first, [json.loads(line)[0] for line in plain.splitlines()])
    standing.send_signal(signal.SIGINT)
    assert standing.wait(END_SECONDS) == 128 + signal.SIGINT
    assert not (tmp_path / "cluster.json").exists()


def test_a_log_is_read_once_and_then_that_of_its_successor(tmp_path: Path) -> None:
    path = log_of(str(tmp_path / "cluster.json"), "worker 0")
    assert path == tmp_path / "cluster.worker-0.log"
    path.write_text("of another notebook\n")
    log = Log("worker 0", path)
    assert log.new_lines() == []
    with path.open("a") as file:
        for text, expected in (("one\ntw", ["one"]), ("", []), ("o\n", ["two"]), ("last words", [])):
            print(text, end="", file=file, flush=True)
            assert log.new_lines() == [f"[worker 0] {line}\n" for line in expected]
        path.unlink()
        assert log.new_lines() == []
        path.write_text("three\n")
        print(" of it", end="", file=file, flush=True)
        assert log.new_lines() == ["[worker 0] last words of it\n", "[worker 0] three\n"]
    assert log.new_lines() == []


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.write_text("mine")
    assert main(["run", "--workers", "1", "--ps", "1", "--serve", str(file)]) == 2
    assert file.read_text() == "mine"
    received = f"{file}: File exists\nRemedy: If no cluster uses the one that exists, delete it"
    assert f"can't be made.\nReceived: {received}" in capsys.readouterr().err


def test_the_addresses_of_another_cluster_are_kept(standing: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("another cluster's")
    standing.send_signal(signal.SIGINT)
    standing.wait(END_SECONDS)
    assert (tmp_path / "cluster.json").read_text() == "another cluster's"


def test_a_process_that_the_cluster_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}')
    assert main(["serve", "--role", "worker", "--index", "1", "--cluster", str(file)]) == 2
    with pytest.raises(kd.ConfigurationError, match="none.json"):
        serve.main(argparse.Namespace(role="ps", index=0, cluster=str(tmp_path / "none.json")))


def test_a_step_that_draws_other_numbers_each_time_is_refused() -> None:
    engine, numbers = object.__new__(SyncEngine), itertools.count(1.0)
    engine._runs = 1

    def run(told: Any) -> list[Outputs]:
        return [Outputs({}, [], [], [], told=[tf.constant([next(numbers)])]) for _ in range(2)]

    with pytest.raises(NotSupportedError, match="computes something else each time"):
        engine._agreed((), run)


@pytest.mark.parametrize("asked", [None, True])
def test_the_tuner_is_off_unless_it_was_asked_for(asked: bool | None) -> None:
    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(4).batch(2)
        if asked is not None:
            options = tf.data.Options()
            options.autotune.enabled = asked
            dataset = dataset.with_options(options)
        return dataset

    graph = DatasetFunction(read, 1, 1).makers[0].graph
    serialized = [op.get_attr("serialized_options") for op in graph.get_operations() if op.type == "OptionsDataset"]
    expected = tf.data.Options()
    expected.autotune.enabled = bool(asked)
    if asked is None:
        expected.autotune.initial_parallelism = os.cpu_count()
    assert serialized == [expected._to_proto().SerializeToString()]
