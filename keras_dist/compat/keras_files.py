"""Files that Keras and TensorFlow Datasets write. Keras 3.13 to 3.15, TFDS 4.9.10, 2026-11.

Both write a download to its final name, so another process takes half a file for a whole one.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt
from keras.src.utils import file_utils

from keras_dist.compat.keras_model import attach

# Keras writes the weights, then the epoch, and has no public hook in between.
_PATHS = ("_weights_path", "_training_metadata_path")
_COPIES = ("_prev_weights_path", "_prev_training_metadata_path")  # if `double_checkpoint`
_SAVE, _BEGIN = "_save_model", "on_train_begin"
_ATTACHED = "_keras_dist_atomic"


def replace_atomically(
    callback: Any, write: Callable[[Any, Callable[[Any], None]], None], finish: Callable[[Path], None]
) -> None:
    """Makes a callback replace its files together. A second call does nothing.

    Args:
        callback: A `keras.callbacks.BackupAndRestore`. With a remote path (`gs://...`) it does not change.
        write: Calls its second argument with a path whose name is that of its first one, and moves what that writes.
        finish: Finishes what `write` has left unfinished in a folder.
    """
    if getattr(callback, _ATTACHED, False) or "://" in str(callback.backup_dir):
        return
    plain_save, plain_begin, folder = getattr(callback, _SAVE), getattr(callback, _BEGIN), Path(callback.backup_dir)

    def save(*args: Any, **kwargs: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write(getattr(callback, _PATHS[0]), lambda path: save_to(Path(path).parent, *args, **kwargs))

    def save_to(temporary: Path, *args: Any, **kwargs: Any) -> None:
        paths = {name: getattr(callback, name) for name in _PATHS}
        for name, copy in zip(_PATHS, _COPIES, strict=True):
            if callback.double_checkpoint and Path(paths[name]).exists():
                shutil.copy(paths[name], temporary / Path(getattr(callback, copy)).name)
        try:
            for name, path in paths.items():
                setattr(callback, name, str(temporary / Path(path).name))
            plain_save(*args, **kwargs)
        finally:
            for name, path in paths.items():
                setattr(callback, name, path)

    def begin(*args: Any, **kwargs: Any) -> None:
        finish(folder)
        plain_begin(*args, **kwargs)

    attach(callback, _ATTACHED, True)
    attach(callback, _SAVE, save)
    attach(callback, _BEGIN, begin)


def begin_without_loading(callback: Any) -> None:
    """Lets a callback begin once without loading what it has saved."""
    begin = getattr(callback, _BEGIN)

    def begin_once(*args: Any, **kwargs: Any) -> None:
        attach(callback, _BEGIN, begin)

    attach(callback, _BEGIN, begin_once)


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
