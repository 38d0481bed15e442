"""The parts of a dry run that do not compile; for those that do see tests/multiprocess/test_dry_run.py."""

from __future__ import annotations

import configparser
import io
import json
from pathlib import Path

import pytest

from keras_dist import cli
from keras_dist.diagnostics import check_environment
from keras_dist.diagnostics.report import Report
from keras_dist.diagnostics.search import Trial, largest_that_fits
from keras_dist.diagnostics.targets import target_of
from keras_dist.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("name", ["", "v5e", "v5e-7", "v9-8", "gpu"])
def test_an_unknown_target_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown TPU.\nReceived: target=.*\nRemedy: .*v5e-8"):
        target_of(name)


# The search.


def search(most: int, start: int, per_example: int, fixed: int, available: int) -> tuple[int, int, int]:
    """Returns the result of a search and the number of compilations; too large batches report their memory, too."""
    asked: list[int] = []

    def attempt(batch: int) -> Trial:
        asked.append(batch)
        memory = fixed + per_example * batch
        return Trial(batch, memory <= available, memory)

    good, bad = largest_that_fits(attempt(start), attempt, available, most)
    return good, bad, len(asked) - 1


@pytest.mark.parametrize("start", [1, 30, 4000])
def test_the_largest_batch_is_found_in_a_few_compilations(start: int) -> None:
    good, bad, asked = search(6, start, per_example=10, fixed=500, available=10_500)  # 1000 fit
    assert 960 <= good <= 1000 < bad <= 1050
    assert asked <= 6


def test_the_search_ends_where_there_is_no_limit_or_no_room() -> None:
    good, bad, _ = search(20, 8, per_example=1, fixed=0, available=2**40)
    assert (good, bad) == (2**20, 0)
    good, bad, _ = search(20, 8, per_example=1, fixed=2**30, available=2**20)
    assert (good, bad) == (0, 1)


def test_a_search_without_sizes_halves() -> None:
    fits = {batch: batch <= 300 for batch in range(1, 5000)}
    good, bad = largest_that_fits(Trial(64, True, 0), lambda batch: Trial(batch, fits[batch], 0), 10, 12)
    assert 285 <= good <= 300 < bad <= 315


# The report.


def report(**values: object) -> Report:
    return Report(target="v5e-8", topology="v5e:2x4", chips=8, replicas=8, batch=64, batch_per_replica=8,
                  parameters=1994, **values)  # type: ignore[arg-type]  # fmt: skip


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
    bad = report(forbidden=[one])
    assert not bad.ok
    expected = "compiles:      no, 1 operation that a TPU can't run:\n  PyFunc: layer 'odd', train.py:7\n    Python"
    assert expected in str(bad)
    tight = report(compiles=True, memory={"total": 20 * GIB, "available": 16 * GIB}, too_large_batch=64)
    assert not tight.ok
    assert "yes, but it doesn't fit into the memory" in str(tight)
    assert "none was found to fit; 64 doesn't" in str(tight)
    assert json.loads(json.dumps(tight.as_json()))["memory"]["total"] == 20 * GIB


# The command, and the environment that compiles.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.py", "--target", "v5e-8"], "The script was not found."),
        (["train.py", "--target", "v5e-9"], "Unknown TPU."),
        (["train.py", "--target", "v5e-8", "--batch", "0"], "--batch must be at least 1."),
    ],
)
def test_invalid_options(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('must not be started')\n")
    assert cli.main(["dry-run", *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_extra_is_what_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extra, always = config["options.extras_require"]["tpu-check"], config["options"]["install_requires"]
    assert set(check_environment.REQUIREMENTS) <= {*extra.split("\n"), *always.split("\n")}


def test_a_folder_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_DIST_TPU_CHECK", str(tmp_path / "file" / "env"))
    with pytest.raises(ConfigurationError, match="can't be written"):
        check_environment.python_of(io.StringIO())
