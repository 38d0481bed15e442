"""Parameter servers: steps are repeated until the shares agree; datasets that workers make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from keras_dist.backends.parameter_server.engine import SyncEngine
from keras_dist.backends.parameter_server.exchange import Outputs
from keras_dist.backends.parameter_server.shards import DatasetFunction
from keras_dist.errors import NotSupportedError

SHARES = (1.0, 2.0)
Told = Callable[[float, Any], list[Any]]


def repeated(told: Told) -> tuple[list[Outputs], int]:
    """Runs a step on two shares. Returns its outputs, and how often it was run."""
    engine = object.__new__(SyncEngine)
    engine._runs = 1
    runs = []

    def run(gathered: Any) -> list[Outputs]:
        runs.append(gathered)
        return [Outputs({}, [], [], [], told=list(map(tf.constant, told(share, gathered)))) for share in SHARES]

    return engine._repeat(run(()), run), len(runs)


def sums(gathered: Any, own: float) -> list[float]:
    return [float(tf.reduce_sum(tensor)) for tensor in gathered] or [own] * 3


def test_independent_tensors_take_two_runs() -> None:
    _, runs = repeated(lambda share, gathered: [[share], [2 * share], [math.nan]])
    assert runs == 2


def test_a_chain_takes_a_run_for_each_tensor() -> None:
    def told(share: float, gathered: Any) -> list[Any]:
        first, second, _ = sums(gathered, share)
        return [[share], [share * first], [share * second]]

    outputs, runs = repeated(told)
    assert runs == 4
    assert [[float(tensor[0]) for tensor in output.told] for output in outputs] == [[1, 3, 9], [2, 6, 18]]


def test_a_tensor_may_change_its_shape() -> None:
    """The rows of all shares are known in the second run."""

    def told(share: float, gathered: Any) -> list[Any]:
        own = [share] * int(share)
        rows = gathered[0].numpy().tolist() if gathered else own
        return [own, [rows], [0.0]]

    outputs, runs = repeated(told)
    assert runs == 3
    assert [output.told[1].numpy().tolist() for output in outputs] == [[[1, 2, 2]], [[1, 2, 2]]]


def test_a_step_that_draws_other_numbers_each_time_is_refused() -> None:
    numbers = itertools.count(1.0)
    with pytest.raises(NotSupportedError, match="computes something else each time"):
        repeated(lambda share, gathered: [[next(numbers)]])


@pytest.mark.parametrize("asked", [None, True])
def test_the_tuner_is_off_unless_it_was_asked_for(asked: bool | None) -> None:
    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(4).batch(2)
        if asked is not None:
            options = tf.data.Options()
            options.autotune.enabled = asked
            dataset = dataset.with_options(options)
        return dataset

    graph = DatasetFunction(read, 1, 1).makers[0].graph
    serialized = [op.get_attr("serialized_options") for op in graph.get_operations() if op.type == "OptionsDataset"]
    expected = tf.data.Options()
    expected.autotune.enabled = bool(asked)
    assert serialized == [expected._to_proto().SerializeToString()]
