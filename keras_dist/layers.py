"""Layers for distributed training."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.cluster import current_backend, is_started
from keras_dist.compat import keras_model
from keras_dist.errors import ConfigurationError


@keras.saving.register_keras_serializable("keras_dist", "ShardedEmbedding")
class ShardedEmbedding(keras.layers.Layer):
    """An embedding whose table is split over the parameter servers.

    Row `i` is in shard `i % shards`. Only the rows that a batch needs, and their gradients, are sent. Without
    parameter servers it is an ordinary embedding with one table. It is saved as one table, which a model with a
    `keras.layers.Embedding` instead can load. The coordinator's memory must hold the whole table twice, when it is
    created and when it is saved.

    Args:
        input_dim: int. Number of rows.
        output_dim: int. Length of a row.
        embeddings_initializer: Initializer of the table, as for `keras.layers.Embedding`.
        shards: int. Number of shards. Default: one on each server.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ConfigurationError: If a number is not positive.

    Example:

    ```python
    embedding = kd.layers.ShardedEmbedding(1_000_000, 64)
    vectors = embedding(ids)  # integers of shape (batch, ...) -> floats of shape (batch, ..., 64)
    ```
    """

    def __init__(
        self, input_dim: int, output_dim: int, embeddings_initializer: Any = "uniform", shards: int | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        if min(input_dim, output_dim, 1 if shards is None else shards) < 1:
            raise ConfigurationError(
                "The sizes of an embedding must be positive.",
                f"input_dim={input_dim}, output_dim={output_dim}, shards={shards}",
                "For example kd.layers.ShardedEmbedding(1000, 16).",
            )
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.shards = shards

    def build(self, input_shape: Any = None) -> None:
        devices = current_backend().variable_devices() if is_started() else [None]
        count = self.shards or len(devices)
        table = np.asarray(self.embeddings_initializer((self.input_dim, self.output_dim), dtype=self.variable_dtype))
        self._tables = []
        for shard in range(count):
            rows = table[shard::count]
            with tf.device(devices[shard % len(devices)]):
                weight = self.add_weight(
                    name=f"shard_{shard}", shape=rows.shape,
                    initializer=lambda shape, dtype=None, rows=rows: tf.convert_to_tensor(rows, dtype),
                )  # fmt: skip
            self._tables.append(weight)
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        return (*input_shape, self.output_dim)

    def call(self, inputs: Any) -> Any:
        count = len(self._tables)
        ids = tf.cast(inputs, tf.int64)
        flat = tf.reshape(ids, [-1])
        shard = tf.cast(flat % count, tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.size(flat)), shard, count)
        local_ids = tf.dynamic_partition(flat // count, shard, count)
        # Gather from the tf.Variable: a Keras variable would cast the whole table to the compute dtype.
        tables = [keras_model.backing(table) for table in self._tables]
        rows = [tf.gather(table, row_ids) for table, row_ids in zip(tables, local_ids, strict=True)]
        vectors = tf.cast(tf.dynamic_stitch(positions, rows), self.compute_dtype)
        outputs = tf.reshape(vectors, tf.concat([tf.shape(ids), [self.output_dim]], 0))
        outputs.set_shape([*inputs.shape, self.output_dim])
        return outputs

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "shards": self.shards,
        }

    @property
    def table(self) -> np.ndarray:
        """The whole table, as a new array."""
        whole = np.empty((self.input_dim, self.output_dim), self.variable_dtype)
        for shard, table in enumerate(self._tables):
            whole[shard :: len(self._tables)] = np.asarray(table)
        return whole

    def save_own_variables(self, store: Any) -> None:
        store["0"] = self.table

    def load_own_variables(self, store: Any) -> None:
        table = np.asarray(store["0"])
        for shard, weight in enumerate(self._tables):
            weight.assign(table[shard :: len(self._tables)])


# Keras saves the weights of a layer under the name of its class. A plain `Embedding` finds them under this one.
ShardedEmbedding.__name__ = "Embedding"

__all__ = ["ShardedEmbedding"]
