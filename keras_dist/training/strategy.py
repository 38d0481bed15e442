"""What Keras sees in place of a `tf.distribute.Strategy`: the part that engines share, and that of a rank.

Keras asks a model's `distribute_strategy` to distribute each data set and to run each step. So this is below
whatever `fit` a subclass defines, and above its `train_step`, which gets its data as Keras hands them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model
from keras_dist.data import groups, sources
from keras_dist.data.shares import Share, Shares, may_be_empty, take_share
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.step import Step
from keras_dist.step.stopwatch import Stopwatch
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.interrupts import interrupts_of


class Strategy:
    """What Keras sees in place of a `tf.distribute.Strategy`, for every engine.

    Args:
        model: The distributed model.
        backend: How the ranks talk.
    """

    num_replicas_in_sync = 1  # what `run` returns is of all replicas already

    def __init__(self, model: keras.Model, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self.interrupts = interrupts_of(backend)
        self.is_local = False
        self.stopwatch: Stopwatch | None = None
        self._groups_next = False
        self.extended = keras_fit.StrategyExtension()

    def local(self) -> contextlib.AbstractContextManager[None]:
        """While this is entered the model is an ordinary one of this process: nobody else takes part."""
        return self._local()

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        previous, self.is_local = self.is_local, True
        try:
            yield
        finally:
            self.is_local = previous

    @contextlib.contextmanager
    def grouping(self, groups_next: bool) -> Iterator[None]:
        """While this is entered, the next dataset, which `fit` trains on, has a batch for each replica."""
        previous, self._groups_next = self._groups_next, groups_next
        try:
            yield
        finally:
            self._groups_next = previous

    def start_stopwatch(self) -> Stopwatch:
        """Returns what measures how long this rank waits for others, in the steps from now on."""
        if self.stopwatch is None:
            self.stopwatch = Stopwatch()
            keras_fit.reset_functions(self._model)  # those that are traced don't measure
        return self.stopwatch

    def prepare(self, epoch_iterator: Any) -> None:
        """Does what has to wait until it is known how many batches Keras counts in an epoch."""

    # --- What Keras calls ---

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Variables are ordinary ones: nothing to enter."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        """Returns what Keras is to iterate over."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs one step of Keras, and returns what it returns for the global batch."""
        raise NotImplementedError


class RankStrategy(Strategy):
    """The strategy of a rank: it reads the rank's shares, and runs Keras's step on them.

    Args:
        model: The distributed model.
        backend: How the ranks talk.
        data: Where data come from, one of `sources.MODES`, or `None` for the default.
    """

    def __init__(self, model: keras.Model, backend: Backend, data: str | None = None) -> None:
        super().__init__(model, backend)
        self.read_as(data)
        self._to_group: tuple[tf.data.Dataset, str] | None = None
        with tf.device("CPU:0"), tf.init_scope():
            self._last_count = tf.Variable(0, trainable=False, name="keras_dist_last_count")

    def read_as(self, data: str | None, reason: str = "by kd.distribute") -> None:
        """Says where data come from, `None` for the default; and why, for the log."""
        self.data = data or "split"
        self.reason = reason if data else "the default"

    def last_count(self) -> float:
        """Returns how many examples this rank had in the last step."""
        return float(self._last_count.numpy())

    # --- What Keras calls ---

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self.is_local:
            return dataset
        if isinstance(dataset.element_spec, Share | Shares):  # the script's own `kd.shard`
            self._groups_next = False
            return dataset
        mode, reason = ("sharded", "AutoShardPolicy.OFF") if sources.is_own(dataset) else (self.data, self.reason)
        logger().debug("data: %s (%s), %s", mode, reason, type(dataset).__name__.strip("_"))
        is_grouped, self._groups_next = self._groups_next, False
        if is_grouped and mode != "sharded":  # there a batch is a rank's own anyway
            self._to_group = dataset, mode
            return dataset
        return self._read(dataset, mode)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.MODES[mode](dataset, self._backend)

    def prepare(self, epoch_iterator: Any) -> None:
        dataset, counted = keras_fit.distributed_dataset(epoch_iterator), epoch_iterator.data_adapter.num_batches
        if self._to_group is not None and dataset is self._to_group[0]:
            self._group(epoch_iterator, *self._to_group)
            self._to_group = None
        elif sources.is_own(dataset):
            steps = self._backend.all_gather_object("the number of steps", counted)
            keras_fit.set_steps(epoch_iterator, None if None in steps else max(steps))

    def _group(self, epoch_iterator: Any, dataset: tf.data.Dataset, mode: str) -> None:
        size, batches = self._backend.num_replicas, epoch_iterator.data_adapter.num_batches
        per_epoch = epoch_iterator.steps_per_epoch
        keras_fit.set_dataset(epoch_iterator, self._in_groups(dataset, mode, per_epoch))
        keras_fit.set_steps(epoch_iterator, batches and groups.number_of_steps(batches, size, per_epoch))
        epoch_iterator.steps_per_epoch = per_epoch and groups.number_of_steps(per_epoch, size)

    def _in_groups(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return groups.in_groups(dataset, mode, self._backend, per_epoch)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        (batch,) = args
        if self.is_local:
            return function(batch)
        share = batch if isinstance(batch, Share) else self._share_of(batch)
        if function not in (self._model.train_step, self._model.test_step):
            return self._gather_predictions(function(share.data), share.count)
        self._last_count.assign(share.count)
        step = Step(share.count, share.total, share.fingerprint, self.stopwatch)
        with step_module.entered(step), whole_batch(self._backend, self._model):
            return self._run_and_keep_state(function, share)

    def _share_of(self, batch: Any) -> Share:
        """`train_on_batch` and its like bring a whole batch, which never was in a data set."""
        topology = self._backend.topology
        return take_share(as_tensors(batch), topology.rank, topology.size)

    def _run_and_keep_state(self, function: Callable[..., Any], share: Share) -> Any:
        """Runs a step so that one on an empty share leaves no trace in metrics and statistics."""
        if not may_be_empty(share.total, self._backend.topology.size):
            return function(share.data)
        before = [(variable, tf.identity(variable.value)) for variable in keras_model.state_variables(self._model)]
        outputs = function(share.data)

        def restore() -> Any:
            return tf.group(*[variable.value.assign(value) for variable, value in before])

        restored = tf.cond(share.count > 0, lambda: tf.group(), restore)
        with tf.control_dependencies([restored] if restored is not None else []):
            return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, outputs)

    def _gather_predictions(self, outputs: Any, count: Any) -> Any:
        """Puts the predictions of all ranks behind one another: those of the global batch, in its order."""
        gathered = [
            self._gather(rows_that_count(output, count), f"keras_dist_predictions_{index}")
            for index, output in enumerate(tf.nest.flatten(outputs))
        ]
        return tf.nest.pack_sequence_as(outputs, gathered)

    def _gather(self, rows: Any, name: str) -> Any:
        if isinstance(rows, tf.RaggedTensor):
            lengths = self._backend.all_gather(rows.row_lengths(), f"{name}_lengths")
            return tf.RaggedTensor.from_row_lengths(self._gather(rows.values, f"{name}_values"), lengths)
        return self._backend.all_gather(rows, name)


def rows_that_count(output: Any, count: Any) -> Any:
    """All rows, or none if they are of the example that a rank with an empty share works on."""
    rows = output.nrows() if isinstance(output, tf.RaggedTensor) else tf.shape(output, out_type=tf.int64)[0]
    return output[: tf.where(count > 0, rows, tf.zeros_like(rows))]


def as_tensors(batch: Any) -> Any:
    """Returns a batch of arrays as one of tensors."""

    def tensor(leaf: Any) -> Any:
        is_one = leaf is None or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if is_one else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(tensor, batch)
