"""Keras stays what it is: one process has no overhead, and with two replicas Keras's own tests pass, but for a list."""

import fnmatch
import importlib.metadata
import importlib.util
import inspect
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

import keras_dist as kd
from tests.multiprocess.launches import ROOT, run

Operations = list[tuple[str, list[str]]]


def traced(distribute: Callable[[Any], Any], steps_per_execution: int, **options: Any) -> Operations:
    """Returns the operations of a train step, in the order of tracing, for each function in its graph."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = distribute(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(2)]))
    optimizer = keras.optimizers.Adam(0.1, **options)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    x, y = tf.ones([8, 4]), tf.ones([8, 2])
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    iterator = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    # Keras's train function is a closure around the `tf.function`.
    function = inspect.getclosurevars(model.train_function).nonlocals["multi_step_on_iterator"]
    graph = function.get_concrete_function(iterator).graph.as_graph_def()
    functions = [(node.signature.name, node.node_def) for node in graph.library.function]
    # Names of functions contain a number of this process, so they are sorted by their text.
    inner = sorted(("", [node.op for node in nodes]) for _, nodes in functions)
    return [("step", [node.op for node in graph.node]), *inner]


def both(steps_per_execution: int) -> dict[str, Operations]:
    return {
        "plain": traced(lambda model: model, steps_per_execution),
        "ours": traced(kd.distribute, steps_per_execution),
        "another": traced(kd.distribute, steps_per_execution, clipnorm=1.0),
    }


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_traced_step_has_the_same_operations(pools: Any, steps_per_execution: int) -> None:
    (operations,) = pools.get("serial", 1).run(both, steps_per_execution)
    assert {"MatMul", "AssignAddVariableOp"} <= {op for _, ops in operations["plain"] for op in ops}
    assert operations["ours"] == operations["plain"]
    assert operations["another"] != operations["plain"]  # so a difference would be seen


def times_traced() -> list[int]:
    """Returns how often `fit` traces a step of Keras's own, and one of the script's own."""
    steps, plain = [], TensorFlowTrainer.train_step

    def train_step(model: keras.Model, data: Any) -> Any:
        steps.append(model)
        return plain(model, data)

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return train_step(self, data)

    times = []
    with mock.patch.object(TensorFlowTrainer, "train_step", train_step):
        for kind in (keras.Sequential, Own):
            model = kd.distribute(kind([keras.Input([4]), keras.layers.Dense(1)]), verify=False)
            model.compile("adam", "mse")
            model.fit(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=4, epochs=2, verbose=0)
            times.append(len(steps))
            steps.clear()
    return times


@pytest.mark.parametrize(
    ("backend", "size", "times"),
    [("serial", 1, [2, 2]), ("horovod", 2, [1, 1]), pytest.param("mirrored", 2, [2, 4], marks=pytest.mark.full)],
)
def test_a_step_is_traced_once(pools: Any, backend: str, size: int, times: list[int]) -> None:
    """Plain Keras traces it twice, since the optimizer is built in the trace.

    So does each of several replicas in a process if the step is the script's own: its variables are mirrored later.
    """
    for traced in pools.get(backend, size).run(times_traced):
        assert traced == times


def test_the_model_and_its_optimizer_get_no_attributes(pools: Any) -> None:
    def attributes() -> tuple[dict[str, str], dict[str, str]]:
        """Returns the attributes of a model and its optimizer before and after `kd.distribute`."""
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        owners = {"model": model, "optimizer": model.optimizer}

        def named() -> dict[str, str]:
            items = [(owner, name, value) for owner, item in owners.items() for name, value in vars(item).items()]
            return {f"{owner}.{name}": repr(value) for owner, name, value in items}

        before = named()
        assert kd.distribute(model) is model
        return before, named()

    ((before, after),) = pools.get("serial", 1).run(attributes)
    assert len(before) > 20
    assert after == before


# Keras's own tests, every model distributed over two replicas. What fails is listed, and what is listed fails.

TRACED_TWICE = "each replica traces the step"

# By pattern of the test's name.
DIFFER = {
    "trainers": {
        "TestTrainer.test_loss_scaling_prevents_underflow": "its model sets `layers`, which keras.Model reserves",
        "TestTrainer.test_retracing": TRACED_TWICE,
    },
    "callbacks": {"SwapEMAWeightsTest.test_swap_ema_weights_with_tf_distribute": "a strategy scope of its own"},
    "models": {"FunctionalTest.test_warning_for_mismatched_inputs_structure": f"{TRACED_TWICE}: so does its warning"},
    "saving": {},
}  # fmt: skip
FILES = {
    "trainers": ("trainers/trainer_test.py",),
    "callbacks": ("callbacks/*_test.py",),
    "models": ("models/*_test.py",),
    "saving": ("saving/saving_lib_test.py",),
}
# They need what is not installed, in plain Keras too.
LEFT_OUT = "not jax and not torch and not grain and not legacy_load_skips_missing"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not importlib.metadata.version("keras").startswith("3.15."), reason="the tests of Keras 3.15")
@pytest.mark.parametrize("engine", ["mirrored", "central_storage"])
@pytest.mark.parametrize("part", FILES)
def test_keras_own_tests(engine: str, part: str, tmp_path: Path) -> None:
    failed = failures(engine, FILES[part], tmp_path)
    listed = {name for name in failed if any(fnmatch.fnmatch(name, pattern) for pattern in DIFFER[part])}
    assert failed.keys() == listed, "\n".join(f"{name}: {failed[name]}" for name in failed.keys() - listed)
    assert not [pattern for pattern in DIFFER[part] if not fnmatch.filter(failed, pattern)], "these pass now"


def failures(engine: str, patterns: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Runs tests of Keras and returns the messages of those that fail, by `Class.test`."""
    spec = importlib.util.find_spec("keras.src")
    source, report = Path(spec.origin).parent, folder / "report.xml"
    files = [path for pattern in patterns for path in sorted(source.glob(pattern)) if "orbax" not in path.name]
    options = ("-q", "-c", "/dev/null", "--rootdir", folder, "--noconftest", "-p", "tests.keras_suite", "-p",
               "no:cacheprovider", "--engine", engine, "-k", LEFT_OUT, "--tb=line", f"--junitxml={report}")  # fmt: skip
    result = run(sys.executable, "-m", "pytest", *options, *files, folder=ROOT, seconds=1700)
    assert report.exists(), result.stdout + result.stderr
    cases = ET.parse(report).getroot().findall(".//testcase")
    assert len(cases) > 20, result.stdout
    return {
        f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}": str(problem.get("message"))
        for case in cases
        if (problem := next((part for part in case if part.tag in ("failure", "error")), None)) is not None
    }
