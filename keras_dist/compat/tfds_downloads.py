"""Two processes that prepare one dataset of TensorFlow Datasets: the second one fails. TFDS 4.9.10, 2026-11.

Each prepares it in a folder of its own, and renames that; the second one finds another's. A builder that is older than
the dataset does not read what the dataset holds, and knows no splits. `tests/unit/test_downloads.py` fails when this is
no longer needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import wrapt

_MODULE = "tensorflow_datasets.core.dataset_builder"
_PREPARE, _IS_PREPARED = "DatasetBuilder.download_and_prepare", "DatasetBuilder.is_prepared"


@functools.cache
def prepare_through(prepare: Callable[[str, Callable[[], Any]], object]) -> None:
    """Lets TFDS prepare datasets through a function, once a script imports it. A second call does nothing.

    Args:
        prepare: Takes the folder that has to be there afterwards, and what makes it.
    """

    def download_and_prepare(plain: Any, builder: Any, args: Any, kwargs: Any) -> None:
        prepare(str(builder.data_dir), lambda: plain(*args, **kwargs))
        _read_info(builder)

    def is_prepared(plain: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        if found := plain(*args, **kwargs):
            _read_info(builder)
        return found

    def wrap(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, _PREPARE, download_and_prepare)
        wrapt.wrap_function_wrapper(module, _IS_PREPARED, is_prepared)

    wrapt.register_post_import_hook(wrap, _MODULE)


def _read_info(builder: Any) -> None:
    """Reads what the dataset holds, if another process has prepared it."""
    if not builder.info.initialized:
        builder.info.read_from_directory(builder.data_dir)
