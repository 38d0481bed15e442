"""Rows of the examples of several shares, put together outside of a step's own computation, without gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.data import sources
from keras_dist.data.shares import Share
from keras_dist.step.agreement import check_shapes


def gather_rows(backend: Backend, rows: Any, name: str) -> Any:
    """Concatenates the rows of all ranks, in the order of the global batch. `name` must be unique in a step."""
    if isinstance(rows, tf.RaggedTensor):
        lengths = backend.all_gather(rows.row_lengths(), f"{name}_lengths")
        return tf.RaggedTensor.from_row_lengths(gather_rows(backend, rows.values, f"{name}_values"), lengths)
    if rows.dtype == tf.string:  # collectives send numbers only
        lengths, characters = sources.characters_of(tf.reshape(rows, [-1]))
        lengths = backend.all_gather(lengths, f"{name}_lengths")
        strings = sources.strings_of(lengths, backend.all_gather(characters, f"{name}_characters"))
        return tf.reshape(strings, tf.concat([[-1], tf.shape(rows)[1:]], 0))
    if rows.dtype == tf.bool:
        return tf.cast(gather_rows(backend, tf.cast(rows, tf.int32), name), tf.bool)
    if tf.executing_eagerly() or None in rows.shape[1:]:
        rows = check_shapes(backend.all_gather(tf.shape(rows)[None, 1:], f"{name}_shapes"), rows)
    return backend.all_gather(rows, name)


def real_rows(output: Any, count: Any) -> Any:
    """Returns all rows, or none if the share is empty and its only row a placeholder."""
    rows = output.nrows() if isinstance(output, tf.RaggedTensor) else tf.shape(output, out_type=tf.int64)[0]
    return output[: tf.where(count > 0, rows, tf.zeros_like(rows))]


def batch_of_all_ranks(backend: Backend, share: Share) -> Any:
    """Returns the whole batch from the shares of all ranks. Every rank must call it."""
    numbers = itertools.count()

    def of_all(rows: Any) -> Any:
        return gather_rows(backend, real_rows(rows, share.count), f"keras_dist_verified_{next(numbers)}")

    return tf.nest.map_structure(functools.partial(rows_of_all, of_all), share.data)


def batch_of_shares(shares: Sequence[Share]) -> Any:
    """Returns the whole batch from its shares in this process."""

    def of_all(*parts: Any) -> Any:
        return tf.concat([real_rows(part, share.count) for part, share in zip(parts, shares, strict=True)], 0)

    return tf.nest.map_structure(functools.partial(rows_of_all, of_all), *[share.data for share in shares])


def rows_of_all(of_all: Callable[..., Any], *leaves: Any) -> Any:
    """Returns one tensor of a batch from its shares' tensors, which `of_all` concatenates; the first without rows."""
    first = leaves[0]
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.from_dense(of_all(*map(tf.sparse.to_dense, leaves)))
    has_rows = isinstance(first, tf.RaggedTensor) or (isinstance(first, tf.Tensor) and first.shape.rank != 0)
    return of_all(*leaves) if has_rows else first


def as_tensors(batch: Any) -> Any:
    """Converts the arrays of a batch to tensors."""

    def tensor(leaf: Any) -> Any:
        stays = leaf is None or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if stays else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(tensor, batch)
