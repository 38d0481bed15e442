"""What is Horovod's: how it sends the gradients of a step, its compression, the cores that its ranks compute on."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist.cluster import current_backend
from tests.multiprocess.launches import RUN, Start, found, output_of

pytestmark = pytest.mark.timeout(120)
MEGABYTE = 2**20 // 4  # numbers of float32
SIZES = [3, 2 * MEGABYTE, 5, MEGABYTE, 7]


@pytest.mark.ci
def test_large_gradients_are_sent_by_themselves(pools: Any) -> None:
    def sums_of_ranks(sizes: list[int]) -> tuple[list[tuple[float, float]], list[str]]:
        """Returns the ends of each sum, and the operations of Horovod with their number of tensors."""

        @tf.function
        def reduced() -> Any:
            tensors = [tf.range(1, size + 1, dtype=tf.float32) * (kd.rank() + 1) for size in sizes]
            sums, table = current_backend().all_reduce(tensors, tf.constant([float(kd.rank())]), "test_messages")
            return [(total[0], total[-1]) for total in sums], table

        graph = reduced.get_concrete_function().graph
        sent = [f"{op.type} {len(op.inputs)}" for op in graph.get_operations() if op.type.startswith("Horovod")]
        ends, table = reduced()
        assert table.numpy().tolist() == [[float(rank)] for rank in range(kd.size())]
        return [(float(first), float(last)) for first, last in ends], sorted(sent)

    results = pools.get("horovod", 2).run(sums_of_ranks, SIZES)
    for ends, sent in results:
        assert ends == [(3.0, 3.0 * size) for size in SIZES]
        # Two of at least half a MB for each rank; the small ones with the row of the rank.
        assert [re.sub("^Horovod", "", each) for each in sent] == ["Allreduce 1", "Allreduce 1", "GroupedAllreduce 4"]
    for ends, _ in pools.get("horovod", 2).run(sums_of_ranks, [MEGABYTE]):  # nothing that is small
        assert ends == [(3.0, 3.0 * MEGABYTE)]


COMPRESSED = """
import tensorflow as tf
import keras_dist as kd
kd.init(kd.Horovod(compression="fp16"))
kd.init("auto")  # the same cluster, whatever its options
from keras_dist.cluster import current_backend
(total,), _ = current_backend().all_reduce([tf.constant([1.0001])], tf.constant([0.0]), "compressed")
print("found:", total.numpy().tolist())
"""


@pytest.mark.full
def test_compression_from_the_start(tmp_path: Path) -> None:
    """The option of `kd.init`, by the real launcher. The promised case "compression-fp16" has its numbers."""
    (tmp_path / "train.py").write_text(COMPRESSED)
    assert found(output_of(*RUN, "-np", "2", tmp_path / "train.py")) == [2.0]


CORES = """
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
    code, _, err = start(CORES, *options).finish()
    assert code == 0, err
    return [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(2)]


@pytest.mark.full  # on two cores the next test has the same
@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
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
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    os.sched_setaffinity(0, cores)
    try:
        ranks = seen(start, tmp_path)
    finally:
        os.sched_setaffinity(0, before)
    assert all(rank["idle"] > 0 for rank in ranks)
    assert [rank["allowed"] for rank in ranks] == ([[[cores[0]]], [[cores[-1]]]] if is_bound else [[cores]] * 2)
