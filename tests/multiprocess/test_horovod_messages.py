"""How Horovod sends the gradients of a step: large ones by themselves, the others together."""

from __future__ import annotations

import re
from typing import Any

import pytest

MEGABYTE = 2**20 // 4  # numbers of float32
SIZES = [3, 2 * MEGABYTE, 5, MEGABYTE, 7]


def sums_of_ranks(sizes: list[int]) -> tuple[list[tuple[float, float]], list[str]]:
    """Returns the ends of each sum, and the operations of Horovod with their number of tensors."""
    import tensorflow as tf

    import keras_dist as kd
    from keras_dist.cluster import current_backend

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


@pytest.mark.timeout(120)
@pytest.mark.ci
def test_large_gradients_are_sent_by_themselves(pools: Any) -> None:
    results = pools.get("horovod", 2).run(sums_of_ranks, SIZES)
    for ends, sent in results:
        assert ends == [(3.0, 3.0 * size) for size in SIZES]
        # Two of at least half a MB for each rank; the small ones with the row of the rank.
        assert [re.sub("^Horovod", "", each) for each in sent] == ["Allreduce 1", "Allreduce 1", "GroupedAllreduce 4"]


@pytest.mark.timeout(120)
@pytest.mark.ci
def test_only_large_gradients(pools: Any) -> None:
    for ends, _ in pools.get("horovod", 2).run(sums_of_ranks, [MEGABYTE]):
        assert ends == [(3.0, 3.0 * MEGABYTE)]
