"""The stages of a dataset: maps only a rank's share, compares what ranks read, finds the place of a resumed run.

As each rank cuts its share from the global batch, decoding and augmenting would not get faster with more ranks. So if
the last stages are `elements.map(f).batch(n)`, and `f` is stateless or draws random numbers without a seed, the
elements are batched and cut first, and `f` maps only the share. For arrays, the indices are cut, and each rank gathers
its rows.

A hash of each global batch shows whether ranks read different data. `map(augment, num_parallel_calls=...)` draws its
random numbers in another order in each process, so elements are hashed before such a map.

TensorFlow cannot save iterators with Python functions or random maps (tensorflow/tensorflow#59398). So a resumed run
makes its data again, begins as many iterations as before, since each draws another order, and skips the batches that
were read.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_compat, tf_data
from keras_dist.logging import logger

# A fingerprint travels as float32, which holds integers below 2**24 exactly.
FINGERPRINT_BITS = 24
# So many numbers are hashed in each of two places of an example, if it has more. They lie side by side: what takes time
# is to fetch them from memory, and numbers from all over an example take as long as the whole example.
_SIDE_BY_SIDE = 16


def fingerprint_of(batch: Any, numbers: int = _SIDE_BY_SIDE) -> Any:
    """Returns a hash of the values of a batch and their order: float32 scalar, an integer in `[0, 2**24)`.

    Of rows of more than `2 * numbers`, all of the first one is hashed, and of each so many at the start and in the
    middle.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(leaf)]
    leaves = [leaf for leaf in leaves if leaf.dtype not in (tf.variant, tf.resource)]
    return (_fingerprint if tf.executing_eagerly() else _traced_fingerprint)(leaves, numbers)


def _fingerprint(tensors: list[Any], numbers: int) -> Any:
    parts = [part for tensor in tensors for part in _looked_at(tensor, numbers)]
    hashes = [tf.fingerprint(tf.reshape(part, [1, -1])) for part in parts]
    together = tf.fingerprint(tf.concat([tf.zeros([1, 0], tf.uint8), *hashes], 1))
    number = tf.bitwise.bitwise_and(tf.bitcast(together, tf.int64), 2**FINGERPRINT_BITS - 1)
    return tf.cast(tf.reshape(number, []), tf.float32)


# Once for each kind of batch: in the functions of a dataset it would be traced each time.
_traced_fingerprint = tf_compat.often_traced(_fingerprint, keeps_shapes=True)


def fold(variable: tf.Variable, fingerprint: Any) -> None:
    folded = variable * 31 + tf.cast(fingerprint, tf.int64)
    variable.assign(tf.bitwise.bitwise_and(folded, 2**FINGERPRINT_BITS - 1))


def _looked_at(tensor: Any, numbers: int) -> list[Any]:
    if tensor.dtype == tf.string:  # `tf.fingerprint` of no strings is any number
        tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31 - 1)
    width = tensor.shape[1:].num_elements() if tensor.shape.rank else 1
    if width is not None and width <= 2 * numbers:
        return [tensor]
    if width is None:
        width = tf.size(tensor) // tf.maximum(tf.shape(tensor)[0], 1)
        rows = tf.reshape(tensor, [tf.shape(tensor)[0], width])
    else:
        rows = tensor if tensor.shape.rank == 2 else tf.reshape(tensor, [-1, width])
    middle = width // 2
    return [rows[:1], rows[:, :numbers], rows[:, middle : middle + numbers]]


def with_fingerprints(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Returns a dataset of pairs: a batch, and a fingerprint of what it was made of, which is the same on all ranks.

    Returns `None` if the batches themselves are the same on all ranks. Where the stages before the maps can't be
    compared, all fingerprints are equal.
    """
    if not tf_data.may_differ(dataset):
        return None
    if (pairs := _pairs(dataset)) is not None:
        return pairs
    logger().debug("input: the ranks don't compare their data, which random maps change before a stage of another kind")
    return map_elements(dataset, lambda element: (element, tf.constant(0.0)))


def _pairs(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    stage = tf_data.last_stage(dataset)
    if stage.input is None:
        return None
    if tf_data.may_differ(stage.input):
        before = _pairs(stage.input)
    else:
        before = map_elements(stage.input, lambda element: (element, fingerprint_of(element)))
    if before is None:
        return None
    if stage.kind == "batch":
        return stage.again(before).map(lambda batch, fingerprints: (batch, fingerprint_of(fingerprints)))
    if stage.kind != "map":
        return stage.again(before)
    function = tf_data.map_function(dataset)

    def mapped(element: Any, fingerprint: Any) -> Any:
        return function(element), fingerprint

    # Several at a time, in order: the order must not stay open.
    return map_in_order(before, mapped) if tf_data.is_parallel(dataset) else before.map(mapped)


def map_in_order(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Maps several elements at a time by a function of this library, and keeps their order."""
    return dataset.map(function, tf.data.AUTOTUNE, deterministic=True)


def map_elements(dataset: tf.data.Dataset, function: Callable[[Any], Any]) -> tf.data.Dataset:
    """Does the same with a function of one element, which may be a tuple."""
    return map_in_order(dataset, tf_data.one_argument(function, dataset))


def seeds_of_order(dataset: tf.data.Dataset, drawn: int | None) -> list[tuple[int, int]] | None:
    """Returns the seeds that decide the order of a dataset, `None` if it can't be made again: one has no seed.

    `drawn` is the global seed, if another run has another one.
    """
    # Then only values have no seed, and the script wants other ones in each run.
    orders, values = ([(0, 0) if seed[0] == drawn else seed for seed in of] for of in tf_data.seeds_of(dataset))
    return None if (0, 0) in orders else orders + values


def with_seed(dataset: tf.data.Dataset, seed: int, drawn: int | None) -> tf.data.Dataset:
    """Gives a seed to each shuffle that has none of its own; `drawn` as in `seeds_of_order`.

    Returns the given dataset if all have seeds, or stages that can't be made again follow.
    """
    return _with_seed(dataset, itertools.count(seed), drawn) or dataset


def _with_seed(dataset: tf.data.Dataset, seeds: Iterator[int], drawn: int | None) -> tf.data.Dataset | None:
    if seeds_of_order(dataset, drawn) is not None:
        return dataset
    stage = tf_data.last_stage(dataset)
    if stage.input is None or (before := _with_seed(stage.input, seeds, drawn)) is None:
        return None
    if stage.kind != "shuffle":
        return stage.again(before)
    # Without a new order each time, all datasets that are made of this one share an order: a split relies on it.
    return before.shuffle(stage.arguments["buffer_size"], next(seeds)) if tf_data.reshuffles(dataset) else None


def advance(dataset: tf.data.Dataset, iterations: int) -> None:
    """Begins iterations over a dataset, so that the next one has the same order as in the previous run.

    They are read only if a later stage of the dataset draws its order when the stage before it has ended.
    """
    if not tf_data.redraws(dataset):
        return
    reads = not tf_data.draws_at_once(dataset)
    for _ in range(iterations):
        iterator = iter(dataset)
        if reads:
            collections.deque(iterator, maxlen=0)


def after(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    """Returns a dataset without its first batches, to which stateless maps are not applied."""
    stage = tf_data.last_stage(dataset)
    if stage.kind == "batch":
        return stage.again(after(stage.input, batches * stage.arguments["batch_size"]))
    if stage.kind in ("prefetch", "options") or (stage.kind == "map" and tf_data.is_stateless(dataset)):
        return stage.again(after(stage.input, batches))
    return dataset.skip(batches)


def first(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    """Returns the first batches of an endless dataset whose order changes; any other dataset as it is.

    Its stages do not read further ahead. They would begin to shuffle again, on some ranks, and the next iteration over
    the dataset would have another order than in one process.
    """
    is_endless = tf.get_static_value(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    return _first(dataset, batches) if is_endless and tf_data.redraws(dataset) else dataset


def _first(dataset: tf.data.Dataset, number: Any) -> tf.data.Dataset:
    stage = tf_data.last_stage(dataset)
    if stage.kind in ("prefetch", "options", "map", "batch"):
        return stage.again(_first(stage.input, number * stage.arguments.get("batch_size", 1)))
    return dataset.take(number)


Function = Callable[[Any], Any]
_NUMBERS_OF_ALL = 2**22  # that are hashed of an array, or more if it has more examples


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a dataset of batches: `elements.map(...).batch(...)`, and the ones after it."""

    batches: tf.data.Dataset  # the global ones, of elements that are not mapped yet
    maps: Sequence[Function]
    after: Sequence[Function]  # the stages after `batch`, first to last
    options: tf.data.Options
    digest: str  # the same for the same maps

    def finished(self, shares: tf.data.Dataset) -> tf.data.Dataset:
        """Maps the shares of the global batches, named tuples with the field `data`, two at a time."""

        def mapped(share: Any) -> tf.data.Dataset:
            examples = tf.data.Dataset.from_tensor_slices(share.data)
            for function in self.maps:
                examples = map_elements(examples, function)
            first = tf.nest.flatten(share.data)[0]
            known = first.shape[0]
            examples = examples.batch(known or tf.shape(first, tf.int64)[0], drop_remainder=known is not None)
            return examples.map(tf_data.one_argument(lambda batch: share._replace(data=batch), examples))

        shares = shares.interleave(mapped, cycle_length=2, block_length=1, num_parallel_calls=2, deterministic=True)
        for stage in self.after:
            shares = stage(shares)
        return shares.with_options(self.options)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Batches that Keras gathers from arrays."""

    batches: tf.data.Dataset  # the indices of the global ones
    arrays: tf.data.Dataset  # all of them, each time
    element_spec: Any
    options: tf.data.Options
    digest: str  # the same for the same arrays

    def finished(self, shares: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the shares with their rows of the arrays."""

        def gathered(share: Any, arrays: Any) -> Any:
            rows = [tf.gather(array, share.data) for array in tf.nest.flatten(arrays)]
            return share._replace(data=tf.nest.pack_sequence_as(self.element_spec, rows))

        return map_in_order(tf.data.Dataset.zip((shares, self.arrays)), gathered).with_options(self.options)


def decompose(dataset: tf.data.Dataset) -> Pipeline | Arrays | None:
    """Returns the stages of a dataset of batches, `None` if nothing of it can run after the cut."""
    after: list[Function] = []
    current = dataset
    while (stage := tf_data.last_stage(current)).kind in ("prefetch", "options", "repeat", "take"):
        if stage.kind in ("repeat", "take"):
            after.insert(0, stage.again)
        current = stage.input
    if stage.kind == "map" and not after:
        return _arrays(current, dataset.options())
    if stage.kind != "batch":
        return None
    batch, batched, current = stage.again, current, stage.input
    maps: list[Function] = []
    digests: list[str] = []
    best: tuple[tf.data.Dataset, list[Function]] | None = None
    while (stage := tf_data.last_stage(current)).kind in ("prefetch", "options", "map"):
        before: Any = stage.input
        if stage.kind == "map":
            if not (tf_data.is_stateless(current) or tf_data.is_unseeded(current)):
                break
            maps.insert(0, tf_data.map_function(current))
            digests.append(tf_data.map_digest(current))
            specs = tf.nest.flatten(before.element_spec)
            if _is_plain(before) and all(spec.shape.is_fully_defined() for spec in specs):
                best = before, list(maps)
        current = before
    if best is None or not _is_plain(batched):
        return None
    elements, maps = best
    return Pipeline(batch(elements), maps, after, dataset.options(), " ".join(digests))


def _arrays(dataset: tf.data.Dataset, options: tf.data.Options) -> Arrays | None:
    gather = tf_data.gather_of(dataset)
    if gather is None or not tf.executing_eagerly() or not _is_plain(dataset):
        return None
    indices, arrays, tensors = gather
    rows = max((tensor.shape[0] for tensor in tensors), default=0)
    fingerprint = fingerprint_of(tensors, _NUMBERS_OF_ALL // (2 * max(rows, 1)) + _SIDE_BY_SIDE)
    shapes = [(tensor.dtype.name, *tensor.shape) for tensor in tensors]
    return Arrays(indices, arrays, dataset.element_spec, options, f"arrays {shapes} {int(fingerprint)}")


def _is_plain(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return bool(specs) and all(isinstance(s, tf.TensorSpec) and s.dtype not in (tf.variant, tf.resource) for s in specs)
