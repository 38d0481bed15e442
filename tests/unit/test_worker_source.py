"""Datasets that workers make."""

from __future__ import annotations

import pytest
import tensorflow as tf

from keras_dist.backends.parameter_server.shards import DatasetFunction


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
