"""Batches on the coordinator: cut into shares, described, and put together again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from keras_dist.data.shares import Shares, row_count, share_bounds


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a batch.

    Args:
        data: The examples, or which batch of its own a worker reads.
        place: Of the part among all.
        count: Number of its examples.
        total: Number of examples of the whole.
    """

    data: Any
    place: int
    count: int
    total: int


def shares_of(batch: Any, size: int) -> list[Share]:
    """Cuts a batch into as many shares, some of which may be empty."""
    total = int(row_count(batch))
    bounds = [share_bounds(total, place, size) for place in range(size)]
    parts = []
    for place, (start, stop) in enumerate(bounds):
        rows = functools.partial(_rows, start=start, stop=stop)
        parts.append(Share(tf.nest.map_structure(rows, batch), place, stop - start, total))
    return parts


def in_parts(shares: Shares) -> list[Share]:
    """Returns shares that were made with the data set."""
    return [Share(part.data, place, int(part.count), int(part.total)) for place, part in enumerate(shares.parts)]


def _rows(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = [int(length) for length in leaf.dense_shape[1:]]
        return tf.sparse.slice(leaf, [start, *[0] * len(shape)], [stop - start, *shape])
    return leaf if leaf is None or leaf.shape.rank == 0 else leaf[start:stop]


def spec_of(iterator: Any) -> Any:
    """What Keras would trace a step for; `None` where there is no data set."""
    spec = getattr(iterator, "element_spec", None)
    spec = spec.parts[0].data if isinstance(spec, Shares) else spec
    return None if spec is None else tf.nest.map_structure(_none_if_optional, spec)


def _none_if_optional(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec


def type_of(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(leaf)


def without_optionals(batch: Any) -> Any:
    """Keras's data sets hold an empty `Optional` for `None`."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        composite = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if composite else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(convert, batch)


def concatenated(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(list(parts), 0)
