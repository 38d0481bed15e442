"""Private names of Keras's `fit`, `evaluate` and `predict`, and of what writes files. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes or is no longer needed.
"""

import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import wrapt
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.utils import file_utils

from keras_dist.compat.keras_model import attach, attached
from keras_dist.compat.tf_compat import patched

# The epoch that a run resumes at (BackupAndRestore).
INITIAL_EPOCH = "_initial_epoch"
# The methods and attributes of `Trainer` that `fit` and `evaluate` use.
SYMBOLIC_BUILD = "_maybe_symbolic_build"
METRICS_RESULT = "_get_metrics_result_or_logs"
EVALUATE_IN_FIT = "_use_cached_eval_dataset"
EVALUATE_ITERATOR = "_eval_epoch_iterator"
RUN_EAGERLY = "_run_eagerly"
JIT_COMPILE = "_jit_compile"
# The public `distribute_strategy`, which distributes data and runs steps, below what a subclass overrides.
STRATEGY = "_distribute_strategy"
FUNCTIONS = ("train_function", "test_function", "predict_function")


def distributed_dataset(epoch_iterator: Any) -> tf.data.Dataset:
    return epoch_iterator._distributed_dataset


def set_dataset(epoch_iterator: Any, dataset: tf.data.Dataset) -> None:
    epoch_iterator._distributed_dataset = dataset


def set_steps(epoch_iterator: Any, steps: int | None) -> None:
    """Sets the number of steps in an epoch. With `None` it ends with the data."""

    class Adapter(type(epoch_iterator.data_adapter)):  # type: ignore[misc]
        num_batches = property(lambda self: steps)

    epoch_iterator.data_adapter.__class__ = Adapter
    epoch_iterator._num_batches = steps


def choose_direction(callback: Any) -> None:
    """Lets a callback that monitors a metric choose between the least and the greatest value.

    Keras does it when the first epoch ends, and changes the sign of `min_delta` then.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def write_at_step(callback: Any) -> None:
    """Lets a `TensorBoard` that resumes write for the step that it resumes at: it has begun to write for step 0."""
    if isinstance(callback, keras.callbacks.TensorBoard) and getattr(callback, "_prev_summary_state", None):
        callback._pop_writer()
        callback._push_writer(callback._train_writer, callback._global_train_batch)


def set_last_logs(model: keras.Model, last: dict[str, Any]) -> None:
    """Sets the logs that Keras takes for those of the last batch, where a resumed epoch has no batch left."""
    plain, until_called = getattr(model, METRICS_RESULT), contextlib.ExitStack()

    def result(logs: Any) -> Any:
        until_called.close()
        return plain(logs or last)

    if last:
        until_called.enter_context(attached(model, METRICS_RESULT, result))


def flush_files(callback: Any) -> None:
    """Writes what a callback that logs still holds in memory."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        for writer in getattr(callback, "_writers", {}).values():
            writer.flush()
    file = getattr(callback, "csv_file", None)
    if file is not None and not file.closed:
        file.flush()


class Reading:
    """Tells how far `fit` has read its data, and can begin there. `begins` is called before each iteration."""

    def __init__(self, epoch_iterator: Any, begins: Callable[[], object]) -> None:
        self._epoch_iterator = epoch_iterator  # not used yet
        self._begins, self._plain = begins, epoch_iterator._get_iterator
        self._rest: Any = None
        self.iterations = 0  # begun so far
        self.batches = 0  # read in the current one
        epoch_iterator._get_iterator = self._get_iterator

    def _get_iterator(self) -> Any:
        self._begins()
        self.iterations += 1
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest
        self.batches = 0
        return self._plain()

    def wait(self) -> None:
        """Waits until the steps that have begun are done."""
        self._epoch_iterator.tf_sync()

    @property
    def source(self) -> Any:
        """The script's `PyDataset`, `None` if it has passed something else."""
        return getattr(self._epoch_iterator.data_adapter, "py_dataset", None)

    def skip(self, batches: int) -> None:
        """Lets a `PyDataset` make only the first of its next batches; the others, which nobody uses, are the same."""
        adapter = self._epoch_iterator.data_adapter
        if adapter.enqueuer is None and batches:
            adapter.py_dataset = _Skipping(adapter, batches)

    def after_shuffle(self, state: Any) -> Any:
        """Returns the state of Python's random generator after Keras has shuffled the batches of a `PyDataset`."""
        adapter, generator = self._epoch_iterator.data_adapter, random.Random()
        generator.setstate(state)
        if adapter.shuffle and adapter.enqueuer is None and adapter.num_batches is not None:
            generator.shuffle([*range(adapter.num_batches)])
        return generator.getstate()

    @property
    def spans_epochs(self) -> bool:
        """True if an iteration over the dataset may last for several epochs."""
        return bool(self._epoch_iterator.steps_per_epoch)

    @property
    def num_batches(self) -> int | None:
        """Batches in an iteration over the dataset, `None` if that is not known yet."""
        return self._epoch_iterator._num_batches

    @num_batches.setter
    def num_batches(self, count: int | None) -> None:
        self._epoch_iterator._num_batches = count

    @property
    def dataset(self) -> Any:
        return distributed_dataset(self._epoch_iterator)

    def begin_at(self, rest: Any, iterations: int, batches: int, batches_of_epoch: int) -> None:
        """Makes the first epoch begin after some of its batches.

        `iterations` have begun, `batches` were read in the current one, and `rest` iterates over what was not.
        """
        iterator = self._epoch_iterator
        self.iterations, self.batches = iterations, batches
        if self.spans_epochs:
            iterator._current_iterator, iterator._steps_seen = rest, batches - batches_of_epoch
        else:
            self.iterations, self._rest = iterations - 1, rest  # the epoch's iteration begins once more

        done = len(range(0, batches_of_epoch, iterator.steps_per_execution))
        enumerate_next_epoch(iterator, lambda executions, left: itertools.islice(executions, done, None))


def batches_of_data(epoch_iterator: Any) -> int | None:
    """Returns how many batches the data have, `None` as long as that is unknown. Keras takes their end for one more."""
    count, was_known = epoch_iterator._num_batches, epoch_iterator.data_adapter.num_batches is not None
    return count if count is None or was_known or epoch_iterator.steps_per_epoch else count - 1


def enumerate_next_epoch(epoch_iterator: Any, regroup: Callable[[Any, Callable[[int], int | None]], Any]) -> None:
    """Passes the executions of the next epoch through a function.

    It takes and returns an iterator over executions: their first and last step, and the iterator over data. It also
    takes a function: how many steps of the epoch are left with the given one, the last yielded; `None` if unknown.
    """
    plain = epoch_iterator._enumerate_iterator

    def left(step: int) -> int | None:
        of_epoch, of_data = epoch_iterator.steps_per_epoch, batches_of_data(epoch_iterator)
        ends = [of_epoch - step] if of_epoch else []
        ends += [of_data - epoch_iterator._steps_seen + 1] if of_data else []
        return min(ends, default=None)

    def enumerate_regrouped() -> Any:
        epoch_iterator._enumerate_iterator = plain
        return regroup(plain(), left)

    epoch_iterator._enumerate_iterator = enumerate_regrouped


class _Skipping:
    """Stands in for an adapter's `PyDataset` until some batches were asked for."""

    def __init__(self, adapter: Any, batches: int) -> None:
        self._adapter, self._left, self._plain = adapter, batches, adapter.py_dataset
        self._first: Any = None

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left == 0:
            self._adapter.py_dataset = self._plain
        if self._first is None:
            self._first = self._plain[index]
        return self._first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def epoch_iterators(prepare: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Passes each epoch iterator that Keras creates in this context to `prepare`: `predict` exposes it nowhere else."""

    class Prepared(tensorflow_trainer.TFEpochIterator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            prepare(self)

    return patched(tensorflow_trainer, TFEpochIterator=Prepared)


class StrategyExtension:
    """What keras_tuner reads from `model.distribute_strategy.extended` before it saves a trial's weights."""

    def _in_multi_worker_mode(self) -> bool:
        return False  # all ranks pass the same path, and `save_weights` writes once


def argument_names(method: str) -> list[str]:
    """Returns the names of the arguments of Keras's own `fit`, `save`, ..., in their order."""
    trainer = tensorflow_trainer.TensorFlowTrainer
    plain = getattr(trainer if hasattr(trainer, method) else keras.Model, method)
    return list(inspect.signature(plain).parameters)[1:]  # without `self`


def is_overridden(model: keras.Model, method: str) -> bool:
    """True if a model's class has a method of its own in place of one of Keras's trainer."""
    owner = next(cls for cls in type(model).__mro__ if method in vars(cls))
    return owner is not keras.Model and not issubclass(tensorflow_trainer.TensorFlowTrainer, owner)


@functools.cache
def wrap_fit(wrapper: Callable[[keras.Model, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Passes each call of Keras's own `fit` to a function, from now on. A second call does nothing."""
    plain = tensorflow_trainer.TensorFlowTrainer.fit

    @functools.wraps(plain)
    def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return wrapper(model, plain, args, kwargs)

    tensorflow_trainer.TensorFlowTrainer.fit = fit


def before_training(look: Callable[[keras.Model], object]) -> None:
    """Passes every model to `look` before its `fit` and `train_on_batch`, from now on."""
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(model: keras.Model, force: bool = False) -> Any:
        look(model)
        return plain(model, force)

    keras.Model.make_train_function = make_train_function


def arranged_callbacks(
    model: keras.Model, arrange: Callable[[list[Any]], list[Any]]
) -> contextlib.AbstractContextManager[None]:
    """Lets Keras make a model's lists of callbacks, in this context, from what `arrange` returns for those given.

    They may be more than a script has passed to `fit`: experiment trackers replace `keras.Model.fit`, and add theirs.
    """
    plain = keras.callbacks.CallbackList.__init__

    @functools.wraps(plain)
    def init(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("model") is model:
            callbacks = arrange(keras.tree.flatten(callbacks) if callbacks else [])
        plain(self, callbacks, *args, **kwargs)

    return patched(keras.callbacks.CallbackList, __init__=init)


def functions_of(model: keras.Model) -> dict[str, Any]:
    """Returns a model's train, test and predict functions, `None` for those that do not exist yet."""
    return {name: getattr(model, name, None) for name in FUNCTIONS}


def set_functions(model: keras.Model, functions: dict[str, Any]) -> None:
    """Sets what `functions_of` returned, or a part of it. Keras creates missing ones when it needs them."""
    for name in FUNCTIONS:
        attach(model, name, functions.get(name))


def without_functions(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Hides traced functions in this context, where the model runs on one rank: they were traced for all ranks."""
    return patched(model, **dict.fromkeys((*FUNCTIONS, EVALUATE_ITERATOR)))


# --- Files that Keras and TensorFlow Datasets write ---

def replace_atomically(
    callback: Any, write: Callable[[Any, Callable[[Any], None]], None], finish: Callable[[Path], None]
) -> None:
    """Makes a `keras.callbacks.BackupAndRestore` replace its files together: Keras writes the weights, then the epoch.

    Not with a remote path (`gs://...`), nor with `double_checkpoint`: then Keras keeps both files of the epoch before.
    `write` calls its second argument with a path whose name is that of its first one, and moves what that writes.
    `finish` finishes what `write` has left unfinished in a folder. A second call does nothing.
    """
    is_atomic = getattr(callback, "_keras_dist_atomic", False)
    if is_atomic or callback.double_checkpoint or "://" in str(callback.backup_dir):
        return
    plain_save, plain_begin, folder = callback._save_model, callback.on_train_begin, Path(callback.backup_dir)

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write(callback._weights_path, lambda path: save_to(Path(path).parent))

    def save_to(temporary: Path) -> None:
        names = ("_weights_path", "_training_metadata_path")
        with patched(callback, **{name: str(temporary / Path(getattr(callback, name)).name) for name in names}):
            plain_save()

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


# Keras and TFDS (4.9.10) write a download to its final name, so another process takes half a file for a whole one.
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
