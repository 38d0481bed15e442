"""Files that Keras and TensorFlow Datasets write. Keras 3.13 to 3.15, TFDS 4.9.10, 2026-11.

Both write a download to its final name, so another process takes half a file for a whole one.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt
from keras.src.utils import file_utils

from keras_dist.compat.keras_model import attach, attached

# Keras writes the weights, then the epoch, and has no public hook in between. With the copies if `double_checkpoint`.
_COPIES = {"_weights_path": "_prev_weights_path", "_training_metadata_path": "_prev_training_metadata_path"}


def replace_atomically(
    callback: Any, write: Callable[[Any, Callable[[Any], None]], None], finish: Callable[[Path], None]
) -> None:
    """Makes a `keras.callbacks.BackupAndRestore` replace its files together; not with a remote path (`gs://...`).

    `write` calls its second argument with a path whose name is that of its first one, and moves what that writes.
    `finish` finishes what `write` has left unfinished in a folder. A second call does nothing.
    """
    if getattr(callback, "_keras_dist_atomic", False) or "://" in str(callback.backup_dir):
        return
    plain_save, plain_begin, folder = callback._save_model, callback.on_train_begin, Path(callback.backup_dir)

    def save(*args: Any, **kwargs: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write(callback._weights_path, lambda path: save_to(Path(path).parent, *args, **kwargs))

    def save_to(temporary: Path, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            for name, copy in _COPIES.items():
                path = Path(getattr(callback, name))
                if callback.double_checkpoint and path.exists():
                    shutil.copy(path, temporary / Path(getattr(callback, copy)).name)
                stack.enter_context(attached(callback, name, str(temporary / path.name)))
            plain_save(*args, **kwargs)

    def begin(*args: Any, **kwargs: Any) -> None:
        finish(folder)
        plain_begin(*args, **kwargs)

    attach(callback, "_keras_dist_atomic", True)
    attach(callback, "_save_model", save)
    attach(callback, "on_train_begin", begin)


def begin_without_loading(callback: Any) -> None:
    """Lets a callback begin once without loading what it has saved."""
    begin = callback.on_train_begin
    attach(callback, "on_train_begin", lambda *args, **kwargs: attach(callback, "on_train_begin", begin))


Write = Callable[[str], Any]  # takes the path to write to


@functools.cache
def write_through(write: Callable[[str, Write], None]) -> None:
    """Lets Keras write what it downloads and extracts through a function. A second call does nothing.

    It takes the file or folder that has to be there afterwards, and what writes it, anywhere, or nothing.
    """
    # What `get_file` calls: the first one writes a file, the second one a folder. It finds both by their global names.
    download, extract = file_utils.urlretrieve, file_utils.extract_archive

    def write_file(origin: str, target: str, *args: Any, **kwargs: Any) -> None:
        write(target, lambda path: download(origin, path, *args, **kwargs))

    def write_folder(archive: str, target: str = ".", *args: Any, **kwargs: Any) -> bool:
        extracted = True

        def extract_to(path: str) -> None:
            nonlocal extracted
            extracted = extract(archive, path, *args, **kwargs)

        write(target, extract_to)
        return extracted

    file_utils.urlretrieve, file_utils.extract_archive = write_file, write_folder


@functools.cache
def prepare_through(prepare: Callable[[str, Callable[[], Any]], object]) -> None:
    """Lets TFDS make folders through `prepare(folder, make)`, once a script imports it. A second call does nothing."""

    def read_info(builder: Any) -> None:
        if not builder.info.initialized:  # another process has prepared it
            builder.info.read_from_directory(builder.data_dir)

    def download_and_prepare(plain: Any, builder: Any, args: Any, kwargs: Any) -> None:
        prepare(str(builder.data_dir), lambda: plain(*args, **kwargs))
        read_info(builder)

    def is_prepared(plain: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        if found := plain(*args, **kwargs):
            read_info(builder)
        return found

    def wrap(module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "DatasetBuilder.download_and_prepare", download_and_prepare)
        wrapt.wrap_function_wrapper(module, "DatasetBuilder.is_prepared", is_prepared)

    wrapt.register_post_import_hook(wrap, "tensorflow_datasets.core.dataset_builder")
