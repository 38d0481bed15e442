"""An option of the backend, from `kd.init` on: a script that compresses its gradients, through the real launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
import keras
import keras_dist as kd

kd.init(kd.Horovod(compression="fp16"))
kd.init("auto")  # the same cluster, whatever its options
from tests.contract.parts import float64, mlp, numbers, fitted
from tests.contract.test_optimizers import EPOCHS, compressed_of_shares

keras.utils.set_random_seed(0)
float64()
model = kd.distribute(mlp())
model.compile(keras.optimizers.SGD(0.1), "mse")
ours = fitted(model, *numbers(), shuffle=False, epochs=EPOCHS)["weights"]
keras.utils.set_random_seed(0)
expected = compressed_of_shares("fp16", kd.size())
if kd.is_chief():
    found = {"ours": ours, "expected": expected["weights"], "uncompressed": expected["own_uncompressed"]}
    print("found:", json.dumps({name: [value.tolist() for value in values] for name, values in found.items()}))
"""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_compression_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", str(tmp_path / "train.py")]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("found:"))
    found = {name: [np.array(v) for v in values] for name, values in json.loads(line[len("found:") :]).items()}
    for ours, expected in zip(found["ours"], found["expected"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)
    differences = [np.abs(a - b).max() for a, b in zip(found["ours"], found["uncompressed"], strict=True)]
    assert 0 < max(differences) < 1e-3
