"""Dry runs: all but what compiles (tests/multiprocess/test_dry_run.py). A step traced for cores that are not there."""

import dataclasses
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from keras_dist import cli
from keras_dist.compat import keras_model, tf_graphs, tpu_emulation
from keras_dist.diagnostics import check, process
from keras_dist.diagnostics import process as diagnostics_cli
from keras_dist.diagnostics.check import LARGEST, Trial, bounds_of_limit
from keras_dist.diagnostics.report import Report, target_of
from keras_dist.errors import ConfigurationError, DistributionError

pytestmark = pytest.mark.timeout(120)
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "topology", "chips", "replicas", "memory"),
    [
        ("v2-8", "v2:2x2", 4, 8, 8 * GIB), ("v3-32", "v3:4x4", 16, 32, 16 * GIB), ("v4-8", "v4:2x2x1", 4, 8, 16 * GIB),
        ("v5e-8", "v5e:2x4", 8, 8, 16 * GIB), ("V5LitePod-8", "v5e:2x4", 8, 8, 16 * GIB),
        ("v5e:4x4", "v5e:4x4", 16, 16, 16 * GIB), ("v5p-16", "v5p:2x2x2", 8, 8, 95 * GIB),
        ("v6e-1", "v6e:1x1", 1, 1, 32 * GIB), ("tpu7x-8", "tpu7x:2x2x1", 4, 8, 96 * GIB),
    ],
)  # fmt: skip
def test_targets(name: str, topology: str, chips: int, replicas: int, memory: int) -> None:
    target = target_of(name)
    assert (target.topology, target.chips, target.replicas, target.memory) == (topology, chips, replicas, memory)


@pytest.mark.parametrize("name", ["", "v5e-7", "v9-8"])
def test_an_unknown_target_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown TPU.\nReceived: target=.*\nRemedy: .*v5e-8"):
        target_of(name)


def search(
    most_trials: int, start: int, memory_of: Callable[[int], float], most: int = LARGEST, available: int = 16 * GIB
) -> tuple[int, int, int]:
    asked: list[int] = []

    def attempt(batch: int) -> Trial:
        asked.append(batch)
        return Trial(batch, memory_of(batch) <= available, int(memory_of(batch)))

    *_, (good, bad) = bounds_of_limit(attempt(start), attempt, available, most_trials, most)
    return good, bad, len(asked) - 1


LINES = {"small weights": (10e6, 4e6, 4292), "large weights": (12e9, 200e6, 25), "no weights": (0, 1e6, 17179)}


@pytest.mark.parametrize("start", [1, 64, 20_000])
@pytest.mark.parametrize("line", LINES)
def test_the_largest_batch_is_found_in_a_few_compilations(line: str, start: int) -> None:
    fixed, each, limit = LINES[line]
    good, bad, asked = search(6, start, lambda batch: fixed + each * batch)
    assert good <= limit < bad <= max(good * 1.04, good + 1)
    assert asked <= 6


def test_a_search_ends_where_larger_batches_are_of_no_use_or_none_fits() -> None:
    assert search(6, 8, lambda batch: batch) == (LARGEST, 0, 1)
    assert search(6, 8, lambda batch: batch, most=60) == (60, 0, 1)
    assert search(6, 80, lambda batch: batch, most=60) == (80, 0, 0)  # a batch that was asked for
    assert search(6, 8, lambda batch: 20 * GIB + batch) == (0, 1, 2)


def report(**values: object) -> Report:
    known = {"batch": 64, "batch_per_replica": 8, "parameters": 1994, "missing": [], **values}
    return Report(target="v5e-8", topology="v5e:2x4", chips=8, replicas=8, **known)  # type: ignore[arg-type]


def test_a_report_as_text() -> None:
    memory = {"total": 2 * GIB, "arguments": GIB, "temporary": GIB, "code": 2**20, "available": 16 * GIB}
    text = str(report(compiles=True, fits=True, memory=memory, largest_batch=512, too_large_batch=528, flops=2.5e9,
                      bytes_accessed=1e6, gradient_reductions=4, compiled_reductions=1))  # fmt: skip
    assert "v5e-8 (v5e:2x4): 8 chips, 8 replicas" in text
    assert "memory:        2.00 GiB of 16.00 GiB (12.5 %): arguments 1.00 GiB, temporary 1.00 GiB" in text
    assert "largest batch: 512, 64 on each replica; 528 doesn't fit" in text
    assert "work:          2.50 Gflop and 1.00 MB" in text
    assert "all-reduces:   4 of gradients; the compiler combines them into 1" in text


def test_a_report_of_a_model_that_the_tpu_can_not_train() -> None:
    one = {"op": "PyFunc", "layer": "odd", "file": "train.py", "line": 7, "why": "Python can't run on a TPU"}
    bad = report(forbidden=[one, {**one, "file": "", "line": 0}, {**one, "layer": ""}])
    assert not bad.ok
    expected = "compiles:      no, 3 operations that a TPU can't run:\n  PyFunc: layer 'odd', train.py:7\n    Python"
    assert expected in str(bad)
    assert "  PyFunc: layer 'odd'\n    Python" in str(bad)
    assert "  PyFunc: train.py:7\n    Python" in str(bad)
    tight = report(compiles=True, memory={"total": 20 * GIB, "available": 16 * GIB}, too_large_batch=64)
    assert not tight.ok
    assert "yes, but it doesn't fit into the memory" in str(tight)
    assert "none was found to fit; 64 doesn't" in str(tight)
    assert json.loads(json.dumps(tight.as_json()))["memory"]["total"] == 20 * GIB


def compiler(tried: list[int]) -> Callable[..., Any]:
    """Returns a compiler that needs 1 MB for each example."""
    from keras_dist.compat.tpu_emulation import Compiled, OutOfMemoryError

    def compile_for(topology: str, replicas: int, code: bytes) -> Compiled:
        tried.append(share := int(code))
        if share > 16 * 1024:
            raise OutOfMemoryError(share * 2**20, 16 * GIB)
        return Compiled(share * 2**20, results=0, temporary=0, code=0, flops=1.0, bytes_accessed=1.0, reductions=1)

    return compile_for


@pytest.fixture
def tried() -> list[int]:
    return []


@pytest.fixture
def dry_runs(tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Report]]:
    from keras_dist.compat import tpu_emulation
    from keras_dist.diagnostics import check

    monkeypatch.setattr(tpu_emulation, "versions", dict)
    monkeypatch.setattr(tpu_emulation, "lower", lambda traced: str(traced.specs[0].shape[0]).encode())
    monkeypatch.setattr(tpu_emulation, "fingerprint", bytes.decode)
    monkeypatch.setattr(tpu_emulation, "compile_for", compiler(tried))

    def reports(model: Callable[[], Any], examples: int = 0) -> list[Report]:
        import tensorflow as tf

        from keras_dist.diagnostics.captured import Captured

        def keep(sent: Any) -> None:
            if isinstance(sent, Report):
                kept.append(dataclasses.replace(sent, missing=list(sent.missing)))

        kept: list[Report] = []
        strategy = tpu_emulation.emulated_strategy(1)
        with strategy.scope():
            (built := model()).compile("sgd", "mse")
        captured = Captured(built, (tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))), examples=examples)
        check.DryRun(strategy, captured, target_of("v5e-1"), keep, tmp_path).run(8, 6)
        return kept

    return reports


def model() -> Any:
    import keras

    return keras.Sequential([keras.layers.Dense(1)])


def test_each_answer_comes_when_it_is_known_and_only_adds_lines(dry_runs: Callable[..., list[Report]]) -> None:
    found = dry_runs(model)
    assert [report.missing for report in found[:3]] == [
        ["forbidden", "compiles", "memory", "largest_batch"], ["compiles", "memory", "largest_batch"], ["largest_batch"]
    ]  # fmt: skip
    assert found[2].fits
    assert found[2].memory["total"] == 8 * 2**20
    for before, after in itertools.pairwise(map(str, found)):
        assert f"{after}\n".startswith(f"{before}\n")
    assert found[-1].missing == []
    assert 15_700 < found[-1].largest_batch <= 16_384 < found[-1].too_large_batch < 17_000


def test_the_examples_of_the_script_are_the_largest_batch(
    dry_runs: Callable[..., list[Report]], tried: list[int]
) -> None:
    for is_cached in (False, True):
        last = dry_runs(model, examples=100)[-1]
        assert (last.largest_batch, last.too_large_batch, last.cached) == (100, 0, is_cached)
        assert last.search_end == "the script has 100 examples"
    assert tried == [8, 100]


# The process that compiles.

COMPILES = f"report = {report(compiles=True, fits=True, missing=['largest_batch'], largest_batch=64)!r}"
SENDS = f"""
import os, pathlib, signal, sys
from multiprocessing import connection
from keras_dist.diagnostics.report import Report
{COMPILES}
pathlib.Path(os.environ["TPU_LOG_DIR"], "log").write_text("")
report.versions = {{"logs": os.environ["TPU_LOG_DIR"], "pid": str(os.getpid())}}
channel = connection.Connection(int(sys.argv[1]))
channel.send(report)
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the process that compiles does after its first answer."""

    def start(then: str) -> None:
        monkeypatch.setattr(process, "_START", f"import sys; sys.path += sys.argv[2:]; exec({SENDS + then!r})")

    monkeypatch.setattr(process, "python_of", lambda stream: Path(sys.executable))
    return start


def is_gone(report: Report) -> bool:
    return not Path(report.versions["logs"]).exists() and not Path("/proc", report.versions["pid"]).exists()


def test_a_compiler_that_crashes_leaves_its_first_answers(worker: Callable[[str], None]) -> None:
    worker("os._exit(3)")
    reports = process.dry_run("v5e-8", io.StringIO())
    assert [next(reports).fits, next(reports).fits] == [False, True]
    with pytest.raises(DistributionError, match="ended without a result.\nReceived: exit code 3"):
        next(reports)


@pytest.mark.parametrize(("signum", "name", "code"), [(2, "Ctrl-C", 130), (15, "SIGTERM", 143)])
def test_a_command_that_is_stopped_keeps_what_it_has(
    signum: int, name: str, code: int, worker: Callable[[str], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain = process.dry_run

    def dry_run_until_answer(*args: Any, **options: Any) -> Iterator[Report]:
        for report in plain(*args, **options):
            yield report
            if report.batch:  # the command has shown it
                os.kill(os.getpid(), signum)

    script = tmp_path / "train.py"
    script.write_text("")
    worker("signal.pause()")
    monkeypatch.setattr(diagnostics_cli, "dry_run", dry_run_until_answer)
    assert cli.main(["dry-run", str(script), "--target", "v5e-8"]) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[3] == "operations:    a TPU can run them all"
    assert out.splitlines()[-2:] == [
        "largest batch: at least 64, 8 on each replica", f"missing:       largest batch; stopped by {name}"
    ]  # fmt: skip
    assert err.splitlines()[-1] == f"keras-dist dry-run: stopped by {name}"
    assert cli.main(["dry-run", str(script), "--target", "v5e-8", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert (answer["stopped"], answer["missing"], answer["largest_batch"]) == (name, ["largest_batch"], 64)
    assert is_gone(Report(**{key: value for key, value in answer.items() if key != "ok"}))


def test_a_folder_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_DIST_TPU_CHECK", str(tmp_path / "file" / "env"))
    with pytest.raises(ConfigurationError, match="can't be written"):
        process.python_of(io.StringIO())


def test_an_environment_that_others_can_write_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin").chmod(0o777)
    monkeypatch.setenv("KERAS_DIST_TPU_CHECK", str(folder))
    with pytest.raises(ConfigurationError, match=r"Other users can change what is run from here(?s:.*)bin: .*0777"):
        process.python_of(io.StringIO())


def test_the_time_limit_of_the_search(worker: Callable[[str], None]) -> None:
    worker("signal.pause()")
    first, answer, last = process.dry_run("v5e-8", io.StringIO(), search_seconds=0.01)
    assert (first.batch, answer.stopped, answer.ok) == (0, "", True)
    assert last.stopped == "the search's time limit of 0.01 s"
    assert str(last).splitlines()[-1] == "missing:       largest batch; stopped by the search's time limit of 0.01 s"
    assert last.ok
    assert is_gone(last)


# --- A step through the real TPUStrategy, traced for cores that are not there; what no TPU can do in it ---

THIS = str(Path(__file__))
SPECS = (tf.TensorSpec((4, 20)), tf.TensorSpec((4,), tf.int32))
Dense = keras.layers.Dense


def traced(strategy: Any, make: Callable[[], keras.Model], specs: Any = SPECS) -> tuple[keras.Model, Any]:
    with strategy.scope():
        model = make()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        keras_model.build(model, specs)
        model.optimizer.build(model.trainable_variables)
    return model, tpu_emulation.trace(strategy, model.train_step, specs)


def two_layers() -> keras.Model:
    return keras.Sequential([Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), Dense(10)])


@pytest.mark.parametrize("cores", [pytest.param(8, marks=pytest.mark.full), 16])
def test_a_step_over_many_cores(cores: int) -> None:
    """Each of the 6 gradients is reduced once, over all cores; Adam's and BatchNorm's state is TPUStrategy's."""
    strategy = tpu_emulation.emulated_strategy(cores)
    assert strategy.num_replicas_in_sync == cores
    model, step = traced(strategy, two_layers)
    assert step.reductions == len(model.trainable_variables) == 6
    reduces = [op for op in tf_graphs.operations_of(step.graph) if op.type == "XlaAllReduce"]
    groups = [tf.get_static_value(op.inputs[1]).tolist() for op in reduces]
    assert groups == [[list(range(cores))]] * 6
    assert {type(variable.value).__name__ for variable in model.variables} == {"TPUDistributedVariable"}
    assert check.find(step.graph, []) == []
    assert len(tpu_emulation.lower(step)) > 1000


def line_of(text: str) -> int:
    """The line of this file with this remark."""
    lines = Path(THIS).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def python(x: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda y: y, [x], tf.float32), x.shape)  # python


def prints(x: Any) -> Any:
    tf.print("mean", tf.reduce_mean(x))  # prints
    return x


def strings(x: Any) -> Any:
    return x + tf.strings.to_number(tf.strings.as_string(x))  # strings


def by_data(x: Any) -> Any:
    return x + tf.reduce_sum(tf.boolean_mask(x, x > 0))  # by_data


def unknown(x: Any) -> Any:
    boxes = tf.stop_gradient(x[:, :4])
    return x + tf.reduce_sum(tf.image.non_max_suppression_with_scores(boxes, boxes[:, 0], 2)[1])  # unknown


@pytest.mark.parametrize(
    ("function", "op", "why"),
    [
        (python, "EagerPyFunc", "Python can't run on a TPU"),
        (prints, "StringFormat", "remove tf.print from the step"),
        (strings, "AsString", "there are no strings on a TPU"),
        (by_data, "Where", "depends on the data"),
        (unknown, "NonMaxSuppressionV5", "XLA does not have this operation"),
    ],
)
def test_what_no_tpu_can_do(function: Callable[[Any], Any], op: str, why: str) -> None:
    class Odd(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return function(x)

    model, step = traced(
        tpu_emulation.emulated_strategy(8), lambda: keras.Sequential([Dense(8), Odd(name="odd_one"), Dense(10)])
    )
    found = check.find(step.graph, [layer.name for layer in model.layers])
    places = {(one["layer"], one["file"], one["line"]) for one in found}
    assert places == {("odd_one", THIS, line_of(function.__name__))}
    assert op in {one["op"] for one in found}
    assert any(why in one["why"] for one in found)


def test_what_a_layer_of_keras_does_has_the_layers_name_and_no_line_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_LIBRARIES", (*check._LIBRARIES, THIS))  # no frame is the user's
    strategy = tpu_emulation.emulated_strategy(1)
    model, step = traced(strategy, lambda: keras.Sequential([keras.layers.Hashing(10, name="hash"), Dense(10)]))
    found = check.find(step.graph, [layer.name for layer in model.layers])
    assert {(one["layer"], one["file"], one["line"]) for one in found} == {("hash", "", 0)}


def test_lookup_tables_are_found() -> None:
    def make() -> keras.Model:
        words = keras.Input((1,), dtype="string")
        numbers = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")(words)
        return keras.Model(words, Dense(10)(keras.layers.Flatten()(keras.layers.Embedding(3, 4)(numbers))))

    specs = (tf.TensorSpec((4, 1), tf.string), tf.TensorSpec((4,), tf.int32))
    model, step = traced(tpu_emulation.emulated_strategy(8), make, specs)
    found = check.find(step.graph, [layer.name for layer in model.layers])
    assert ("words", "LookupTableFindV2") in {(one["layer"], one["op"]) for one in found}
    assert any("apply StringLookup" in one["why"] for one in found)
