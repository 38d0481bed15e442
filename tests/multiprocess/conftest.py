"""What tests share that start processes."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.launches import QUIET, Commands, Start, end, launches, popen


@pytest.fixture
def pool(pools: Any) -> WorkerPool:
    """A coordinator with two workers and a server, which live on from test to test."""
    pool: WorkerPool = pools.get("parameter_server", 2)
    return pool


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts commands in the folder of the test; afterwards looks for processes that they left behind."""
    marker, started = f"marker-{uuid.uuid4().hex}", []

    def start(*command: str, **variables: str) -> subprocess.Popen[str]:
        started.append(popen(command, tmp_path, marker, **QUIET, **variables))
        return started[-1]

    yield start
    end(marker, *started)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `keras-dist run`; afterwards looks for processes and files that it left behind."""
    with launches(tmp_path) as starts:
        yield starts
