"""Random programs, pipelines and resumed runs beside one process: `make test-random ON=horovod-3 SEEDS=0-99`."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from keras_dist.testing import WorkerError
from tests.contract.harness import assert_close, assert_identical, flat, folder

TOLERANCE = 1e-7  # many steps and optimizers that divide by small numbers amplify rounding


def seeds() -> range:
    first, _, last = os.environ.get("SEEDS", "0-2").partition("-")
    return range(int(first), int(last or first) + 1)


def numbers_of(kind: str, seed: int, replicas: int, own_folder: str, is_distributed: bool) -> Any:
    import keras

    import keras_dist as kd
    from tests.contract.harness import own_loops, same
    from tests.contract.random_loops import run_loop
    from tests.contract.random_pipelines import run_pipelines
    from tests.contract.random_programs import run_program
    from tests.contract.random_resumes import run_resumed

    os.chdir(own_folder)
    keras.config.set_floatx("float64")
    run = {"program": run_program, "loops": run_loop, "pipelines": run_pipelines, "resumed": run_resumed}[kind]
    with small_is_large() if seed % 2 else contextlib.nullcontext():
        if not is_distributed:
            return run(seed, same, replicas)
        with own_loops():
            return run(seed, kd.distribute, replicas)


@contextlib.contextmanager
def small_is_large() -> Iterator[None]:
    """Small weights are sent and updated as large ones are."""
    from keras_dist.backends.horovod import backend as horovod
    from keras_dist.backends.multi_worker import backend as multi_worker
    from keras_dist.comm import processes
    from keras_dist.step import optimizer

    limits = (optimizer, "FUSED_FROM", (0, 0)), (processes, "_BUFFER_BYTES", 64)
    limits += (horovod, "_BYTES_OF_A_LARGE_MESSAGE", 64), (multi_worker, "_LARGE_BYTES", 64)
    with contextlib.ExitStack() as changed:
        for module, name, value in limits:
            changed.enter_context(mock.patch.object(module, name, value))
        yield


def lines_with(pattern: str, error: WorkerError) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if re.search(pattern, line)]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["program", "loops", "pipelines", "resumed"])
@pytest.mark.parametrize("seed", seeds())
def test_random(kind: str, seed: int, cluster: tuple[str, int], pools: Any, tmp_path: Path, golden: Any) -> None:
    plain, distributed = folder(tmp_path, "plain"), folder(tmp_path, "distributed")
    serial, size = pools.get("serial", 1), cluster[1]
    try:
        expected, chosen = golden((kind, seed, size), lambda: serial.run(numbers_of, kind, seed, size, plain, False)[0])
    except WorkerError as error:
        pytest.skip(f"not in one process: {lines_with('Error: ', error)[-1:]}")
    try:
        results = pools.get(*cluster).run(numbers_of, kind, seed, size, distributed, True, timeout=500.0)
    except WorkerError as error:
        # Of what is found to differ only the check of own code may say so, before anything was trained.
        if not (refused := lines_with(r"keras_dist\.errors\.(NotSupportedError|MismatchError: verify)", error)):
            raise
        pytest.skip(f"refused: {refused[-1]}")
    print(f"The {kind} of seed {seed}: {chosen}")  # shown if it fails
    for rank, (numbers, _) in enumerate(results):
        assert_identical(flat(numbers), flat(results[0][0]), f"rank {rank} and rank 0")
    assert_close(flat(results[0][0]), flat(expected), TOLERANCE)
