"""Functions, results and errors as bytes, between a process and the ranks that it has started itself."""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from collections.abc import Callable
from typing import Any

from keras_dist.errors import ConfigurationError


def cloudpickle_module() -> Any:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            "keras_dist needs cloudpickle to send functions to the ranks.", f"ImportError: {error}",
            "Install it: pip install cloudpickle.",
        ) from error
    return cloudpickle


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickles a function and its arguments: by reference what the ranks can import, and the rest by value."""
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
    """Pickles an error and its traceback, without the first frames in `own_file`.

    If the error can't be pickled, it pickles the traceback alone.
    """
    cloudpickle, trace = cloudpickle_module(), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == own_file and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    try:
        failure = cloudpickle.dumps((error, text))
        cloudpickle.loads(failure)
    except Exception:
        failure = cloudpickle.dumps((None, text))
    return bytes(failure)


def loads(data: bytes) -> Any:
    return cloudpickle_module().loads(data)
