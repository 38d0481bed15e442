"""Ranks that meet an empty cache: one of each host downloads, the others wait for it. The server counts."""

import contextlib
import functools
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.testing import WorkerError, WorkerPool
from tests.contract.parts import tfds_builder
from tests.multiprocess.launches import QUIET
from tests.multiprocess.servers import SECONDS, Files, until_waiting

pytestmark = pytest.mark.timeout(300)
SIZE = 3
DATA = os.urandom(300_000)


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("a/one", "a/two"):
            info = tarfile.TarInfo(name)
            info.size = len(DATA)
            tar.addfile(info, io.BytesIO(DATA))
    return file.getvalue()


@pytest.fixture
def ranks(pools: Any) -> WorkerPool:
    pool: WorkerPool = pools.get("horovod", SIZE)
    pool.run(lambda: None)
    return pool


def fetch(url: str, folder: str, **options: Any) -> tuple[str, str]:
    """Returns a hash of the file, and the names in the folder of the cache."""
    path = Path(keras.utils.get_file(origin=f"{url}/data", cache_dir=folder, **options))
    return hashlib.sha256(path.read_bytes()).hexdigest(), " ".join(os.listdir(path.parent))


def waits(pool: WorkerPool) -> Any:
    """The server goes on when the other ranks wait."""
    return lambda path: until_waiting(lambda: set(pool.pids), SIZE - 1)


@pytest.mark.parametrize("options", [{}, {"force_download": True}, {"file_hash": hashlib.md5(DATA).hexdigest()}])
def test_one_rank_downloads(ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    with Files({"/data": DATA}, waits(ranks)) as files:
        found = ranks.run(functools.partial(fetch, files.url, str(tmp_path), **options))
        assert found == [(hashlib.sha256(DATA).hexdigest(), "data")] * SIZE
        assert files.requests == {"/data": 1}
        if not options:  # it is there now
            assert ranks.run(fetch, files.url, str(tmp_path)) == found
            assert files.requests == {"/data": 1}


def test_an_error_reaches_all(ranks: WorkerPool, tmp_path: Path) -> None:
    def failure(url: str, folder: str) -> str:
        try:
            fetch(url, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    with Files({}, waits(ranks)) as files:
        errors = ranks.run(failure, files.url, str(tmp_path))
        own = f"Exception: URL fetch failure on {files.url}/data: 404 -- Not Found"
        assert errors.count(own) == 1
        others = [error for error in errors if error != own]
        assert others == [
            "DistributionError: Another process of this host failed to write a file or folder, for which this one has "
            f"waited.\nReceived: {tmp_path}/datasets/data: HTTPError: HTTP Error 404: Not Found\n"
            "Remedy: See the error of the other rank."
        ] * (SIZE - 1)
        assert files.requests == {"/data": 1}
        with pytest.raises(WorkerError):  # somebody tries again, without waiting for the others
            ranks.run(lambda url: fetch(url, str(tmp_path)), files.url)


def test_an_archive_is_extracted_once_and_never_written_over(ranks: WorkerPool, tmp_path: Path) -> None:
    def extract(url: str) -> list[Any]:
        """Reads while another rank may extract again."""
        seen = []
        for _ in range(5):
            path = Path(keras.utils.get_file(origin=f"{url}/data.tar.gz", cache_dir=str(tmp_path), extract=True))
            seen += [hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("a/one", "a/two")]
        kd.barrier()
        return [path.name, sorted(os.listdir(path.parent)), set(seen)]

    with Files({"/data.tar.gz": archive()}, waits(ranks)) as files:
        found = ranks.run(extract, files.url)
    names = ["data.tar.gz", "data.tar.gz_archive"]
    assert found == [["data.tar.gz", names, {hashlib.sha256(DATA).hexdigest()}]] * SIZE
    assert files.requests == {"/data.tar.gz": 1}


def test_what_is_no_archive_is_not_extracted_on_any_rank(ranks: WorkerPool, tmp_path: Path) -> None:
    def extract(url: str) -> list[str]:
        keras.utils.get_file("x", origin=f"{url}/data", cache_dir=str(tmp_path), extract=True)
        kd.barrier()
        return os.listdir(tmp_path / "datasets")

    with Files({"/data": DATA}, waits(ranks)) as files:
        assert ranks.run(extract, files.url) == [["x_archive"]] * SIZE


KILLED = """
import sys
import keras
from keras_dist.state import checkpoint

checkpoint.share_on_host()
assert "tensorflow_datasets" not in sys.modules  # only if the script imports it
print("ready", flush=True)
sys.stdin.readline()
print(keras.utils.get_file(origin=sys.argv[1], cache_dir=sys.argv[2]))
"""


@pytest.mark.full
def test_the_next_one_downloads_if_the_first_is_killed(tmp_path: Path) -> None:
    """The first one is killed in the middle of its download."""
    begun, killed = threading.Event(), threading.Event()

    def meanwhile(path: str) -> None:
        if not begun.is_set():
            begun.set()
            killed.wait(SECONDS)

    with Files({"/data": DATA}, meanwhile) as files, contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", KILLED, f"{files.url}/data", str(tmp_path)]
        environ = {**os.environ, **QUIET, "TMPDIR": str(tmp_path)}
        pipe = subprocess.PIPE
        first, second = [
            stack.enter_context(subprocess.Popen(command, env=environ, text=True, stdin=pipe, stdout=pipe))
            for _ in range(2)
        ]
        for process in (first, second):
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
        print(file=first.stdin, flush=True)
        assert begun.wait(SECONDS)
        print(file=second.stdin, flush=True)
        until_waiting(lambda: {second.pid}, 1)
        first.kill()
        assert first.wait() == -signal.SIGKILL
        killed.set()
        path = second.communicate(timeout=SECONDS)[0].splitlines()[-1]
    assert Path(path).read_bytes() == DATA
    assert files.requests == {"/data": 2}
    assert sorted(os.listdir(tmp_path)) == ["datasets"]
    assert os.listdir(tmp_path / "datasets") == ["data"]


def prepare(url: str, folder: str) -> list[Any]:
    """A dataset of TFDS whose one file is downloaded. Each rank loads it as scripts do."""
    import tensorflow_datasets as tfds

    def rows(dl_manager: Any) -> list[dict[str, int]]:
        return [{"x": int(line)} for line in dl_manager.download(f"{url}/numbers").read_text().split()]

    state = random.getstate()
    tfds_builder(rows, {"x": np.int64(0)}, is_registered=True)
    data, info = tfds.load("made_up", split="train", data_dir=folder, with_info=True)
    return [
        [int(row["x"]) for row in data.as_numpy_iterator()], info.splits["train"].num_examples,
        random.getstate() == state, sorted(os.listdir(Path(folder, "made_up"))),
    ]  # fmt: skip


def test_one_rank_prepares_a_dataset_of_tfds(ranks: WorkerPool, tmp_path: Path) -> None:
    with Files({"/numbers": b"5 6 7"}, waits(ranks)) as files:
        found = ranks.run(prepare, files.url, str(tmp_path))
    assert [sorted(numbers) for numbers, *_ in found] == [[5, 6, 7]] * SIZE
    assert [rest for _, *rest in found] == [[3, True, ["1.0.0"]]] * SIZE
    assert files.requests == {"/numbers": 1}
