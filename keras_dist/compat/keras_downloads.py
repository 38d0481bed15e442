"""Keras writes a download to its final name, so another process takes half a file for a whole one. Keras 3.13 to 3.15.

`keras.utils.get_file` looks whether the file exists, and all of `keras.datasets` and `keras.applications` call it; with
`extract=True` it writes over the extracted files each time. (2026-11) `tests/unit/test_downloads.py` fails when one of
these names changes or is no longer needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras.src.utils import file_utils

# What `get_file` calls: the first one writes a file, the second one a folder. It finds both by their global names.
_DOWNLOAD, _EXTRACT = "urlretrieve", "extract_archive"

Write = Callable[[str], Any]  # takes the path to write to


@functools.cache
def write_through(write: Callable[[str, Write], None]) -> None:
    """Lets Keras write what it downloads and extracts through a function. A second call does nothing.

    Args:
        write: Takes the file or folder that has to be there afterwards, and what writes it, anywhere, or nothing.
    """
    download, extract = getattr(file_utils, _DOWNLOAD), getattr(file_utils, _EXTRACT)

    def write_file(origin: str, target: str, *args: Any, **kwargs: Any) -> None:
        write(target, lambda path: download(origin, path, *args, **kwargs))

    def write_folder(archive: str, target: str = ".", *args: Any, **kwargs: Any) -> bool:
        extracted = True

        def extract_to(path: str) -> None:
            nonlocal extracted
            extracted = extract(archive, path, *args, **kwargs)

        write(target, extract_to)
        return extracted

    setattr(file_utils, _DOWNLOAD, write_file)
    setattr(file_utils, _EXTRACT, write_folder)
