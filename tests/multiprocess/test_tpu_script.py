"""A typical script, unedited, on an emulated TPU core: what it trains, logs and writes is what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def run(folder: Path, *command: str, **more: str) -> dict[str, Any]:
    folder.mkdir()
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **more}
    arguments = [sys.executable, *command, "out.json", "ram://files"]  # TensorFlow's file system, as for gs://
    done = subprocess.run(arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return {**numbers, "stderr": done.stderr}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_typical_script_unedited(tmp_path: Path) -> None:
    """Callbacks, weights, every source of data, batch by batch, files, mixed_bfloat16; batches that are filled up."""
    script = str(SCRIPTS / "typical.py")
    plain = run(tmp_path / "plain", script)
    on_core = run(tmp_path / "core", str(SCRIPTS / "on_emulated_tpu.py"), script, TPU_NAME="local")
    assert "keras_dist: tpu (1 TPU core, emulated on the CPU; found by TPU_NAME)" in on_core.pop("stderr")
    assert "keras_dist: serial" in plain.pop("stderr")
    assert on_core["with_callbacks"]["files"] == [
        "1.weights.h5", "2.weights.h5", "3.weights.h5", "4.weights.h5", "best.keras", "log.csv"
    ]  # fmt: skip
    assert on_core["with_callbacks"]["rows"] == 100
    ours, theirs = flat(on_core), flat(plain)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, float):
            np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-5, err_msg=path)
        else:
            assert ours[path] == value, path


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return {path: tree}
    return {key: leaf for part, item in items for key, leaf in flat(item, f"{path}/{part}").items()}
