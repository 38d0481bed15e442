"""Proves from its graph that a number is a mean over the examples of a batch.

Only then is the number of a batch the mean of those of its shares, weighted by their examples. What is not proven may
be anything: a sum, a root of a mean, a mean over unmasked entries.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class Kind(enum.Enum):
    """How a tensor depends on the batch."""

    CONSTANT = "the same for all batches"
    ROWS = "each row depends on one example; all examples have equally many rows"
    MEAN = "a mean over the rows"
    SUM = "a sum over the rows"
    SHAPE = "the shape of rows"
    COUNT = "proportional to the number of examples"
    OTHER = "anything else"


_LINEAR = frozenset({"Cast", "EnsureShape", "Identity", "IdentityN", "Neg", "PreventGradient", "StopGradient"})
_UNARY = _LINEAR | frozenset({
    "Abs", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Exp", "Expm1", "Floor", "Inv", "IsFinite", "IsInf", "IsNan",
    "LeakyRelu", "Log", "Log1p", "LogicalNot", "OnesLike", "Reciprocal", "Relu", "Relu6", "Round", "Rsqrt", "Selu",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Tan", "Tanh", "ZerosLike",
})  # fmt: skip
_ELEMENTWISE = frozenset({
    "Add", "AddN", "AddV2", "BiasAdd", "ClipByValue", "Div", "DivNoNan", "Equal", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan",
    "NotEqual", "Pow", "RealDiv", "Select", "SelectV2", "SquaredDifference", "Sub", "Xdivy", "Xlog1py", "Xlogy",
})  # fmt: skip
_SUMS = frozenset({"Add", "AddV2", "Sub", "AddN"})
_SCALINGS = frozenset({"Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"})
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
_RESHAPINGS = frozenset({"Reshape", "ExpandDims", "Squeeze"})
_TOTALS = frozenset({Kind.MEAN, Kind.SUM, Kind.SHAPE, Kind.COUNT})
_REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any"})
_OF_LAST_AXIS = frozenset({"Softmax", "LogSoftmax", "L2Normalize"})
_BY_ROW = frozenset({"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"})


class Proof:
    """The kinds of the tensors of one graph, in which the examples are the first, unknown dimension.

    Args:
        rows: Tensors with a row for each example.
        shared: Tensors that are the same for all shares of a batch.
    """

    def __init__(self, rows: Iterable[Any], shared: Iterable[Any] = ()) -> None:
        self._kinds = {tensor.name: Kind.ROWS for tensor in rows}
        self._kinds |= {tensor.name: Kind.CONSTANT for tensor in shared}

    def is_mean(self, tensor: Any) -> bool:
        """True if a tensor is proven to be a mean over the examples, or the same for all batches."""
        return self.kind(tensor) in (Kind.MEAN, Kind.CONSTANT)

    def is_constant(self, tensor: Any) -> bool:
        """True if a tensor does not depend on the examples."""
        return self.kind(tensor) is Kind.CONSTANT

    def kind(self, tensor: Any) -> Kind:
        """Returns the kind of a tensor."""
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
            kinds[1] = Kind.CONSTANT  # the new shape may depend on the number of examples
        if all(kind is Kind.CONSTANT for kind in kinds):
            return Kind.CONSTANT
        if Kind.OTHER in kinds:
            return Kind.OTHER
        if not _TOTALS.isdisjoint(kinds):
            return Kind.OTHER if Kind.ROWS in kinds else _of_totals(operation, kinds)
        if operation.type in ("Shape", "Size"):
            is_known = None not in operation.inputs[0].shape[1:]
            return (Kind.SHAPE if operation.type == "Shape" else Kind.COUNT) if is_known else Kind.OTHER
        return Kind.ROWS if _has_rows(tensor) and _keeps_rows(operation, kinds) else _reduced(operation, kinds)


def _has_rows(tensor: Any) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _of_totals(operation: Any, kinds: list[Kind]) -> Kind:
    """A mean stays one where it is scaled, or added to another, and so does a sum. A sum by a count is a mean."""
    first, *others = kinds
    if operation.type in _LINEAR:
        return first if len(kinds) == 1 else Kind.OTHER
    if operation.type in _DIVISIONS and kinds == [Kind.SUM, Kind.COUNT]:
        return Kind.MEAN
    if Kind.SHAPE in kinds or operation.type == "Pack":
        return _of_shapes(operation, kinds)
    if operation.type in _SUMS:
        return _of_added(kinds)
    constant = Kind.CONSTANT
    if operation.type == "Mul" and first is constant and len(others) == 1:
        return others[0]
    if any(kind is not constant for kind in others):
        return Kind.OTHER
    if operation.type in _RESHAPINGS | _SCALINGS:
        return first
    return first if operation.type in ("Sum", "Mean") and first is not Kind.COUNT else Kind.OTHER


def _of_added(kinds: list[Kind]) -> Kind:
    totals = set(kinds) - {Kind.CONSTANT}
    if totals == {Kind.MEAN}:
        return Kind.MEAN
    return Kind.SUM if set(kinds) == {Kind.SUM} else Kind.OTHER


def _of_shapes(operation: Any, kinds: list[Kind]) -> Kind:
    """`tf.shape(rows)[0]`, and the product of a shape: the number of all entries."""
    if operation.type == "Pack":
        is_shape = kinds.count(Kind.COUNT) == 1 and kinds.count(Kind.CONSTANT) == len(kinds) - 1
        return Kind.SHAPE if is_shape else Kind.OTHER
    if operation.type == "Prod" and kinds[1] is Kind.CONSTANT and operation.outputs[0].shape.rank == 0:
        return Kind.COUNT
    if operation.type == "StridedSlice":
        begin, shrinks = tf.get_static_value(operation.inputs[1]), operation.get_attr("shrink_axis_mask")
        return Kind.COUNT if shrinks and begin is not None and list(begin) == [0] else Kind.OTHER
    return Kind.OTHER


def _reduced(operation: Any, kinds: list[Kind]) -> Kind:
    if operation.type in ("Mean", "Sum") and kinds[0] is Kind.ROWS and 0 in _axes(operation):
        return Kind.MEAN if operation.type == "Mean" else Kind.SUM
    return Kind.OTHER


def _axes(operation: Any) -> set[int]:
    """Returns the axes of a reduction; all of a tensor whose rank is unknown."""
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    if axes is not None and rank is not None:
        return {int(axis) % rank for axis in axes.reshape(-1)}
    is_range = operation.inputs[1].op.type == "Range"  # over all axes
    return {0} if is_range else set()


def _keeps_rows(operation: Any, kinds: list[Kind]) -> bool:
    """True if each row of the output depends on the same row of the inputs only."""
    first, *others = operation.inputs
    by_row = [source for source, kind in zip(operation.inputs, kinds, strict=True) if kind is Kind.ROWS]
    if operation.type in _UNARY:
        return True
    if operation.type in _ELEMENTWISE:
        return _is_elementwise(operation, kinds)
    if operation.type in _REDUCTIONS:
        return kinds[1] is Kind.CONSTANT and bool(axes := _axes(operation)) and 0 not in axes
    if operation.type in _OF_LAST_AXIS:
        return first.shape.rank > 1
    if operation.type in _BY_ROW:
        return len(by_row) == 2
    if operation.type == "Reshape":
        return kinds[0] is Kind.ROWS and _keeps_first_axis(first, operation.outputs[0])
    if operation.type in ("MatMul", "BatchMatMulV2"):
        is_plain = not any(operation.get_attr(name) for name in _TRANSPOSED[operation.type])
        return is_plain and kinds[0] is Kind.ROWS and kinds[1] is Kind.CONSTANT and others[0].shape.rank == 2
    if operation.type in ("ConcatV2", "OneHot", "ExpandDims", "ArgMax", "ArgMin", "Pack"):
        return _axis(operation) not in (None, 0) and (operation.type != "ConcatV2" or len(by_row) == len(kinds) - 1)
    if operation.type == "StridedSlice":
        keeps = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
        adds = [operation.get_attr(name) & 1 for name in ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")]
        return all(keeps) and not any(adds) and _first_stride(others[2]) == 1
    if operation.type in ("Split", "SplitV"):
        axis = tf.get_static_value(operation.inputs[0 if operation.type == "Split" else 2])
        return axis not in (None, 0) and operation.outputs[0].shape.rank > 1
    if operation.type in ("ResourceGather", "GatherV2"):
        return kinds[0] is Kind.CONSTANT and kinds[1] is Kind.ROWS
    return False


_TRANSPOSED = {"MatMul": ("transpose_a",), "BatchMatMulV2": ("adj_x",)}


def _is_elementwise(operation: Any, kinds: list[Kind]) -> bool:
    """False if broadcasting adds axes before that of the examples."""
    rank = operation.outputs[0].shape.rank
    return all(
        source.shape.rank == rank if kind is Kind.ROWS else _is_broadcast(source, rank)
        for source, kind in zip(operation.inputs, kinds, strict=True)
    )


def _is_broadcast(source: Any, rank: int) -> bool:
    return source.shape.rank is not None and (source.shape.rank < rank or source.shape[0] == 1)


def _keeps_first_axis(source: Any, target: Any) -> bool:
    """Rows may be merged or split if the order of examples stays: then all examples still have equally many."""
    return source.shape.rank is not None and None not in (*source.shape[1:], *target.shape[1:])


def _first_stride(strides: Any) -> int | None:
    values = tf.get_static_value(strides)
    return None if values is None else int(values[0])


def _axis(operation: Any) -> int | None:
    """Returns the axis on which an operation joins, adds or reduces; counted from the front."""
    rank = operation.outputs[0].shape.rank
    if operation.type in ("Pack", "OneHot"):
        axis = operation.get_attr("axis")
    else:
        axis = tf.get_static_value(operation.inputs[-1])
    if axis is None or rank is None:
        return None
    rank = operation.inputs[0].shape.rank if operation.type in ("ArgMax", "ArgMin") else rank
    return int(axis) % rank
