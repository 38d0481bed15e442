"""`keras-dist env`: versions, hardware, what Horovod was built with, the launcher, and the backend of "auto"."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from keras_dist import cli, environment
from keras_dist.diagnostics import env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The facts of a process without a launcher, found once: the probe imports TensorFlow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in environment.launcher_variables():
            patch.delenv(name)
        return env.describe()


def test_both_forms_have_the_same_facts(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "describe", lambda: plain)
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plain
    assert cli.main(["env"]) == 0
    shown = dict(re.split(r": +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["keras_dist"] == plain["keras_dist"]
    assert shown["packages keras"] == plain["packages"]["keras"]
    assert shown["horovod gloo"] == "yes"
    assert shown["backend reason"] == plain["backend"]["reason"]
    assert shown["network lo"].startswith("address 127.0.0.1, state ")
    assert {name.partition(" ")[0] for name in shown} == {*plain}


def test_the_documented_keys_are_those_that_there_are(plain: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(plain)


def test_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "SECRET_KEY": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    facts = env.describe()
    assert facts["launcher"] == {"name": "horovodrun", "rank": 1, "size": 4, "local_rank": 1, "local_size": 2}
    assert facts["backend"] == {"name": "horovod", "reason": "started by horovodrun"}
    of_horovod = {name: value for name, value in facts["variables"].items() if name.startswith("HOROVOD_")}
    assert of_horovod == {f"HOROVOD_{name}": value for name, value in variables.items() if name != "SECRET_KEY"}


def test_what_is_broken_is_a_fact_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("HOROVOD_RANK", "one")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    facts = env.describe()
    error = {
        "error": "TensorFlow or Keras can't be imported (exit code 1: ImportError: libcudart.so.12: cannot open shared "
        "object file)"
    }
    assert (facts["backend"], facts["horovod"]) == (error, error)
    assert "HOROVOD_RANK must be an integer. Received: HOROVOD_RANK='one'" in facts["launcher"]["error"]
