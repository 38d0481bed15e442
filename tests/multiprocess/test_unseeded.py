"""Scripts that set no seed: ranks agree on the order, and all else is as random as in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.launches import RUN, SCRIPTS, output_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.ci]
COUNT = 32


def read(folder: Path, launcher: list[str]) -> list[dict[str, Any]]:
    folder.mkdir()
    output_of(*launcher, SCRIPTS / "unseeded.py", folder)
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_what_ranks_read_without_a_seed(tmp_path: Path) -> None:
    (plain,) = read(tmp_path / "plain", [sys.executable])
    first, second = read(tmp_path / "ranks", [*RUN, "-np", "2"])

    def epochs_of(name: str) -> list[list[float]]:
        """Returns each epoch's numbers in the order of the global batches: each rank has half of each batch of 8."""
        halves = (np.reshape(rank[name], [3, COUNT // 8, 4]) for rank in (first, second))
        return [[*epoch.ravel()] for epoch in np.concatenate([*halves], -1)]

    assert epochs_of("own seed") == plain["own seed"]
    for name in ("shuffled", "arrays"):
        epochs = epochs_of(name)
        assert all(sorted(epoch) == [*range(COUNT)] for epoch in epochs), name
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0], name
    for name in ("noise", "noise, several at a time"):
        drawn = np.ravel(epochs_of(name))
        assert len(set(drawn)) == len(drawn) == 3 * COUNT, name
