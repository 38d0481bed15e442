"""What several TPU cores add up to. Devices of a CPU stand for them: more than one core can't be emulated."""

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
SCRIPT = Path(__file__).parent / "scripts" / "tpu_replicas.py"


@pytest.mark.more
@pytest.mark.timeout(420)
def test_replicas_add_up_to_one_process() -> None:
    """In float64, shares filled up: losses of every reduction, masks, weights, BatchNorm, Dropout, one's own step.

    What couples the examples of a share (BatchNorm, Dropout) is compared with the mean over the same shares.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, several = json.loads(done.stdout.splitlines()[-1])
    assert one.keys() == several.keys()
    assert len(one) == 13
    for kind, expected in one.items():
        assert several[kind]["logs"].keys() == expected["logs"].keys(), kind
        for (path, ours), (_, theirs) in zip(flat(several[kind]), flat(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12, err_msg=f"{kind}: {path}")


def flat(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        parts = tree if path == "weights" else [tree]
        return [(f"{path} {index}", np.asarray(part)) for index, part in enumerate(parts)]
    return [leaf for name in sorted(tree) for leaf in flat(tree[name], f"{path}{' ' if path else ''}{name}")]
