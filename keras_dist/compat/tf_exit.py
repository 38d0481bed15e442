"""TensorFlow's data threads at the end of Python: a process that fails may never end. TensorFlow 2.21, 2026-11.

An iterator that is alive when Python ends is deleted by Python's last garbage collection. It waits for its threads, and
one that runs a generator waits for Python, which runs no other thread any more (tensorflow/tensorflow#22632). After an
error the iterator of `fit` is alive: the traceback holds it.

`tests/multiprocess/test_exit.py` fails when this is no longer needed.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys


@functools.cache
def end_data_threads_before_python() -> None:
    """Deletes, before Python ends, the iterators that only the last error holds."""
    atexit.register(_forget_last_error)


def _forget_last_error() -> None:
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()
