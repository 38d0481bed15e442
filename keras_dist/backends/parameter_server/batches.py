"""Batches on the coordinator: cut into shares, described, and concatenated again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.data import shares
from keras_dist.data.shares import Share, Shares
from keras_dist.step.agreement import check_shapes
from keras_dist.training.rows import rows_of_all

NO_FINGERPRINT = 0.0  # of a share: there is one reader, whose data nobody compares


def cut(batch: Any, size: int) -> list[Share]:
    """Cuts a batch into a share for each of `size` replicas; some may be empty."""
    if isinstance(batch, Shares):  # it was cut by the dataset
        return [part._replace(count=int(part.count), total=int(part.total)) for part in batch.parts]
    parts = [shares.cut(batch, index, size) for index in range(size)]
    if bool(parts[0].is_whole):
        shares.note_whole_batch(is_chief=True)
    return [Share(part.data, int(part.count), int(part.total), NO_FINGERPRINT) for part in parts]


def spec_of(iterator: Any) -> Any:
    """Returns what Keras would trace a step for, `None` where there is no dataset."""
    spec = getattr(iterator, "element_spec", None)
    spec = spec.parts[0].data if isinstance(spec, Shares) else spec
    return None if spec is None else tf.nest.map_structure(_none_if_optional, spec)


def _none_if_optional(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec


def type_of(leaf: Any) -> Any:
    """Returns the specification of a tensor, `None` of `None`."""
    return None if leaf is None else tf.type_spec_from_value(leaf)


def without_optionals(batch: Any) -> Any:
    """Returns a batch with `None` where Keras's datasets hold an empty `Optional`."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        composite = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if composite else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(convert, batch)


def whole_of(parts: Sequence[Any]) -> Any:
    """Returns the batch whose shares these are."""
    return tf.nest.map_structure(functools.partial(rows_of_all, concatenated), *parts)


def concatenated(*parts: Any) -> Any:
    """Returns tensors concatenated along their first axis."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(list(parts), 0)
    return tf.concat([check_shapes(tf.stack([tf.shape(part)[1:] for part in parts]), parts[0]), *parts[1:]], 0)
