"""Parameter servers: steps are repeated until the shares agree; datasets that workers make."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

from keras_dist.backends.parameter_server.engine import SyncEngine
from keras_dist.backends.parameter_server.exchange import Outputs
from keras_dist.backends.parameter_server.shards import DatasetFunction
from keras_dist.errors import NotSupportedError


def test_a_step_that_draws_other_numbers_each_time_is_refused() -> None:
    engine, numbers = object.__new__(SyncEngine), itertools.count(1.0)
    engine._runs = 1

    def run(gathered: Any) -> list[Outputs]:
        return [Outputs({}, [], [], [], told=[tf.constant([next(numbers)])]) for _ in range(2)]

    with pytest.raises(NotSupportedError, match="computes something else each time"):
        engine._repeat(run(()), run)


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
