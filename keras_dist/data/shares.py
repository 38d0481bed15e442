"""Cuts a global batch into shares, one for each rank or replica."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dist.compat import tf_compat, tf_data
from keras_dist.data.pipeline import decompose, fingerprint_of, map_elements, with_fingerprints
from keras_dist.logging import logger


def share_bounds(count: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns where the share of a rank begins and ends in a global batch.

    Shares are contiguous, in the order of rank, cover the batch once, and differ in size by at most one. The bounds
    have the type of `count`, an int or an integer tensor.

    >>> [share_bounds(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return rank * count // size, (rank + 1) * count // size


class Share(NamedTuple):
    """The part of a global batch that one rank or replica computes."""

    data: Any  # as Keras expects it; an empty share has one example as a placeholder, which is not counted
    count: Any  # int32 scalar, the number of examples in this share
    total: Any  # int32 scalar, the number of examples in the global batch
    fingerprint: Any  # float32 scalar, a hash of the global batch
    # bool scalar, True if the batch cannot be cut (see `take_share`): then the data are the whole batch on every rank,
    # and only the first one counts it.
    is_whole: Any = False


class Shares(NamedTuple):
    """The shares of all replicas of this process, in their order: the elements of each rank's datasets."""

    parts: tuple[Share, ...]

    @property
    def counts(self) -> list[Any]:
        return [part.count for part in self.parts]


def take_shares(batch: Any, size: int, rank: int = 0, ranks: int = 1) -> Shares:
    """Cuts the shares of the replicas of one rank from a global batch. Each rank has `size` replicas."""
    parts, fingerprint = [cut(batch, rank * size + index, ranks * size) for index in range(size)], fingerprint_of(batch)
    return Shares(tuple(part._replace(fingerprint=fingerprint) for part in parts))


def joined(shares: Shares) -> Share:
    """Returns the share of a rank, whose data are the shares of its replicas."""
    return shares.parts[0]._replace(data=shares, count=tf.add_n(shares.counts))


def cut_again(share: Share, size: int) -> Shares:
    """Cuts the share of a rank into those of its replicas."""
    if size == 1:
        return Shares((share,))
    parts = [cut(share.data, index, size) for index in range(size)]
    if may_be_empty(share):  # then its one example is a placeholder
        parts = [part._replace(count=tf.where(share.count > 0, part.count, 0)) for part in parts]
    return Shares(tuple(share._replace(data=part.data, count=part.count) for part in parts))


def take_share(batch: Any, rank: int, size: int) -> Share:
    """Cuts the share of one rank from a global batch.

    If its tensors have different lengths (nodes and edges of a graph, a table beside the examples, two datasets of
    different batch sizes), nobody knows which rows belong together. Then the first rank's share is the whole batch, and
    the other shares are empty. The first tensor determines the number of examples.
    """
    return cut(batch, rank, size)._replace(fingerprint=fingerprint_of(batch))


# Each call of `fit`, `evaluate` or `predict` makes a dataset, most often of batches of the same kind.
_traced_share = tf_compat.often_traced(take_share, keeps_shapes=True)


def cut(batch: Any, rank: int, size: int) -> Share:
    """Returns the share of one rank without a fingerprint, see `take_share`."""
    lengths = lengths_of(batch)
    total = lengths[0] if lengths else 1
    can_be_cut = all_equal(lengths)
    start, stop = share_bounds(total, rank, size)
    # Of a length that is known no operation: parameter servers cut each batch eagerly.
    least, most = (min, max) if isinstance(total, int) else (tf.minimum, tf.maximum)
    first_row = least(start, most(total - 1, 0))
    stop_row = least(most(stop, first_row + 1), total)
    count = stop - start
    if can_be_cut is not True:
        count = tf.where(can_be_cut, count, total if rank == 0 else 0)

    def take(leaf: Any, rows: Any) -> Any:
        bounds: tuple[Any, Any, int | None] = first_row, stop_row, size
        if can_be_cut is not True:
            bounds = tf.where(can_be_cut, first_row, 0), tf.where(can_be_cut, stop_row, rows), None
        return _copied(_take_rows(leaf, *bounds))

    count, total = tf.convert_to_tensor(count), tf.convert_to_tensor(total)
    return Share(_map_rows(take, batch), count, total, tf.constant(0.0), tf.math.logical_not(can_be_cut))


def _copied(rows: Any) -> Any:
    """Returns a copy of some rows of a batch, which may be a NumPy array of the script, as a generator yields it.

    TensorFlow protects an array from operations that compute in place, but not rows of it (TensorFlow 2.21).
    """
    return tf.raw_ops.DeepCopy(x=rows) if isinstance(rows, tf.Tensor) else rows


def first_rows(share: Share, number: int) -> Share:
    """Returns a share with the first rows only, without rows if they don't belong together."""
    data = _map_rows(lambda leaf, rows: _take_rows(leaf, 0, tf.minimum(rows, number), None), share.data)
    return share._replace(data=data, count=tf.where(share.is_whole, 0, tf.minimum(share.count, number)))


UNCUT = (
    "the tensors of a batch have different lengths, so it cannot be cut: each rank computes the whole batch. The "
    "numbers are those of one process, but more ranks are not faster. To share the work, let each rank read its own "
    "data (data='sharded'), or make batches whose tensors have the same length."
)


def may_be_empty(share: Share) -> bool:
    """True unless the static batch size shows that this share has an example."""
    return not tf.get_static_value(share.count)


def shard_dataset(
    dataset: tf.data.Dataset, rank: int, size: int, agrees: Callable[[str | None], bool] = lambda digest: True
) -> tf.data.Dataset:
    """Turns a dataset of global batches into a dataset of this rank's shares.

    Every rank reads the same stream and keeps its share of each batch, so the order of examples, the number of steps
    and the last partial batch are the same as in one process. If possible, it maps only those examples (`pipeline.py`).

    `agrees` takes a digest of this rank's maps, and returns whether all ranks have the same. Data are compared before
    the maps run, so ranks whose maps differ run them before the comparison.
    """
    pipeline = decompose(dataset)
    if not agrees(None if pipeline is None else pipeline.digest):
        pipeline = None
    batches = dataset if pipeline is None else pipeline.batches
    made = "all examples" if pipeline is None else "the examples of its own share only"
    logger().debug("input: each rank makes %s", made)
    if (pairs := with_fingerprints(batches)) is None:
        shares = map_batches(batches, lambda batch: _traced_share(batch, rank, size))
    else:
        shares = map_batches(pairs, lambda pair: cut(pair[0], rank, size)._replace(fingerprint=pair[1]))
    if pipeline is None:
        return shares
    shares = pipeline.finished(shares)
    count = tf.get_static_value(dataset.cardinality())  # `None` while a dataset function is traced
    if count is not None and count >= 0:
        shares = shares.apply(tf.data.experimental.assert_cardinality(count))
    return shares.prefetch(tf.data.AUTOTUNE)


def map_batches(dataset: tf.data.Dataset, function: Callable[[Any], Any]) -> tf.data.Dataset:
    """Maps the batches that a script passes, some time before they are needed.

    Batches that Python code makes are read no further ahead than in one process: the code may act on what
    `on_epoch_end` or a callback changes.
    """
    if not tf_data.is_made_by_python(dataset):
        return map_elements(dataset, function).prefetch(tf.data.AUTOTUNE)
    mapped, stage = tf_data.one_argument(function, dataset), tf_data.last_stage(dataset)
    if stage.input is not None and stage.kind == "prefetch":
        dataset = stage.input.map(mapped).prefetch(tf.data.AUTOTUNE)
    else:
        dataset = dataset.map(mapped)
    return dataset.with_options(without_prefetch())


def without_prefetch() -> tf.data.Options:
    """Keeps tf.data from prefetching by itself: a rank that starts one more collective than the others hangs."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def row_count(batch: Any) -> Any:
    """Returns the length of the first tensor of a batch, an int32 scalar."""
    counts = (rows for rows in map(_rows, tf.nest.flatten(batch)) if rows is not None)
    return next(counts, tf.constant(1, tf.int32))


def _rows(leaf: Any) -> Any:
    """Returns the length of a tensor, an int32 scalar; `None` for a scalar and anything but a tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    if not tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional) or leaf.shape.rank == 0:
        return None
    static = leaf.shape[0] if leaf.shape.rank else None
    return tf.shape(leaf)[0] if static is None else tf.constant(static, tf.int32)


def _map_rows(function: Callable[[Any, Any], Any], batch: Any) -> Any:
    """Maps the tensors of a batch that have rows. The function also takes how many."""
    return tf.nest.map_structure(
        lambda leaf: leaf if (rows := _rows(leaf)) is None else function(leaf, rows), batch
    )


def lengths_of(batch: Any) -> list[Any]:
    """Returns the lengths of all tensors of a batch: ints, or integer tensors where they are not known yet."""
    lengths = [rows for rows in map(_rows, tf.nest.flatten(batch)) if rows is not None]
    known = [tf.get_static_value(rows) for rows in lengths]
    return [rows if static is None else int(static) for rows, static in zip(lengths, known, strict=True)]


def static_length(share: Any) -> int | None:
    """Returns the number of rows of a share, `None` if it is known only when the step runs."""
    lengths = [leaf.shape[0] for leaf in tf.nest.flatten(share) if tf.is_tensor(leaf) and leaf.shape.rank]
    return lengths[0] if lengths else None


def all_equal(lengths: Sequence[Any]) -> Any:
    """Returns whether all lengths are equal: a bool, or a tensor if it is only known when the step runs."""
    static = {length for length in lengths if isinstance(length, int)}
    tensors = [length for length in lengths if not isinstance(length, int)]
    if len(static) > 1:
        return False
    if len(tensors) + len(static) < 2:
        return True
    return tf.reduce_all(tf.equal(tf.stack(tensors), lengths[0] if not static else static.pop()))


def _take_rows(leaf: Any, start: Any, stop: Any, size: int | None) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        rest = leaf.dense_shape[1:]
        begin, lengths = tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0)
        return tf.sparse.slice(leaf, begin, lengths)
    rows = leaf[start:stop]
    if not isinstance(leaf, tf.RaggedTensor) and leaf.shape.rank is not None:
        # The length of a share, if known: it avoids retracing, and some operations need static shapes.
        total = leaf.shape[0]
        rows.set_shape([None if not total or size is None or total % size else total // size, *leaf.shape[1:]])
    return rows


def examples_of(share: Share) -> Any:
    """Returns the examples of a share, none if it is empty, so that metrics of a custom training loop count none."""
    if not may_be_empty(share):
        return share.data

    def counted(leaf: Any, rows: Any) -> Any:
        is_sparse = isinstance(leaf, tf.SparseTensor)
        return leaf if is_sparse else _take_rows(leaf, 0, tf.where(share.count > 0, rows, 0), None)

    return _map_rows(counted, share.data)


def any_batch_size(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return spec
