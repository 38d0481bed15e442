"""Scripts that set no seed: ranks agree on the order, and all else is as random as in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "unseeded.py"
COUNT = 32

pytestmark = pytest.mark.timeout(240)


def read(folder: Path, launcher: list[str]) -> list[dict[str, Any]]:
    folder.mkdir()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return read(tmp_path_factory.mktemp("unseeded") / "ranks", ["-m", "keras_dist", "run", "-np", "2"])


def global_batches(ranks: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Returns each epoch's numbers in the order of the global batches: each rank has half of each batch of 8."""
    first, second = (np.reshape(rank[name], [3, COUNT // 8, 4]) for rank in ranks)
    return [[*epoch.ravel()] for epoch in np.concatenate([first, second], -1)]


@pytest.mark.ci
def test_a_seed_of_its_own_gives_the_order_of_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    (plain,) = read(tmp_path / "plain", [])
    assert global_batches(ranks, "own seed") == plain["own seed"]


@pytest.mark.parametrize("name", ["shuffled", "arrays"])
@pytest.mark.ci
def test_each_epoch_has_every_example_once_in_another_order(ranks: list[dict[str, Any]], name: str) -> None:
    epochs = global_batches(ranks, name)
    assert all(sorted(epoch) == [*range(COUNT)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("name", ["noise", "noise, several at a time"])
@pytest.mark.ci
def test_noise_is_another_for_each_example_rank_and_epoch(ranks: list[dict[str, Any]], name: str) -> None:
    drawn = np.ravel(global_batches(ranks, name))
    assert len(set(drawn)) == len(drawn) == 3 * COUNT
