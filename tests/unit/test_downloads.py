"""Processes that fetch the same: what Keras and TFDS do without us, and what one process sees of our change."""

import ast
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_dist.state import checkpoint
from tests.contract.parts import tfds_builder
from tests.multiprocess.servers import SECONDS, Files, until_waiting

KERAS = Path(keras.__file__).parent


def test_keras_still_writes_to_the_name_that_it_looks_for(tmp_path: Path) -> None:
    """Once this fails, `keras_downloads.py` is no longer needed. Without `share_on_host`, so it is plain Keras."""
    seen = []

    def look(path: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not (names := os.listdir(tmp_path / "datasets")) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(names)

    with Files({"/x": bytes(100_000)}, look) as files:
        keras.utils.get_file(origin=f"{files.url}/x", cache_dir=str(tmp_path))
    assert seen == [["x"]]


def test_all_downloads_of_keras_go_through_one_function() -> None:
    """`file_utils.get_file`, and in it the two names that are replaced."""
    fetching, used = set(), set()
    sources = {path: path.read_text() for path in KERAS.rglob("*.py")}
    for path, source in sources.items():
        if not re.search("urlretrieve|urlopen|def get_file", source):  # to parse all takes 20 s
            continue
        for node in ast.walk(ast.parse(source)):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("urlretrieve", "urlopen"):
                fetching.add(path.relative_to(KERAS).as_posix())
            if isinstance(node, ast.FunctionDef) and node.name == "get_file":
                used |= {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    assert fetching == {"src/utils/file_utils.py"}
    assert {"urlretrieve", "extract_archive"} <= used


def builder(folder: Path, while_writing: Any = lambda: None) -> Any:
    def rows(_: Any) -> Iterator[dict[str, int]]:
        while_writing()
        yield {"x": 1}

    return tfds_builder(rows, {"x": np.int64(0)})(data_dir=folder)


def test_tfds_still_fails_if_another_process_prepares_the_same(tmp_path: Path) -> None:
    """Once this fails, `tfds_downloads.py` needs no lock."""
    with pytest.raises(Exception, match="Cannot rename .* already exists"):
        builder(tmp_path, lambda: builder(tmp_path).download_and_prepare()).download_and_prepare()


def test_tfds_still_does_not_read_what_another_process_has_prepared(tmp_path: Path) -> None:
    """Once this fails, `tfds_downloads.py` need not read it."""
    before = builder(tmp_path)
    builder(tmp_path).download_and_prepare()
    assert before.is_prepared()
    before.download_and_prepare()
    assert not before.info.initialized
    with pytest.raises(KeyError, match="has not been generated yet"):
        before.as_dataset(split="train")


def test_tfds_draws_a_name_from_the_generator_of_python(tmp_path: Path) -> None:
    """Once this fails, the states need not be set again."""
    state = random.getstate()
    builder(tmp_path).download_and_prepare()
    assert random.getstate() != state


def test_threads_of_a_process_share_too() -> None:
    begun, go_on, did = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert go_on.wait(60)

    first = threading.Thread(target=lambda: did.append(checkpoint.once_on_host("x", work)))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=lambda: did.append(checkpoint.once_on_host("x", lambda: None)))
    second.start()
    until_waiting(lambda: {os.getpid()}, 1)
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert sorted(did) == [False, True]
    assert checkpoint.once_on_host("x", lambda: None) is True, "a later one works itself"


def test_extraction_replaces_files_and_keeps_others(tmp_path: Path) -> None:
    """As `extract_archive`, which writes over them; but who reads one goes on to read the old one."""
    target = tmp_path / "target"
    target.mkdir()
    for name in ("mine", "one"):
        (target / name).write_text("old")

    def write(path: str) -> None:
        Path(path, "folder").mkdir(parents=True)
        Path(path, "folder", "two").write_text("new")
        Path(path, "one").write_text("new")
        Path(path, "link").symlink_to("folder")

    with (target / "one").open() as reading:
        checkpoint._write(str(target), write)
        checkpoint._write(str(target), write)
        assert reading.read() == "old"
    assert {path.name: path.read_text() for path in target.glob("[mo]*")} == {"mine": "old", "one": "new"}
    assert (target / "link").is_symlink()
    assert (target / "link" / "two").read_text() == "new"
    assert os.listdir(tmp_path) == ["target"]
