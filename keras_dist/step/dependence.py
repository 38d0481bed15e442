"""How a tensor depends on the examples of a batch: the one rule for losses, layers, metrics, assignments.

The graph of a function of the script proves whether a tensor has a row for each example, or is a mean or a sum over
the examples. Only then can the tensor of a batch be computed from the tensors of its shares. Without a proof it may be
anything (a root of a mean, a mean over unmasked entries, a comparison of examples), and is computed on the whole batch.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_dist.compat import tf_graphs
from keras_dist.compat.keras_losses import with_mask_of
from keras_dist.step import step as step_module

T = TypeVar("T")


class Arguments:
    """The arguments of a call. Tensors as long as the first one have a row for each example."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self.leaves = keras.tree.flatten(arguments)
        # Arguments that are not tensors, such as `training`.
        self.settings = tuple(leaf for leaf in self.leaves if isinstance(leaf, bool | int | float | str | None))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
        self.rows = [tensor for tensor in tensors if same_length(tensor, tensors[0])]

    def with_rows(self, rows: Sequence[Any]) -> Any:
        return self.with_leaves(zip(self.rows, rows, strict=True))

    def with_leaves(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        by_id = {id(own): other for own, other in pairs}
        return keras.tree.pack_sequence_as(self._arguments, [by_id.get(id(leaf), leaf) for leaf in self.leaves])


def same_length(first: Any, second: Any) -> bool:
    """True if two tensors have equally many rows, or both have an unknown number."""
    return bool(first.shape.rank and first.shape[0] == second.shape[0])


def traced(arguments: Arguments, inspect: Callable[[Sequence[Any]], T]) -> T:
    """Calls a function with rows for any number of examples, in a graph of its own, outside of any step.

    `inspect` takes the rows, in the order of `arguments.rows` and with their masks, and returns what it finds.
    """
    found: list[T] = []

    def function(*rows: Any) -> None:
        pairs = zip(rows, arguments.rows, strict=True)
        masked = [with_mask_of(row, own, functools.partial(_mask_like, row)) for row, own in pairs]
        with step_module.entered(None):
            found.append(inspect(masked))

    specs = [tf.TensorSpec([None, *rows.shape[1:]], rows.dtype) for rows in arguments.rows]
    tf.function(function, autograph=False).get_concrete_function(*specs)
    return found[-1]


def _mask_like(rows: Any, mask: Any) -> Any:
    """Returns a mask that depends on rows and has the rank of another mask."""
    parts = tf.not_equal(rows, tf.zeros_like(rows))
    while parts.shape.rank > mask.shape.rank:
        parts = tf.reduce_any(parts, -1)
    return parts


class Kind(enum.Enum):
    """How a tensor depends on the batch."""

    CONSTANT = "the same for all batches"
    ROWS = "each row depends on one example; all examples have equally many rows"
    MEAN = "a mean over the rows"
    SUM = "a sum over the rows"
    SHAPE = "a shape whose first size is proportional to the number of examples"
    COUNT = "proportional to the number of examples"
    OTHER = "anything else"


_LINEAR = frozenset({"Cast", "EnsureShape", "Identity", "IdentityN", "Neg", "PreventGradient", "StopGradient"})
# Of a sum or a mean, if all else is constant.
_LINEAR_WITH_CONSTANTS = frozenset({
    "Cumsum", "ExpandDims", "GatherV2", "MatMul", "Reshape", "ReverseV2", "Slice", "Squeeze", "StridedSlice", "Sum",
    "Mean", "Tile", "Transpose",
})  # fmt: skip
_UNARY = _LINEAR | frozenset({
    "Abs", "Atan", "Bitcast", "Bucketize", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Inv",
    "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Lgamma", "Log", "Log1p", "LogicalNot", "OnesLike", "Reciprocal",
    "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
    "Square", "StringLower", "StringToHashBucketFast", "StringToNumber", "Tan", "Tanh", "ZerosLike",
})  # fmt: skip
_ELEMENTWISE = frozenset({
    "Add", "AddN", "AddV2", "Atan2", "BiasAdd", "BitwiseAnd", "ClipByValue", "Div", "DivNoNan", "Equal", "FloorDiv",
    "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul",
    "MulNoNan", "NotEqual", "Pow", "RealDiv", "Select", "SelectV2", "SquaredDifference", "Sub", "Xdivy",
    "Xlog1py", "Xlogy",
})  # fmt: skip
_SCALINGS = frozenset({"Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"})
_TOTALS = frozenset({Kind.MEAN, Kind.SUM, Kind.SHAPE, Kind.COUNT})
# Of rows, with constants: filters, sizes, a table.
_BY_CONSTANTS = frozenset({
    "AvgPool", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "ResizeBilinear", "ResizeNearestNeighbor",
})  # fmt: skip


class Proof:
    """The kinds of the tensors of one graph, in which the examples are the first, unknown dimension.

    `rows` are tensors with a row for each example. The `kinds` of other tensors are known, by name.
    """

    def __init__(self, rows: Iterable[Any], kinds: Mapping[str, Kind] | None = None) -> None:
        self._given = {tensor.name: Kind.ROWS for tensor in rows} | dict(kinds or {})
        self._kinds = dict(self._given)

    def is_mean(self, tensor: Any) -> bool:
        """True if a tensor is proven to be a mean over the examples, or the same for all batches."""
        return self.kind(tensor) in (Kind.MEAN, Kind.CONSTANT)

    def is_constant(self, tensor: Any) -> bool:
        return self.kind(tensor) is Kind.CONSTANT

    def added(self, value: Any, old: Any) -> set[Kind] | None:
        """Returns the kinds of what a value adds to an old one, which is a tensor of the same graph.

        `None` if the value is not the old one with something added that does not depend on it.
        """
        of_old = Proof([], kinds=dict.fromkeys(self._given, Kind.CONSTANT) | {old.name: Kind.OTHER})
        waiting, kinds, olds = [value], set[Kind](), 0
        while waiting:
            tensor = waiting.pop()
            operation = tensor.op
            if tensor.name == old.name:
                olds += 1
            elif of_old.is_constant(tensor):
                kinds.add(self.kind(tensor))
            elif operation.type in ("Identity", "Add", "AddV2", "AddN"):
                waiting += operation.inputs
            else:
                return None
        return kinds if olds == 1 else None

    def kind(self, tensor: Any) -> Kind:
        waiting = [tensor]
        while waiting:  # not by recursion: graphs are deep
            current = waiting[-1]
            missing = [source for source in current.op.inputs if source.name not in self._kinds]
            if current.name in self._kinds:
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                self._kinds[current.name] = self._computed(current)
        return self._kinds[tensor.name]

    def _computed(self, tensor: Any) -> Kind:
        operation = tensor.op
        kinds = [self._kinds[source.name] for source in operation.inputs]
        if operation.type == "Reshape" and kinds[0] is Kind.ROWS:
            if kinds[1] is Kind.SHAPE:  # the entries of an example stay together
                return Kind.ROWS
            kinds[1] = Kind.CONSTANT  # the new shape may depend on the number of examples
        if operation.type == "BroadcastTo" and kinds == [Kind.ROWS, Kind.SHAPE]:
            return Kind.ROWS if operation.inputs[0].shape.rank == tensor.shape.rank else Kind.OTHER
        if operation.type == "Placeholder":
            return Kind.OTHER if tf_graphs.is_of_outer_graph(tensor) else Kind.CONSTANT
        if all(kind is Kind.CONSTANT for kind in kinds):
            return Kind.CONSTANT
        is_call = operation.type in ("PartitionedCall", "StatefulPartitionedCall")
        if is_call and (inside := tf_graphs.inside_call(tensor)) is not None:
            output, pairs = inside
            return type(self)([], kinds={inner.name: self._kinds[given.name] for inner, given in pairs}).kind(output)
        if Kind.OTHER in kinds:
            return Kind.OTHER
        if not _TOTALS.isdisjoint(kinds):
            return Kind.OTHER if Kind.ROWS in kinds else _of_totals(tensor, kinds)
        if operation.type in ("Shape", "ShapeN", "Size"):
            of_shape = {Kind.ROWS: Kind.SHAPE, Kind.CONSTANT: Kind.CONSTANT}
            return Kind.COUNT if operation.type == "Size" else of_shape[kinds[tensor.value_index]]
        return Kind.ROWS if has_rows(tensor) and _keeps_rows(operation, kinds) else _reduced(operation, kinds)


_OF_STATE = frozenset({"ReadVariableOp", "ResourceGather", "StatefulPartitionedCall"})  # as constant as their inputs


class StepProof(Proof):
    """The kinds of tensors of a step on a share. What the step reads or draws may be anything.

    All sizes of a tensor but the first are taken to be the same for all shares.
    """

    def _computed(self, tensor: Any) -> Kind:
        operation = tensor.op
        if operation.type == "Placeholder" and tensor.dtype != tf.resource:
            outer = [external for external, internal in operation.graph.captures if internal is tensor]
            kinds = [StepProof([]).kind(each) for each in outer if hasattr(each, "graph")]
            return next(iter(kinds), Kind.CONSTANT) if outer else Kind.OTHER
        if operation.type == "Identity" and step_module.WHOLE in operation.name:
            return Kind.CONSTANT
        if operation.type in ("Shape", "ShapeN", "Size") and self._kinds[operation.inputs[-1].name] is Kind.OTHER:
            return Kind.COUNT if operation.type == "Size" else Kind.SHAPE
        # The next batch of an iterator, random numbers.
        is_from_outside = operation.op_def.is_stateful and operation.type not in _OF_STATE
        return Kind.OTHER if is_from_outside else super()._computed(tensor)


def has_rows(value: Any) -> bool:
    """True if a value is a tensor with any number of rows."""
    return isinstance(value, tf.Tensor) and bool(value.shape.rank) and value.shape[0] is None


def _of_totals(tensor: Any, kinds: list[Kind]) -> Kind:
    """A mean that is scaled, or added to a mean, is still a mean; the same for sums. A sum by a count is a mean."""
    operation = tensor.op
    (first, *others), constant = kinds, Kind.CONSTANT
    if operation.type in _LINEAR:
        is_rounded = operation.type == "Cast" and first is Kind.COUNT and tensor.dtype.is_integer
        return first if len(kinds) == 1 and not (is_rounded and operation.inputs[0].dtype.is_floating) else Kind.OTHER
    if (operation.type, *kinds) in (("Fill", Kind.SHAPE, constant), ("BroadcastTo", constant, Kind.SHAPE)):
        return _of_filled(operation)
    if operation.type == "Pack" and len(set(kinds)) == 1 and first in (Kind.MEAN, Kind.SUM):
        return first
    if operation.type in ("RealDiv", "Div", "DivNoNan") and kinds == [Kind.SUM, Kind.COUNT]:
        return Kind.MEAN
    if Kind.SHAPE in kinds or operation.type in ("Pack", "Maximum", "Minimum"):
        return _of_shapes(tensor, kinds)
    if operation.type in ("Add", "AddV2", "Sub", "AddN"):
        if set(kinds) - {constant} == {Kind.MEAN}:
            return Kind.MEAN
        return Kind.SUM if set(kinds) <= {Kind.SUM, Kind.COUNT} else Kind.OTHER
    if operation.type == "Mul" and first is constant:
        first, others = others[0], [constant]
    if any(kind is not constant for kind in others):
        return Kind.OTHER
    is_scaled = operation.type in _SCALINGS and first in (Kind.MEAN, Kind.SUM, Kind.COUNT)
    is_linear = operation.type in _LINEAR_WITH_CONSTANTS and first in (Kind.MEAN, Kind.SUM)
    return first if is_scaled or is_linear else Kind.OTHER


def _of_filled(operation: Any) -> Kind:
    """A constant that is repeated for each example."""
    source, output = operation.inputs[0], operation.outputs[0]
    if not has_rows(output):
        return Kind.OTHER
    return Kind.ROWS if operation.type == "Fill" or _is_broadcast(source, output.shape.rank) else Kind.OTHER


def _of_shapes(tensor: Any, kinds: list[Kind]) -> Kind:
    """`tf.shape(rows)[0]`, the product of a shape, and what is put together from these."""
    operation, constants = tensor.op, kinds.count(Kind.CONSTANT)
    if operation.type == "Pack" and constants == len(kinds) - 1 and tensor.shape.rank == 1:
        return Kind.SHAPE if kinds[0] is Kind.COUNT else Kind.OTHER
    if operation.type in ("Maximum", "Minimum"):
        pairs = zip(operation.inputs, kinds, strict=True)
        values = [_static(source) for source, kind in pairs if kind is Kind.CONSTANT]
        # `tf.maximum(count, 1)`: each example has an entry, and an empty share has no weight.
        is_one = len(values) == 1 and values[0] is not None and bool(np.all(values[0] <= 1))
        is_at_least_one = operation.type == "Maximum" and is_one and Kind.COUNT in kinds
        return Kind.COUNT if set(kinds) == {Kind.COUNT} or is_at_least_one else Kind.OTHER
    if operation.type == "ConcatV2":
        return Kind.SHAPE if kinds[0] is Kind.SHAPE and constants == len(kinds) - 1 else Kind.OTHER
    if operation.type == "Prod" and kinds[1] is Kind.CONSTANT and tensor.shape.rank == 0:
        return Kind.COUNT
    if operation.type == "Unpack":
        return Kind.COUNT if tensor.value_index == 0 else Kind.CONSTANT
    if operation.type != "StridedSlice":
        return Kind.OTHER
    begin, length = _static(operation.inputs[1]), operation.inputs[0].shape[0]
    if begin is None or length is None or _first_stride(operation.inputs[3]) != 1:
        return Kind.OTHER
    if not operation.get_attr("begin_mask") and int(begin[0]) % length > 0:
        return Kind.CONSTANT
    return Kind.COUNT if operation.get_attr("shrink_axis_mask") else Kind.SHAPE


def _reduced(operation: Any, kinds: list[Kind]) -> Kind:
    if operation.type in ("Mean", "Sum") and kinds[0] is Kind.ROWS and 0 in _axes(operation):
        return Kind.MEAN if operation.type == "Mean" else Kind.SUM
    if operation.type == "Einsum":
        return Kind.SUM if _is_of_rows(operation, kinds) else Kind.OTHER
    # Each row adds a number at an index, and computes both: as in a confusion matrix.
    is_by_index = operation.type in ("ScatterNd", "UnsortedSegmentSum")
    return Kind.SUM if is_by_index and kinds == [Kind.ROWS, Kind.ROWS, Kind.CONSTANT] else Kind.OTHER


def _static(tensor: Any) -> Any:
    value = tf.get_static_value(tensor)
    return tf_graphs.constant_of(tensor) if value is None else value


def _axes(operation: Any) -> set[int]:
    """Returns the axes of a reduction; all of a tensor whose rank is unknown."""
    axes, rank = _static(operation.inputs[1]), operation.inputs[0].shape.rank
    if axes is not None and rank is not None:
        return {int(axis) % rank for axis in axes.reshape(-1)}
    return {0} if operation.inputs[1].op.type == "Range" else set()  # a range over all axes


def _keeps_rows(operation: Any, kinds: list[Kind]) -> bool:
    """True if each row of the output depends on the same row of the inputs only."""
    first, *others = operation.inputs
    by_row = kinds.count(Kind.ROWS)
    is_only_first = kinds[0] is Kind.ROWS and by_row == 1
    if operation.type in _UNARY or first.shape.rank is None:
        return operation.type in _UNARY
    if operation.type in _ELEMENTWISE:
        rank = operation.outputs[0].shape.rank
        return all(  # False if broadcasting adds axes before that of the examples
            source.shape.rank == rank if kind is Kind.ROWS else _is_broadcast(source, rank)
            for source, kind in zip(operation.inputs, kinds, strict=True)
        )
    if operation.type in ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"):
        return kinds[1] is Kind.CONSTANT and bool(axes := _axes(operation)) and 0 not in axes
    if operation.type in ("Softmax", "LogSoftmax", "L2Normalize", "TopKV2"):
        return first.shape.rank > 1 and is_only_first
    if operation.type in ("InTopKV2", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"):
        return by_row == 2
    if operation.type in _BY_CONSTANTS:
        return is_only_first
    if operation.type in ("MirrorPad", "Pad", "PadV2", "Tile"):
        given = _static(others[0]) if is_only_first else None
        if given is None:
            return False
        return given[0] == 1 if operation.type == "Tile" else not given[0].any()  # the first axis stays as it is
    if operation.type == "LookupTableFindV2":
        return kinds[1] is Kind.ROWS and by_row == 1
    if operation.type == "Reshape":
        return kinds[0] is Kind.ROWS and _keeps_examples(operation)
    if operation.type in ("MatMul", "BatchMatMulV2"):
        is_plain = not operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return is_plain and kinds[0] is Kind.ROWS and kinds[1] is Kind.CONSTANT and others[0].shape.rank == 2
    if operation.type in ("ConcatV2", "OneHot", "ExpandDims", "ArgMax", "ArgMin", "Pack"):
        return _axis(operation) not in (None, 0) and (operation.type != "ConcatV2" or by_row == len(kinds) - 1)
    if operation.type == "Einsum":
        return _is_of_rows(operation, kinds, in_output=True)
    if operation.type == "StridedSlice":
        if operation.get_attr("ellipsis_mask") & 1:  # it stands for the first axis, if it stands for any
            return first.shape.rank is not None and others[0].shape[0] - 1 < first.shape.rank
        keeps = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
        adds = [operation.get_attr(name) & 1 for name in ("new_axis_mask", "shrink_axis_mask")]
        return all(keeps) and not any(adds) and _first_stride(others[2]) == 1
    if operation.type in ("Split", "SplitV"):
        axis = _static(operation.inputs[0 if operation.type == "Split" else 2])
        return axis not in (None, 0) and operation.outputs[0].shape.rank > 1
    if operation.type == "Unpack":
        return operation.get_attr("axis") % first.shape.rank != 0
    if operation.type == "Squeeze":
        squeezed = [axis % first.shape.rank for axis in operation.get_attr("squeeze_dims")]
        return bool(squeezed) and 0 not in squeezed
    if operation.type == "Transpose":
        order = _static(others[0])
        return order is not None and order[0] == 0
    if operation.type == "Cumsum":
        return kinds[0] is Kind.ROWS and _axis(operation) not in (None, 0)
    if operation.type in ("ResourceGather", "GatherV2"):
        of_each = operation.type == "GatherV2" and operation.get_attr("batch_dims") > 0
        return kinds[1] is Kind.ROWS and (kinds[0] is Kind.ROWS if of_each else kinds[0] is Kind.CONSTANT)
    return False


def _is_of_rows(operation: Any, kinds: list[Kind], in_output: bool = False) -> bool:
    """True if an equation multiplies rows of the same example only, and has these rows or adds them up."""
    sources, _, output = operation.get_attr("equation").decode().partition("->")
    by_row = [source for source, kind in zip(sources.split(","), kinds, strict=True) if kind is Kind.ROWS]
    constant = [source for source, kind in zip(sources.split(","), kinds, strict=True) if kind is Kind.CONSTANT]
    label = by_row[0][:1] if by_row else ""
    if not label.isalpha() or any(not source.startswith(label) or source.count(label) > 1 for source in by_row):
        return False
    return (output.startswith(label) if in_output else label not in output) and label not in "".join(constant)


def _is_broadcast(source: Any, rank: int) -> bool:
    return source.shape.rank is not None and (source.shape.rank < rank or source.shape[0] == 1)


def _keeps_examples(operation: Any) -> bool:
    """True if no row of the new shape has entries of two examples. Rows may be merged or split."""
    source, target = operation.inputs[0].shape, operation.outputs[0].shape
    if target.rank == 1:
        return True
    sizes: list[Any] = list(target[1:]) if target.rank else [None]
    shape = operation.inputs[1].op
    if None in sizes and shape.type == "Pack":
        sizes = [_size(entry) for entry in shape.inputs[1:]]
    if source.rank is None or any(size is None or size < 1 for size in sizes):
        return False
    known = itertools.takewhile(lambda size: size is not None, reversed(source[1:]))
    return math.prod(known) % math.prod(sizes) == 0


def _size(entry: Any) -> Any:
    """Returns a number of a shape, `None` if it is not known. TensorFlow can't tell `tf.shape(x)[tf.rank(x) - 1]`."""
    value = _static(entry)
    if value is None and entry.op.type == "StridedSlice" and entry.op.inputs[0].op.type == "Shape":
        index, shape = _static(entry.op.inputs[1]), entry.op.inputs[0].op.inputs[0].shape
        return None if index is None or shape.rank is None or index.size != 1 else shape[int(index[0])]
    return value


def _first_stride(strides: Any) -> int | None:
    values = _static(strides)
    return None if values is None else int(values[0])


def _axis(operation: Any) -> int | None:
    """Returns the axis on which an operation joins, adds or reduces; counted from the front."""
    rank = operation.outputs[0].shape.rank
    has_attribute = operation.type in ("Pack", "OneHot")
    axis = operation.get_attr("axis") if has_attribute else _static(operation.inputs[-1])
    if axis is None or rank is None:
        return None
    rank = operation.inputs[0].shape.rank if operation.type in ("ArgMax", "ArgMin") else rank
    return int(axis) % rank
