"""A function that workers run. What the coordinator fetches of its results is one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.batches import type_of
from keras_dist.backends.parameter_server.cluster import is_on_server


class RemoteFunction:
    """A traced function. Its results are sent as one tensor: to fetch a tensor from a worker takes calls of its own.

    Results whose shape is not known (predictions) are fetched one by one. What the function has put on a server
    (gradients) stays there.

    Args:
        function: Its first argument is a batch.
        spec: What it is traced for: the specification of the batch.
        types: Those of its other arguments.
    """

    def __init__(self, function: Callable[..., Any], spec: Any, types: Sequence[Any]) -> None:
        self._function = function
        self._specs: Any = None  # of the results
        self._packs: list[bool] = []  # for each of their tensors whether it is sent with others
        self._traced = tf.function(self._run, autograph=False).get_concrete_function(spec, *types)

    def __call__(self, *args: Any) -> Any:
        """Returns the results as they are sent."""
        return self._traced(*args)

    def results(self, sent: Any) -> Any:
        """Returns the results of a call.

        Args:
            sent: What the call returned.
        """
        strings, others = sent
        packed, apart = iter(tf.unstack(strings)), iter(others)
        specs = zip(tf.nest.flatten(self._specs, expand_composites=True), self._packs, strict=True)
        leaves = [tf.io.parse_tensor(next(packed), spec.dtype) if packs else next(apart) for spec, packs in specs]
        return tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)

    def _run(self, data: Any, *args: Any) -> tuple[Any, list[Any]]:
        # With a seed in the graph, `tf.random.*` would draw the same numbers on every worker.
        tf.compat.v1.get_default_graph().seed = None
        results = self._function(data, *args)
        leaves = tf.nest.flatten(results, expand_composites=True)
        self._specs = tf.nest.map_structure(type_of, results)
        self._packs = [_is_packed(leaf) for leaf in leaves]
        pairs = [*zip(leaves, self._packs, strict=True)]
        packed = [tf.io.serialize_tensor(leaf) for leaf, packs in pairs if packs]
        return tf.stack(packed) if packed else tf.zeros([0], tf.string), [leaf for leaf, packs in pairs if not packs]


def _is_packed(leaf: Any) -> bool:
    """True for a result that is sent together with others."""
    return leaf is not None and leaf.shape.is_fully_defined() and not is_on_server(leaf)
