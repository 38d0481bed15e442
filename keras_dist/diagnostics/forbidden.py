"""What in a traced step no TPU can do: each operation with its layer, file and line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import tpu_compiler

# These only call functions, whose operations are looked at.
_CALLS = {
    "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case",
    "StatelessCase", "Placeholder", "NoOp", "_Arg", "_Retval", "SymbolicGradient",
}  # fmt: skip
# XLA compiles them, with an output as long as the data want it, where the TPU wants to know.
_BY_DATA = {"Where": "tf.where(condition)", "Unique": "tf.unique", "UniqueV2": "tf.unique", "ListDiff": "tf.sets"}
_GRADIENT = "gradient_tape"
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_LIBRARIES = tuple(str(Path(module.__file__).parent) + "/" for module in (tf, keras)) + (
    str(Path(__file__).parents[1]) + "/",
)


@dataclasses.dataclass(frozen=True)
class Forbidden:
    """An operation that a TPU can't do.

    Args:
        op: Its type.
        layer: The layer it is in, `""` outside of layers.
        file: The file of the user's code that made it, else the outermost one known.
        line: The line there.
        why: What is wrong, and what to do.
    """

    op: str
    layer: str
    file: str
    line: int
    why: str


def find(graph: Any, layers: Sequence[str]) -> list[Forbidden]:
    """Returns the operations of a traced step that no TPU can do, one for each place.

    Args:
        graph: The graph of the step.
        layers: The names of the model's layers.
    """
    tpu_compiler.start_xla()
    found: dict[tuple[str, str, int], Forbidden] = {}
    # The gradient of an operation has no line of its own: it is told of only where its layer has nothing else.
    for op in sorted(tpu_compiler.ops_of(graph), key=lambda op: _GRADIENT in op.name):
        if (why := _why(op)) is None:
            continue
        layer = _layer(op.name, layers)
        if _GRADIENT in op.name and layer in {place[0] for place in found}:
            continue
        file, line = _place(op)
        found.setdefault((layer, file, line), Forbidden(op.type, layer, file, line, why))
    return list(found.values())


def _why(op: Any) -> str | None:
    if op.type in _CALLS:
        return None
    if op.type in _PYTHON:
        return "Python can't run on a TPU: move tf.py_function and tf.numpy_function into the data set (`map`)"
    if "HashTable" in op.type or "LookupTable" in op.type:
        return "lookup tables can't be on a TPU: apply StringLookup, IntegerLookup, TextVectorization in the data set"
    if op.type in ("PrintV2", "Print", "StringFormat"):
        return "nothing can be printed from a TPU: take tf.print out of the step"
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return "there are no strings on a TPU: turn them into numbers in the data set"
    if "Ragged" in op.type:
        return "ragged tensors have no fixed shape: `to_tensor(shape=...)` in the data set"
    if op.type in _BY_DATA:
        return f"the length of what {_BY_DATA[op.type]} returns depends on the data: a TPU needs fixed shapes"
    if not tpu_compiler.xla_compiles(op.type):
        return "no TPU can do it: XLA doesn't know it"
    return None


def _place(op: Any) -> tuple[str, int]:
    """The innermost line of the user's own code, or of the outermost library."""
    frames = [(frame.filename, frame.lineno) for frame in op.traceback or ()]
    own = [frame for frame in frames if not _is_library(frame[0])]
    return (own or frames or [("", 0)])[-1]


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<") or "/runpy.py" in file or "__autograph" in file


def _layer(name: str, layers: Sequence[str]) -> str:
    """Keras names the scope of an operation after the layers it is in; TensorFlow adds a number to a second one."""
    for part in reversed(name.split("/")):
        for scope in (part, re.sub(r"_\d+$", "", part)):
            if scope in layers:
                return scope
    return ""
