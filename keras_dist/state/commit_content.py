"""What a commit can hold: arrays, such that what is read is what was written, without pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_dist.errors import ConfigurationError

_OF_ML_DTYPES = 2  # what `dtype.isbuiltin` is for dtypes that are not NumPy's own


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is written of an array.

    Args:
        array: The array, in a dtype that NumPy's files have.
        entry: What the manifest says of it: name, dtype, shape.
    """

    array: np.ndarray
    entry: dict[str, Any]


def stored(name: str, array: np.ndarray) -> Stored:
    """Returns what is written of an array.

    Args:
        name: Its name.
        array: An array of any shape, and any dtype but objects.

    Raises:
        ConfigurationError: It can't be written without pickle, or its name is no string.
    """
    if not isinstance(name, str):
        raise ConfigurationError("The name of an array has to be a string.", repr(name), "Name it by a string.")
    array = np.asarray(array)
    entry = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
    if array.dtype.isbuiltin == _OF_ML_DTYPES and array.dtype == _dtype_of_ml_dtypes(array.dtype.name):
        unsigned = f"uint{8 * array.dtype.itemsize}"
        return Stored(array.view(unsigned), {**entry, "stored_as": unsigned})
    if not _has_a_file_format(array.dtype):
        raise ConfigurationError(
            f"The array {name!r} can't be written without pickle.",
            f"dtype {array.dtype}",
            "Pass an array of numbers, booleans, bytes, strings of fixed length, or dates.",
        )
    return Stored(array, entry)


def restored(array: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    """Returns the array that `stored` was passed.

    Args:
        array: The array that was written.
        entry: What the manifest says of it.

    Raises:
        ValueError: The dtype or the shape is not that of the entry.
    """
    if "stored_as" in entry and (dtype := _dtype_of_ml_dtypes(entry["dtype"])) is not None:
        array = array.view(dtype)
    if (str(array.dtype), list(array.shape)) != (entry["dtype"], entry["shape"]):
        raise ValueError(f"{entry['name']} is {array.dtype} {array.shape}, not {entry['dtype']} {entry['shape']}")
    return array


def _has_a_file_format(dtype: np.dtype) -> bool:
    if dtype.hasobject:
        return False
    return bool(np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype)


def _dtype_of_ml_dtypes(name: str) -> np.dtype | None:
    """Returns a dtype of ml_dtypes (bfloat16, float8_e4m3fn, int4), which comes with TensorFlow."""
    import ml_dtypes

    found = getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)
