"""Lets a rank map only the examples of its own share, if the pipeline allows it.

Each rank cuts its share from each global batch, so every rank would do everything before `batch` for every example:
decoding and augmenting would not get faster with more ranks. If the last stages are

    elements.map(f).batch(n)

and `f` is stateless, the elements are batched and cut first, and `f` maps only the share. The result is the same. If
`f` draws random numbers without a seed, the result is as random as in one process. Of arrays, the indices are cut, and
each rank gathers the rows of its share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_data, tf_graphs
from keras_dist.data.fingerprint import fingerprint_of

Function = Callable[[Any], Any]
_SAMPLED_NUMBERS = 2**22  # of an array, of which each batch would have 4096


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a dataset of batches: `elements.map(...).batch(...)`, and those after it.

    Args:
        elements: The input of the first map.
        maps: The maps, first to last.
        batch: Batches a dataset of elements, with the user's arguments.
        after: The stages after `batch`, first to last.
        options: The options of the whole dataset.
        digest: A text that is the same for the same maps.
    """

    elements: tf.data.Dataset
    maps: Sequence[Function]
    batch: Function
    after: Sequence[Function]
    options: tf.data.Options
    digest: str

    def global_batches(self) -> tf.data.Dataset:
        """Returns the global batches of elements that are not mapped yet."""
        return self.batch(self.elements)

    def finished(self, shares: tf.data.Dataset) -> tf.data.Dataset:
        """Returns finished shares. Two are mapped at a time.

        Args:
            shares: Dataset of the shares of the global batches, each a named tuple with the field `data`.
        """

        @tf.autograph.experimental.do_not_convert
        def mapped(share: Any) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def with_examples(*batch: Any) -> Any:
                return share._replace(data=batch if type(examples.element_spec) is tuple else batch[0])

            examples = self.mapped(share.data)
            return examples.map(with_examples)

        shares = shares.interleave(mapped, cycle_length=2, block_length=1, num_parallel_calls=2, deterministic=True)
        for stage in self.after:
            shares = stage(shares)
        return shares.with_options(self.options)

    def mapped(self, rows: Any) -> tf.data.Dataset:
        """Returns a dataset with one element, the batch of these rows after the maps."""
        dataset = tf.data.Dataset.from_tensor_slices(rows)
        for function in self.maps:
            dataset = dataset.map(tf_data.one_argument(function, dataset), tf.data.AUTOTUNE, deterministic=True)
        first = tf.nest.flatten(rows)[0]
        known = first.shape[0]
        return dataset.batch(known or tf.shape(first, tf.int64)[0], drop_remainder=known is not None)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Batches that Keras gathers from arrays.

    Args:
        source: How it gathers them.
        options: The options of the whole dataset.
        digest: A text that is the same for the same arrays.
    """

    source: tf_data.Gather
    options: tf.data.Options
    digest: str

    def global_batches(self) -> tf.data.Dataset:
        """Returns the indices of the global batches."""
        return self.source.indices

    def finished(self, shares: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the shares with their rows of the arrays. See `Pipeline.finished`."""

        @tf.autograph.experimental.do_not_convert
        def gathered(share: Any, arrays: Any) -> Any:
            rows = [tf.gather(array, share.data) for array in tf.nest.flatten(arrays)]
            return share._replace(data=tf.nest.pack_sequence_as(self.source.element_spec, rows))

        pairs = tf.data.Dataset.zip((shares, self.source.arrays))
        return pairs.map(gathered, tf.data.AUTOTUNE, deterministic=True).with_options(self.options)


def decompose(dataset: tf.data.Dataset) -> Pipeline | Arrays | None:
    """Returns the stages of a dataset of batches, `None` if nothing of it can run after the cut."""
    after: list[Function] = []
    current = dataset
    while (stage := tf_data.last_stage(current)).kind in ("prefetch", "options", "repeat"):
        if stage.kind == "repeat":
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
        if stage.kind == "map":
            if not (tf_data.is_stateless(current) or tf_data.is_unseeded(current)):
                break
            maps.insert(0, tf_data.map_function(current))
            digests.append(tf_graphs.map_digest(current))
            if _can_be_batched(stage.input):
                best = stage.input, list(maps)
        current = stage.input
    if best is None or not _is_plain(batched):
        return None
    elements, maps = best
    return Pipeline(elements, maps, batch, after, dataset.options(), " ".join(digests))


def _arrays(dataset: tf.data.Dataset, options: tf.data.Options) -> Arrays | None:
    gather = tf_data.gather_of(dataset)
    if gather is None or not tf.executing_eagerly() or not _is_plain(dataset):
        return None
    rows = max((tensor.shape[0] for tensor in gather.tensors), default=0)
    fingerprint = fingerprint_of(gather.tensors, max(_SAMPLED_NUMBERS, 2 * rows))
    shapes = [(tensor.dtype.name, *tensor.shape) for tensor in gather.tensors]
    return Arrays(gather, options, f"arrays {shapes} {int(fingerprint)}")


def _can_be_batched(dataset: tf.data.Dataset) -> bool:
    """True if the elements are tensors of known shapes."""
    return _is_plain(dataset) and all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))


def _is_plain(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return bool(specs) and all(isinstance(s, tf.TensorSpec) and s.dtype not in (tf.variant, tf.resource) for s in specs)
