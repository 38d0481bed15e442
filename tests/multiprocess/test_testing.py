"""`keras_dist.testing`: results by rank, failures that name the rank, and a pool that continues after them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from keras_dist.errors import ConfigurationError
from keras_dist.testing import WorkerError, WorkerPool, run_workers
from tests.forks import ForkedPool, ForkServer

pytestmark = pytest.mark.timeout(300)


def leave_traces() -> None:
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.layers.Dense(1)
    os.chdir("/")


def look() -> Any:
    import keras
    import numpy as np

    states = keras.config.floatx(), keras.config.dtype_policy().name, keras.layers.Dense(1).name, os.getcwd()
    return *states, float(np.random.uniform()), float(keras.random.uniform([]))


def raise_on(rank: int) -> None:
    import keras_dist as kd

    if kd.rank() == rank:
        raise ValueError(f"of rank {rank}")


def die() -> None:
    print("the last line", flush=True)
    os._exit(7)


def wait_forever() -> None:
    import threading

    threading.Event().wait()


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_one_pool_from_start_to_end(forks: ForkServer, is_forked: bool) -> None:
    """With one rank; the tests of several ranks are below."""
    with ForkedPool(forks, 1, "serial", os.environ) if is_forked else WorkerPool(1, "serial") as pool:
        offset = 10
        assert pool.run(lambda x: x + offset, 5) == [15]
        pids = pool.pids
        fresh = pool.run(look)
        assert fresh[0][:4] == ("float32", "float32", "dense", os.getcwd())
        pool.run(leave_traces)
        assert pool.run(look) == fresh
        with pytest.raises(WorkerError, match="(?s)Rank 0 raised.*, in raise_on.*ValueError: of rank 0") as info:
            pool.run(raise_on, 0)
        assert isinstance(info.value.error, ValueError)
        assert pool.run(os.getpid) == pids, "it could continue"
        with pytest.raises(WorkerError, match=r"(?s)Rank 0 died with code 7.*the last line"):
            pool.run(die)
        with pytest.raises(WorkerError, match="Rank 0 did not finish the function within 0.5 s"):
            pool.run(wait_forever, timeout=0.5)
        assert pool.run(os.getpid) == pool.pids != pids
        last = pool.pids[0]
    assert not os.path.exists(f"/proc/{last}")
    assert pool.pids == []


def test_the_rank_that_failed_is_named() -> None:
    with pytest.raises(WorkerError, match="(?s)Rank 1 raised.*ValueError: of rank 1") as info:
        run_workers(raise_on, 2, args=(1,))
    assert info.value.rank == 1


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="n=2, backend='serial'"):
        WorkerPool(2, "serial")
    with pytest.raises(ConfigurationError, match="n=0"):
        WorkerPool(0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match="pip install cloudpickle"):
        WorkerPool(1, "serial")
