"""The constants that a rank computes with: no weights, so nobody sends the chief's to the others."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tf_graphs
from keras_dist.data.shares import static_length

_TABLES = (
    tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable,
)  # fmt: skip


def of_step(model: keras.Model, share: Any) -> list[tuple[str, str, str]]:
    """Returns name, type and hash of each constant of the step that is being traced, and of each table of a layer.

    An eager step has none: it is made anew for each batch. A mean over the share has the static length of the share in
    a number. So numbers have other types in a step on a share of another length.

    Args:
        model: The model.
        share: Structure of tensors. The step's share of the batch.
    """
    if tf.executing_eagerly():
        return []
    length = static_length(share)
    of_length = "" if length is None else f" in a step on {length} rows"
    constants = tf_graphs.constants_of(tf.compat.v1.get_default_graph())
    typed = [(name, kind + of_length if kind.endswith("()") else kind, value) for name, kind, value in constants]
    return [*typed, *_tables(model)]


def _tables(model: keras.Model) -> list[tuple[str, str, str]]:
    return [
        (f"the vocabulary of layer {layer.name!r}", "table", _hash(table))
        for layer in keras_model.flatten_layers(model)
        for table in vars(layer).values()
        if isinstance(table, _TABLES)
    ]


def _hash(table: Any) -> str:
    with tf.init_scope():
        pairs = zip(*[part.numpy().tolist() for part in table.export()], strict=True)
        return hashlib.sha256(repr(sorted(pairs)).encode()).hexdigest()[:16]
