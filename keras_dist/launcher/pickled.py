"""Functions, results and errors as bytes, between a process and the ranks that it has started itself."""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from keras_dist.errors import ConfigurationError


def cloudpickle_module() -> Any:
    """Imports cloudpickle.

    Raises:
        ConfigurationError: If it isn't installed.
    """
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            "keras_dist needs cloudpickle to send functions to the ranks.",
            f"ImportError: {error}",
            "Install it: pip install cloudpickle.",
        ) from error
    return cloudpickle


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickles a function and its arguments: by reference what the ranks can import, and the rest by value.

    Raises:
        Exception: If something can't be pickled; pickle raises several kinds.
    """
    cloudpickle, value = cloudpickle_module(), (function, args)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or _can_be_imported(module.__name__):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    """False for a module that was loaded from a file outside of `sys.path`, as pytest may do."""
    top = name.partition(".")[0]
    return top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top) is not None


def dumps_failure(error: BaseException, own_file: str) -> bytes:
    """Pickles an error and its traceback; the traceback alone if the error can't be pickled.

    Args:
        error: The error.
        own_file: The file whose frames at the start of the traceback tell nothing.
    """
    cloudpickle = cloudpickle_module()
    trace = _without_frames_of(own_file, error.__traceback__)
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    try:
        failure = cloudpickle.dumps((error, text))
        cloudpickle.loads(failure)
    except Exception:
        failure = cloudpickle.dumps((None, text))
    return bytes(failure)


def loads(data: bytes) -> Any:
    """Returns what was pickled."""
    return cloudpickle_module().loads(data)


def _without_frames_of(file: str, trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == file and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
