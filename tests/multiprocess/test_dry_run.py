"""The real TPU compiler, without a TPU. The first run installs it (2 GB, some minutes), so all of this is `slow`.

It is what fails when a private name of JAX or of its libtpu moves; tests/unit/test_tpu_trace.py does for TensorFlow's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import numpy as np
import keras
import keras_dist as kd
L = keras.layers
kd.init(kd.TPU("local"))
"""
TAIL = """
model = kd.distribute(model)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=64)
"""
MLP = "x, y = np.zeros((99, 20)), np.zeros(99, 'int32')\nmodel = keras.Sequential([L.Dense(64, 'relu'), L.Dense(10)])"
CNN = """
x, y = np.zeros((64, 16, 16, 3), "float32"), np.zeros(64, "int32")
model = keras.Sequential([L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.GlobalAveragePooling2D(), L.Dense(10)])
"""
EMBEDDING = """
x, y = np.zeros((64, 12), "int32"), np.zeros(64, "int32")
model = keras.Sequential([L.Embedding(1000, 16), L.GlobalAveragePooling1D(), L.Dense(10)])
"""
SHOUT = """import tensorflow as tf
class Shout(L.Layer):
    def call(self, x):
        tf.print(x)
        return x
"""
LOW = "keras.mixed_precision.set_global_policy('mixed_bfloat16')\n" + MLP
TOO_MANY = "40000000"  # of a batch, on one chip


def dry_run(tmp_path: Path, body: str, *options: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body + TAIL)
    command = [sys.executable, "-m", "keras_dist", "dry-run", str(script), "--json", *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environ)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return report


@pytest.mark.parametrize(
    ("body", "target", "reductions"),
    [(MLP, "v5e-8", 4), (CNN, "v3-8", 6), (EMBEDDING, "v6e-1", 3), (LOW, "v5p-16", 4)],
    ids=["dense", "convolution", "embedding", "mixed_bfloat16"],
)
def test_what_compiles(tmp_path: Path, body: str, target: str, reductions: int) -> None:
    report = dry_run(tmp_path, body, "--target", target, "--no-search")
    assert report["compiles"]
    assert report["fits"]
    assert report["forbidden"] == []
    assert report["batch"] == 64
    assert report["gradient_reductions"] == reductions
    memory = report["memory"]
    assert 0 < memory["arguments"] <= memory["total"] < memory["available"]
    assert report["flops"] > 0
    assert report["bytes_accessed"] > 0


def test_an_answer_is_kept(tmp_path: Path) -> None:
    first, second = (dry_run(tmp_path, MLP, "--target", "v5e-8", "--no-search") for _ in range(2))
    assert second["cached"]
    assert second["memory"] == first["memory"]


def test_what_is_too_big_for_the_chip(tmp_path: Path) -> None:
    report = dry_run(tmp_path, MLP, "--target", "v5e-1", "--batch", TOO_MANY, "--no-search")
    assert report["compiles"]
    assert not report["fits"]
    assert report["memory"]["total"] > report["memory"]["available"] > 15 * 2**30


def test_the_largest_batch(tmp_path: Path) -> None:
    report = dry_run(tmp_path, MLP, "--target", "v5e-1", "--batch", TOO_MANY, "--trials", "4")
    assert not report["fits"]
    assert 0 < report["largest_batch"] < report["too_large_batch"] <= 40_000_000


def test_what_no_tpu_can_do(tmp_path: Path) -> None:
    body = MLP.replace("L.Dense(64, 'relu')", "L.Dense(64), Shout(name='shout')")
    report = dry_run(tmp_path, SHOUT + body, "--target", "v5e-8")
    (one,) = report["forbidden"]
    assert not report["compiles"]
    assert (one["layer"], one["file"], one["line"]) == ("shout", str(tmp_path / "train.py"), 10)


def test_a_model_that_is_there(tmp_path: Path) -> None:
    code = f"{HEAD.replace(chr(10) + 'kd.init(kd.TPU(' + chr(34) + 'local' + chr(34) + '))', '')}\n{MLP}\n"
    code += "model.compile('adam', 'sparse_categorical_crossentropy')\nmodel.build((None, 20))\n"
    code += "print(kd.tpu_dry_run(model, (x[:32], y[:32]), target='v5e-8', trials=0).gradient_reductions)\n"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1700, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4"
