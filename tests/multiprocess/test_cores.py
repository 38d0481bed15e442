"""Ranks of one host compute on their own cores, with no more threads than these."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launches import Start

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import keras_dist as kd
import tensorflow as tf
kd.init()
tf.data.Dataset.range(4).map(tf.square, tf.data.AUTOTUNE).reduce(tf.constant(0, tf.int64), tf.add)
threads = os.listdir("/proc/self/task")
idle = [thread for thread in threads if os.sched_getscheduler(int(thread)) == os.SCHED_IDLE]
allowed = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in threads}
(here / f"seen-{kd.rank()}").write_text(json.dumps({"allowed": [*allowed], "idle": len(idle)}))
"""


def seen(start: Start, folder: Path, *options: str) -> list[Any]:
    code, _, err = start(SCRIPT, "-np", "2", *options).finish()
    assert code == 0, err
    return [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("backend", ["horovod", pytest.param("multi_worker", marks=pytest.mark.full)])
def test_each_rank_has_its_cores(start: Start, tmp_path: Path, backend: str) -> None:
    ranks = seen(start, tmp_path, "--backend", backend)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        assert [rank["allowed"] for rank in ranks] == [[cores]] * 2
        return
    assert [len(rank["allowed"]) for rank in ranks] == [1, 1]  # all threads have the same
    (first,), (second,) = (rank["allowed"] for rank in ranks)
    assert sorted([*first, *second]) == cores
    assert abs(len(first) - len(second)) <= 1


@pytest.mark.ci
@pytest.mark.parametrize("is_bound", [True, pytest.param(False, marks=pytest.mark.full)])
def test_gloo_yields_where_a_rank_has_one_core(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bound: bool
) -> None:
    monkeypatch.setenv("KERAS_DIST_BIND", "1" if is_bound else "0")
    cores = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        ranks = seen(start, tmp_path)
    finally:
        os.sched_setaffinity(0, before)
    assert all(rank["idle"] > 0 for rank in ranks)
    assert [rank["allowed"] for rank in ranks] == (
        [[[cores[0]]], [[cores[-1]]]] if is_bound else [[cores]] * 2
    )


@pytest.mark.ci
def test_a_wrong_setting_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_DIST_BIND", "yes")
    code, _, err = start(SCRIPT, "-np", "2").finish()
    assert code == 1
    assert "Received: KERAS_DIST_BIND='yes'" in err
    assert "Set it to 0 or 1, or unset it for 1." in err
