"""The backend `parameter_server`: the numbers of one process, steps and embeddings, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist.comm import watchdog
from keras_dist.errors import ConfigurationError
from keras_dist.testing import WorkerPool
from tests.multiprocess.fault_runs import assert_same
from tests.multiprocess.launches import RUN, SMALL_MODEL, found, output_of, run

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
    result = found((tmp_path / "logs" / "rank-0.log").read_text())
    assert_same(result, found(output_of(sys.executable, script)))
    assert result["devices"] == [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
    for rank, line in ((1, "worker 0 ends: the coordinator has gone"), (4, "server 1 ends")):
        assert f"keras_dist: {line}" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert "keras_dist: parameter_server (2 workers, 2 servers, sync" in done.stderr


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


def own_step(distributed: bool) -> Any:
    """Returns the weights after training by a step that is a `tf.function`."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_dist as kd

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
    (result,) = pool.run(own_step, True, timeout=SECONDS)
    (expected,) = pool.run(own_step, False, timeout=SECONDS)
    for own, weight in zip(result, expected, strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-6, atol=1e-7)


def how_it_calls() -> dict[str, str | None]:
    import os

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
