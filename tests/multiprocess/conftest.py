"""What tests share that start processes of parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.fault_runs import ForkServer


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def pool(pools: Any) -> WorkerPool:
    """A coordinator with two workers and a server, which live on from test to test."""
    pool: WorkerPool = pools.get("parameter_server", 2)
    return pool
