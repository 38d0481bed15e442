"""The operations of a traced step that a TPU can't run, each with its layer, file and line."""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import tpu_emulation

# These only call functions, whose operations are checked.
_CALLS = {
    "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case",
    "StatelessCase", "Placeholder", "NoOp", "_Arg", "_Retval", "SymbolicGradient",
}  # fmt: skip
# XLA compiles them, but the length of their output depends on the data, which a TPU does not allow.
_DYNAMIC_SIZE = {"Where": "tf.where(condition)", "Unique": "tf.unique", "UniqueV2": "tf.unique", "ListDiff": "tf.sets"}
_GRADIENT = "gradient_tape"
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_FOLDERS = (sysconfig.get_path("stdlib"), Path(__file__).parents[1], *(Path(m.__file__).parent for m in (tf, keras)))
_LIBRARIES = tuple(f"{folder}/" for folder in _FOLDERS)


@dataclasses.dataclass(frozen=True)
class Forbidden:
    """An operation that a TPU can't run.

    Args:
        op: Its type.
        layer: Its layer, `""` outside of layers.
        file: The file of the user's code that made it; where a layer of a library did, `""`.
        line: The line in this file.
        why: What is wrong, and what to do.
    """

    op: str
    layer: str
    file: str
    line: int
    why: str


def find(graph: Any, layers: Sequence[str]) -> list[Forbidden]:
    """Returns the operations of a traced step that a TPU can't run, one per line of code.

    Args:
        graph: The graph of the step.
        layers: The names of the model's layers.
    """
    tpu_emulation.start_xla()
    found: dict[tuple[str, str, int], Forbidden] = {}
    # A gradient operation has no line in the user's code: it is reported only if its layer has no other operation.
    for op in sorted(tpu_emulation.ops_of(graph), key=lambda op: _GRADIENT in op.name):
        if (why := _why(op)) is None:
            continue
        layer = _layer(op.name, layers)
        if _GRADIENT in op.name and layer in {found_layer for found_layer, _, _ in found}:
            continue
        file, line = _source_line(op, layer)
        found.setdefault((layer, file, line), Forbidden(op.type, layer, file, line, why))
    return list(found.values())


def _why(op: Any) -> str | None:
    if op.type in _CALLS:
        return None
    if op.type in _PYTHON:
        return "Python can't run on a TPU: move tf.py_function and tf.numpy_function into the dataset (`map`)"
    if "HashTable" in op.type or "LookupTable" in op.type:
        return "lookup tables can't be on a TPU: apply StringLookup, IntegerLookup, TextVectorization in the dataset"
    if op.type in ("PrintV2", "Print", "StringFormat"):
        return "nothing can be printed from a TPU: remove tf.print from the step"
    if any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        return "there are no strings on a TPU: convert them to numbers in the dataset"
    if "Ragged" in op.type:
        return "ragged tensors have no fixed shape: use `to_tensor(shape=...)` in the dataset"
    if op.type in _DYNAMIC_SIZE:
        return f"the length of the result of {_DYNAMIC_SIZE[op.type]} depends on the data: a TPU needs fixed shapes"
    if not tpu_emulation.xla_compiles(op.type):
        return "XLA does not have this operation"
    return None


def _source_line(op: Any, layer: str) -> tuple[str, int]:
    """Returns file and line of the innermost frame in the user's code. If there is none, the layer says more."""
    frames = [(frame.filename, frame.lineno) for frame in op.traceback or ()]
    user_frames = [frame for frame in frames if not _is_library(frame[0])]
    known = user_frames if user_frames or layer else frames
    return known[-1] if known else ("", 0)


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<") or "__autograph" in file or "-packages/" in file


def _layer(name: str, layers: Sequence[str]) -> str:
    """Returns the layer from the name of an operation: Keras adds the layers; TensorFlow numbers repeated names."""
    for part in reversed(name.split("/")):
        for scope in (part, re.sub(r"_\d+$", "", part)):
            if scope in layers:
                return scope
    return ""
