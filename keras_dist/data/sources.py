"""The sources of a rank's data: a stream that all ranks read, the chief, or the rank's own shard.

With `batch="per_replica"` a global batch is made of as many batches of the script as there are ranks. An epoch has the
same examples as in one process, each once. If the number of its batches is not a multiple of the number of ranks, the
last step has fewer batches, and some ranks have an empty share.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import tf_data
from keras_dist.data.pipeline import fingerprint_of, map_elements, map_in_order, with_fingerprints
from keras_dist.data.shares import (
    Share,
    Shares,
    any_batch_size,
    cut_again,
    map_batches,
    row_count,
    shard_dataset,
    take_shares,
    without_prefetch,
)
from keras_dist.errors import ConfigurationError

_CHARACTERS = [bytes([byte]) for byte in range(256)]


def pack(tensors: Sequence[Any]) -> Any:
    """Returns tensors as one uint8 tensor of shape `(n,)`: their shapes as int64, then their contents."""
    shapes = [tf.shape(tensor, out_type=tf.int64) for tensor in tensors]
    parts = [to_bytes(part) for pair in zip(shapes, tensors, strict=True) for part in pair]
    return tf.concat(parts, 0)


def unpack(payload: Any, specs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Returns the tensors that `pack` converted. Their specifications have known ranks."""
    tensors = []
    for spec in specs:
        shape, payload = from_bytes(payload, tf.constant([spec.shape.rank], tf.int64), tf.int64)
        tensor, payload = from_bytes(payload, shape, spec.dtype)
        tensor.set_shape(spec.shape)
        tensors.append(tensor)
    return tensors


def characters_of(strings: Any) -> tuple[Any, Any]:
    """Returns the lengths of strings, int64, and their bytes, uint8, both of rank 1."""
    lengths = tf.cast(tf.strings.length(strings), tf.int64)
    return lengths, tf.io.decode_raw(tf.strings.reduce_join(strings), tf.uint8)


def strings_of(lengths: Any, characters: Any) -> Any:
    """Returns the strings with these lengths and bytes, the inverse of `characters_of`."""
    by_string = tf.RaggedTensor.from_row_lengths(tf.gather(_CHARACTERS, tf.cast(characters, tf.int32)), lengths)
    return tf.strings.reduce_join(by_string, axis=-1)


def to_bytes(tensor: Any) -> Any:
    """Returns the bits of a tensor as a uint8 tensor of one axis, without its shape."""
    flat = tf.reshape(tensor, [-1])
    if flat.dtype == tf.string:
        lengths, characters = characters_of(flat)
        return tf.concat([to_bytes(lengths), characters], 0)
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def from_bytes(payload: Any, shape: Any, dtype: tf.DType) -> tuple[Any, Any]:
    count = tf.reduce_prod(shape)
    if dtype == tf.string:
        lengths, payload = from_bytes(payload, count[None], tf.int64)
        length = tf.reduce_sum(lengths)
        return tf.reshape(strings_of(lengths, payload[:length]), shape), payload[length:]
    length = count * dtype.size
    content = payload[:length]
    if dtype == tf.bool:
        values = tf.cast(content, tf.bool)
    elif dtype.size == 1:
        values = tf.bitcast(content, dtype)
    else:
        values = tf.bitcast(tf.reshape(content, [-1, dtype.size]), dtype)
    return tf.reshape(values, shape), payload[length:]


# The collectives of each dataset have unique names: training data may be prefetched while validation runs.
_numbers = itertools.count()


def split(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Every rank reads the same stream and keeps its share of each batch."""

    def agrees(digest: str | None) -> bool:
        if not tf.executing_eagerly():
            return False
        digests = backend.all_gather_object("the functions of the dataset", digest)
        return all(other == digests[0] for other in digests)

    shares = shard_dataset(dataset, backend.topology.rank, backend.topology.size, agrees)
    return shares.map(lambda share: cut_again(share, backend.replicas))


def from_chief(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """The chief reads, cuts and scatters. The other ranks receive their shares and never open their own stream."""

    def packed(batch: Any) -> tuple[Any, Any]:
        return pack_shares(take_shares(batch, backend.num_replicas).parts, backend)

    return receive_from_chief(map_batches(dataset, packed), batch_spec(dataset), backend)


def of_rank(shares: Sequence[Share], rank: int, backend: Backend) -> Shares:
    """Returns the shares of one rank from those of all replicas."""
    return Shares(tuple(shares[rank * backend.replicas : (rank + 1) * backend.replicas]))


def receive_from_chief(packed: tf.data.Dataset, spec: Any, backend: Backend) -> tf.data.Dataset:
    """Returns a dataset of this rank's shares, which the chief scatters.

    `packed` has the result of `pack_shares` for each step, and `spec` is the specification of a share's data. They are
    sent as bytes, so batches may have any structure, dtype and shape. Nothing is prefetched after the scatter, so at
    any step all ranks have taken part in the same collectives.
    """
    name = f"keras_dist_batch_{next(_numbers)}"
    scalars = (tf.TensorSpec([], dtype) for dtype in (tf.int32, tf.int32, tf.float32, tf.bool))
    share_spec = Shares((Share(spec, *scalars),) * backend.replicas)
    empty = tf.data.Dataset.from_tensors((tf.zeros([0], tf.uint8), tf.zeros([backend.topology.size], tf.int32)))
    sent = packed.concatenate(empty) if backend.topology.is_chief else empty.repeat()
    parts = sent.map(lambda payload, lengths: backend.scatter(payload, lengths, name))
    # No bytes mean that the chief's stream has ended.
    parts = parts.take_while(lambda payload: tf.size(payload) > 0)
    shares = parts.map(lambda payload: unflatten(share_spec, unpack(payload, flatten(share_spec))))
    return tf_data.untuned(shares.with_options(without_prefetch()))


def sharded(dataset: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    """Each rank reads its own shard. After its end the rank has empty shares until all ranks have ended."""
    name = f"keras_dist_count_{next(_numbers)}"

    def share(whole: Any) -> Share:
        count = row_count(whole)
        return Share(whole, count, count, tf.constant(0.0))

    def with_total(share: Share) -> Share:
        total = backend.all_reduce_exact(tf.cast(share.count, tf.float64), name)
        return share._replace(total=tf.cast(total, tf.int32))

    shares = map_elements(dataset, share).prefetch(tf.data.AUTOTUNE)
    shares = shares.concatenate(tf.data.Dataset.from_tensors(empty_share(batch_spec(dataset))).repeat())
    options = without_prefetch()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    shares = shares.map(with_total).take_while(lambda share: share.total > 0).with_options(options)
    return shares.map(lambda share: cut_again(share, backend.replicas))


def is_sharded(dataset: tf.data.Dataset) -> bool:
    """True if the dataset is marked as a rank's own shard, by `AutoShardPolicy.OFF`."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


MODES: dict[str, Callable[[tf.data.Dataset, Backend], tf.data.Dataset]] = {
    "split": split, "chief": from_chief, "sharded": sharded,
}  # fmt: skip


def shares_of_rank(dataset: tf.data.Dataset, mode: str, backend: Backend) -> tf.data.Dataset:
    """Turns a dataset of batches into one of this rank's `Shares`.

    `mode` is a key of `MODES`. If there is one rank, it has the whole batch in any mode.
    """
    if backend.topology.size == 1:
        return tf_data.untuned(map_batches(dataset, lambda batch: take_shares(batch, backend.replicas)))
    return tf_data.untuned(MODES[mode](dataset, backend))


def check_source(source: Any) -> None:
    if not isinstance(source, tf.data.Dataset) and not callable(source):
        raise ConfigurationError(
            "kd.shard() takes a tf.data.Dataset or a function that returns one.",
            f"{type(source).__name__}",
            "Convert it to a dataset: tf.data.Dataset.from_tensor_slices((x, y)).batch(32).",
        )


def batch_spec(dataset: tf.data.Dataset) -> Any:
    return tf.nest.map_structure(any_batch_size, dataset.element_spec)


# --- Shares as tensors and as bytes ---


def flatten(structure: Any) -> list[Any]:
    """Returns the plain tensors of a structure, or the specifications of a structure of these."""
    return list(tf.nest.flatten([leaf for leaf in tf.nest.flatten(structure) if not _is_none(leaf)], True))


def unflatten(spec: Any, tensors: Any) -> Any:
    """Returns the structure with these tensors, the inverse of `flatten`."""
    parts = tf.nest.flatten(spec)
    leaves = iter(tf.nest.pack_sequence_as([part for part in parts if not _is_none(part)], tensors, True))
    return tf.nest.pack_sequence_as(spec, [_nothing() if _is_none(part) else next(leaves) for part in parts])


def pack_shares(shares: Sequence[Share], backend: Backend) -> tuple[Any, Any]:
    """Returns the shares of all replicas as concatenated bytes, and the length of each rank's part."""
    payloads = [pack(flatten(of_rank(shares, rank, backend))) for rank in range(backend.topology.size)]
    return tf.concat(payloads, 0), tf.stack([tf.size(payload) for payload in payloads])


def _is_none(leaf: Any) -> bool:
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def _nothing() -> Any:
    """Returns what Keras makes of a generator's `None`."""
    return tf.experimental.Optional.empty(None)


def empty_share(spec: Any) -> Share:
    """Returns an empty share, with one example as a placeholder: no layer ever sees an empty batch."""

    def example(part: Any) -> Any:
        if isinstance(part, tf.OptionalSpec):
            return _nothing()
        shape = [1 if length is None else length for length in getattr(part, "shape", ())]
        if isinstance(part, tf.TensorSpec):
            return tf.zeros(shape, part.dtype)
        if isinstance(part, tf.RaggedTensorSpec):
            values, splits = tf.zeros([0, *shape[2:]], part.dtype), tf.constant([0, 0], part.row_splits_dtype)
            return tf.RaggedTensor.from_row_splits(values, splits)
        if isinstance(part, tf.SparseTensorSpec):
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], part.dtype), shape)
        return part

    zero = tf.constant(0)
    return Share(tf.nest.map_structure(example, spec), zero, zero, tf.constant(0.0))


def number_of_steps(batches: int, size: int, batches_per_epoch: int | None = None) -> int:
    """Returns the number of steps for a number of batches. A step has batches of one epoch only.

    Example:

    >>> number_of_steps(10, 4), number_of_steps(10, 4, batches_per_epoch=5)
    (3, 4)
    """
    epochs, rest = divmod(batches, batches_per_epoch) if batches_per_epoch else (0, batches)
    return epochs * -(-(batches_per_epoch or 0) // size) + -(-rest // size)


def group_batches(
    dataset: tf.data.Dataset, mode: str, backend: Backend, batches_per_epoch: int | None
) -> tf.data.Dataset:
    """Turns a dataset of the script's batches into a dataset of this rank's shares.

    `mode` is `"split"` or `"chief"`, see `MODES`. After `batches_per_epoch` batches a step ends, complete or not;
    `None`: only after the last one.
    """
    grouped = functools.partial(_groups, dataset, backend.num_replicas, batches_per_epoch)
    if mode == "split" or backend.topology.size == 1:
        return grouped(lambda shares: of_rank(shares, backend.topology.rank, backend))
    return receive_from_chief(grouped(lambda shares: pack_shares(shares, backend)), batch_spec(dataset), backend)


def _groups(
    dataset: tf.data.Dataset, size: int, batches_per_epoch: int | None, function: Callable[[list[Share]], Any]
) -> tf.data.Dataset:
    """Returns the results of a function of the shares of each step, one for each rank. The batches are not copied.

    In an incomplete step the first batches are from the step before, and are not counted.
    """
    spec, length = batch_spec(dataset), batches_per_epoch or tf.int64.max
    empty = tuple(flatten(empty_share(spec).data)), tf.constant(0), tf.constant(0.0)

    def described(whole: Any, fingerprint: Any) -> Any:
        return tuple(flatten(whole)), row_count(whole), fingerprint

    def add_batch(state: Any, batch: Any) -> Any:
        """Adds a batch to the last `size` batches. A step is complete when all of them are new, or the epoch ends."""
        position, batches, counts, fingerprints = state
        tensors, count, fingerprint = batch
        batches = (*batches[1:], tensors)
        counts = tf.concat([counts[1:], count[None]], 0)
        fingerprints = tf.concat([fingerprints[1:], fingerprint[None]], 0)
        new = tf.cast(position % length % size, tf.int32) + 1
        is_new = tf.range(size) >= size - new
        group = batches, tf.where(is_new, counts, 0), fingerprint_of(tf.where(is_new, fingerprints, 0.0))
        is_complete = (new == size) | (position % length == length - 1)
        return (position + 1, batches, counts, fingerprints), (is_complete & (tf.reduce_sum(group[1]) > 0), *group)

    def made(_: Any, batches: Any, counts: Any, fingerprint: Any) -> Any:
        data, total = [unflatten(spec, tensors) for tensors in batches], tf.reduce_sum(counts)
        return function([Share(part, counts[rank], total, fingerprint) for rank, part in enumerate(data)])

    if (pairs := with_fingerprints(dataset)) is None:
        batches = map_elements(dataset, lambda whole: described(whole, fingerprint_of(whole)))
    else:
        batches = map_in_order(pairs, described)
    # Empty batches complete the last step.
    batches = batches.concatenate(tf.data.Dataset.from_tensors(empty).repeat(size - 1))
    start = tf.constant(0, tf.int64), (empty[0],) * size, tf.zeros([size], tf.int32), tf.zeros([size])
    groups = batches.scan(start, add_batch).filter(lambda is_complete, *_: is_complete)
    return tf_data.untuned(map_in_order(groups, made).prefetch(tf.data.AUTOTUNE))


def explain_cache(error: BaseException) -> BaseException:
    """Returns the error for a file that several ranks want to cache data in, or `error` itself."""
    found = re.search(r"lockfile already exists \('(.*)_\d+\.lockfile'\)", str(error))
    if found is None or not isinstance(error, tf.errors.AlreadyExistsError):
        return error
    return ConfigurationError(
        "One process can write a cache in a file, but several ranks have the same file. Or a run that was killed has "
        "left its lock.",
        f"dataset.cache({found[1]!r})",
        f"Let each rank have a file of its own, dataset.cache(f\"{found[1]}-{{kd.rank()}}\"), or let the chief read: "
        "kd.distribute(model, data='chief'). If no other run uses the file, delete its lock.",
    )
