"""What tests share that start processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.testing import WorkerPool
from tests.multiprocess.launches import Start, launches


@pytest.fixture
def pool(pools: Any) -> WorkerPool:
    """A coordinator with two workers and a server, which live on from test to test."""
    pool: WorkerPool = pools.get("parameter_server", 2)
    return pool


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with room for 64 kB: a file system if it can be mounted, otherwise a limit on file sizes."""
    folder, size = tmp_path / "full", 64 * 1024
    folder.mkdir()
    is_mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    ).returncode
    yield folder, 0 if is_mounted else size
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `keras-dist run`; afterwards looks for processes and files that it left behind."""
    with launches(tmp_path) as starts:
        yield starts
