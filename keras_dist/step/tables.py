"""Gradients of tables (`tf.IndexedSlices`), whose rows the replicas put together.

Keras's Adam squares each row before rows of the same index are added, and clipping by norm counts each row, so the
rows must be those of one process. A lookup of the batch's own ids gives rows for each example: the rows of all shares,
one after the other, are those of the batch. A lookup that does not depend on the share, such as that of positions in a
transformer, or of the ids of the whole batch, gives the same rows in every share: there the shares' rows are added.
So are the rows of an index that several shares look up, where the lookup itself has each index once.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_dist.compat import tf_graphs
from keras_dist.step.step import WHOLE

# What these return does not depend on the values in their input.
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_READS = frozenset({"ReadVariableOp"})
# Which output of an operation has each index once.
_UNIQUE = frozenset({
    ("Unique", 0), ("UniqueV2", 0),
    ("SparseSegmentSumGradV2", 1), ("SparseSegmentMeanGradV2", 1), ("SparseSegmentSqrtNGradV2", 1),
})  # fmt: skip


def add_rows(gradient: Any, shares: Any, lookup: Any) -> Any:
    """Adds the rows of all shares if the lookup does not depend on the share.

    Args:
        gradient: The rows of all shares, one share after the other, or a dense gradient.
        shares: Their number, an int or an integer scalar.
        lookup: The gradient of one share, as the step computed it.

    Returns:
        The rows of one process, or the dense gradient.
    """
    is_only = isinstance(shares, int) and shares == 1
    if is_only or not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if _is_unique(lookup.indices):
        return _with_unique_rows(gradient)
    if _depends_on_share(lookup.indices):
        return gradient
    indices, count = gradient.indices, tf.size(gradient.indices)
    length = count // shares
    first = tf.gather(indices, tf.range(count) % tf.maximum(length, 1))
    are_same = tf.logical_and(length * shares == count, tf.reduce_all(indices == first))
    rows = None if tf.executing_eagerly() else indices.shape[0]
    if rows is not None:  # on a TPU: one program for all cores, and all shapes are fixed
        parts: Any = shares if rows % shares == 0 else 1
    else:
        parts = tf.where(are_same, shares, 1)
    values = tf.reshape(gradient.values, tf.concat([[parts, -1], tf.shape(gradient.values)[1:]], 0))
    values = tf.ensure_shape(tf.reduce_sum(values, 0), [None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, tf.reshape(indices, [parts, -1])[0], gradient.dense_shape)


def _is_unique(tensor: Any) -> bool:
    """True if a lookup has each index once, as in `tf.nn.embedding_lookup_sparse`: so have layers of sparse inputs."""
    arguments: dict[int, Any] = {}  # of functions that XLA compiles
    while hasattr(tensor, "graph"):
        if (inside := tf_graphs.inside_call(tensor)) is not None:
            tensor, pairs = inside
            arguments.update({id(placeholder): argument for placeholder, argument in pairs})
        elif id(tensor) in arguments:
            tensor = arguments[id(tensor)]
        elif tensor.op.type in ("Identity", "Reshape", "Cast"):
            tensor = tensor.op.inputs[0]
        else:
            break
    return hasattr(tensor, "graph") and (tensor.op.type, tensor.value_index) in _UNIQUE


def _with_unique_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _is_whole(operation: Any) -> bool:
    """True for what `gather` returns, which is the same on all replicas."""
    return operation.type == "Identity" and WHOLE in operation.name


def _depends_on_share(tensor: Any) -> bool:
    """True if a traced tensor is computed from more than constants, variables and shapes.

    An eager tensor does not tell where it is from: there the same ids in every share count as a lookup of positions.
    """
    found, waiting = set[int](), [tensor]
    arguments: dict[int, list[Any]] = {}  # of functions that XLA compiles
    while waiting:
        tensor = waiting.pop()
        is_eager = not hasattr(tensor, "graph")
        if is_eager or tensor.dtype == tf.resource or id(tensor) in found:
            continue
        found.add(id(tensor))
        operation = tensor.op
        if (inside := tf_graphs.inside_call(tensor)) is not None:
            output, pairs = inside
            waiting.append(output)
            for placeholder, argument in pairs:
                arguments.setdefault(id(placeholder), []).append(argument)
                if id(placeholder) in found:
                    waiting.append(argument)
        elif id(tensor) in arguments:
            waiting += arguments[id(tensor)]
        elif operation.type == "Placeholder":
            outer = [external for external, internal in operation.graph.captures if internal is tensor]
            if not outer:
                return True
            waiting += outer
        elif operation.type not in _SHAPES and not _is_whole(operation):
            if operation.op_def.is_stateful and operation.type not in _READS:
                return True  # the next batch of an iterator, random numbers
            waiting += operation.inputs
    return False
