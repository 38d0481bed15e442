"""The object that Keras takes for a `tf.distribute.Strategy`: the part that all engines share, and that of a rank.

Keras calls a model's `distribute_strategy` to distribute each dataset and to run each step. So it acts below an
overridden `fit`, and above an overridden `train_step`, which gets its data in the usual form.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.comm.replicas import ReplicaBackend, mean_of_shares
from keras_dist.compat import keras_fit, keras_layers
from keras_dist.compat.keras_model import attached
from keras_dist.data import sources
from keras_dist.data.pipeline import fold
from keras_dist.data.shares import Share, Shares, may_be_empty, note_whole_batch, row_count, take_share, take_shares
from keras_dist.logging import logger
from keras_dist.state import weights
from keras_dist.state.weights import Loss
from keras_dist.step import step as step_module
from keras_dist.step.gathering import placed
from keras_dist.step.metrics import Logs, flat
from keras_dist.step.step import Seen, Step, Stopwatch, check_shapes
from keras_dist.step.whole_batch import combined_assignments, compiled_layers, whole_batch
from keras_dist.training.interrupts import interrupts_of
from keras_dist.training.own_code import (
    FirstRows,
    as_tensors,
    batch_of_all_ranks,
    batch_of_shares,
    gather_rows,
    real_rows,
)
from keras_dist.training.verification import Verifications, Verified


class Strategy(Verified):
    """What Keras takes for a `tf.distribute.Strategy`, on every engine."""

    num_replicas_in_sync = 1  # `run` returns one value for all replicas

    def __init__(self, model: keras.Model, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self.interrupts = interrupts_of(backend)
        self.is_local = False
        self.verifications = Verifications()  # of the kinds of steps that are still verified
        self.first_rows: dict[str, FirstRows] = {}  # of the kinds of steps that will be checked
        self.stopwatch: Stopwatch | None = None
        self.loss_of_rank: Loss | None = None  # of the last epoch, before that of all ranks was known
        self.given: Any = None  # the dataset that Keras has passed last
        self.distribute: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None  # as it was, a part of it
        self.element_spec: Any = None  # of the script's own batches, from which Keras builds a model
        self.prepare_optimizer: Callable[[Any], None] = lambda optimizer: None  # set by the wrapper of the model
        self._groups_next = False
        self.extended = keras_fit.StrategyExtension()
        self.logs = Logs(model, backend.topology.is_chief)

    @property
    def counters(self) -> list[tf.Variable]:
        """The variables that a step assigns, beside the variables of the model and its optimizers."""
        return []

    def local(self) -> contextlib.AbstractContextManager[None]:
        """In this context the model is an ordinary one in this process. The other ranks take no part."""
        return self._local()

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        with attached(self, "is_local", True), step_module.entered(None):
            yield

    @contextlib.contextmanager
    def grouping(self, groups_next: bool) -> Iterator[None]:
        """In this context, each step takes a batch per replica of the next dataset, which is the training data."""
        with attached(self, "_groups_next", groups_next):
            yield

    def start_stopwatch(self) -> Stopwatch:
        """Returns the stopwatch that measures, from now on, how long this rank waits in each step."""
        if self.stopwatch is None:
            self.stopwatch = Stopwatch()
            keras_fit.set_functions(self._model, {})  # the traced ones do not measure
        return self.stopwatch

    def describe_share(self) -> str:
        """Returns what a step sees, for the error of a step."""
        size = self._backend.num_replicas
        return f"a step sees the share of its replica only, about n / {size} of the n rows of a batch."

    def prepare(self, epoch_iterator: Any) -> None:
        """Called once Keras knows the number of batches in an epoch."""

    def kind_of(self, function: Callable[..., Any]) -> str | None:
        """Returns `"train"` or `"test"` if a function is the model's step of that kind, `None` for `predict`."""
        steps = {"train": self._model.train_step, "test": self._model.test_step}
        return next((kind for kind, step in steps.items() if function == step), None)

    # --- What Keras calls ---

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Does nothing: variables are ordinary ones."""
        return contextlib.nullcontext()

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        raise NotImplementedError

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs one step of Keras and returns its result for the global batch."""
        (batch,) = args
        if self.is_local:
            return function(batch)
        if (rows := self.first_rows.get(self.kind_of(function) or "")) is not None:
            rows.keep(self._shares_of(batch))
        if (verification := self.verifications.get(self.kind_of(function) or "predict")) is None:
            return self._run(function, batch)
        step = functools.partial(self._run, function, batch)
        return verification.run(self, function, batch, self._total_of(batch), step)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        raise NotImplementedError

    def _shares_of(self, batch: Any) -> Sequence[Share]:
        """Returns the shares of the replicas in this process."""
        raise NotImplementedError

    def _total_of(self, batch: Any) -> Any:
        """Returns the number of examples in a batch, an int32 scalar."""
        raise NotImplementedError

    # --- What a verification asks for, see `verification.Verified` ---

    def distributed(self, function: Callable[..., Any], batch: Any, applied: list[Any]) -> Any:
        with self._trying_out(applied):
            return self._unknown_logs(function, self._run(function, batch))

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        with compiled_layers(self._model, self._backend.topology.is_chief):
            return self._unknown_logs(function, function(whole))

    def _unknown_logs(self, function: Callable[..., Any], outputs: Any) -> Any:
        """Returns the logs of a step that don't come from metrics; predictions as they are."""
        kind = self.kind_of(function)
        if kind is None or not isinstance(outputs, dict):
            return outputs if kind is None else {}
        return {name: log for name, log in flat(outputs).items() if not self.logs.is_known(kind, name)}


class RankStrategy(Strategy):
    """The strategy of a rank: it reads the rank's shares and runs Keras's step on them."""

    def __init__(self, model: keras.Model, backend: Backend, data: str | None = None) -> None:
        super().__init__(model, backend)
        self.has_run = False
        self._step: Step | None = None  # the last one
        self.read_as(data)
        self._to_group: tuple[tf.data.Dataset, str] | None = None
        self._constants: list[tuple[str, str, str]] = []
        with tf.device("CPU:0"), tf.init_scope():
            self._last_count = tf.Variable(0, trainable=False, name="keras_dist_last_count")
            self._fingerprint = tf.Variable(0, dtype=tf.int64, trainable=False, name="keras_dist_fingerprint")
            self._has_whole_batches = tf.Variable(False, trainable=False, name="keras_dist_has_whole_batches")

    def read_as(self, data: str | None, reason: str = "by kd.distribute") -> None:
        """Sets who reads the data, `None` for the default, and the reason for the log."""
        self.data = data or "split"
        self.reason = reason if data else "the default"

    @property
    def counters(self) -> list[tf.Variable]:
        return [self._last_count, self._fingerprint, self._has_whole_batches]

    def describe_share(self) -> str:
        if self.data == "sharded":
            return "a step sees the batches of its rank's own shard only."
        return super().describe_share()

    def last_count(self) -> float:
        return float(self._last_count.numpy())

    def seen(self) -> Seen:
        """Returns what the steps since the last call have computed with."""
        seen = Seen(int(self._fingerprint.numpy()), self._constants)
        self._fingerprint.assign(0)
        self._constants = []
        return seen

    def note_whole_batches(self) -> None:
        """Warns if the batch of the last step could not be cut."""
        if self._has_whole_batches.numpy():
            note_whole_batch(self._backend.topology.is_chief)

    # --- What Keras calls ---

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        self.given, self.element_spec, self.distribute = dataset, dataset.element_spec, None
        if self.is_local:
            return dataset
        if isinstance(dataset.element_spec, Share | Shares):  # from `kd.shard`
            self._groups_next = False
            return dataset
        mode, reason = ("sharded", "AutoShardPolicy.OFF") if sources.is_sharded(dataset) else (self.data, self.reason)
        logger().debug("data: %s (%s), %s", mode, reason, type(dataset).__name__.strip("_"))
        is_grouped, self._groups_next = self._groups_next, False
        if is_grouped and mode != "sharded":  # each rank passes its own batches anyway
            self._to_group = dataset, mode
            return dataset
        if mode == "split":
            self.distribute = functools.partial(self._read, mode=mode)
        return self._read(dataset, mode)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.MODES[mode](dataset, self._backend)

    def prepare(self, epoch_iterator: Any) -> None:
        dataset, counted = keras_fit.distributed_dataset(epoch_iterator), epoch_iterator.data_adapter.num_batches
        if self._to_group is not None and dataset is self._to_group[0]:
            size, per_epoch = self._backend.num_replicas, epoch_iterator.steps_per_epoch
            keras_fit.set_dataset(epoch_iterator, self._group_batches(*self._to_group, per_epoch))
            keras_fit.set_steps(epoch_iterator, counted and sources.number_of_steps(counted, size, per_epoch))
            epoch_iterator.steps_per_epoch = per_epoch and sources.number_of_steps(per_epoch, size)
            self._to_group = None
        elif sources.is_sharded(dataset):
            steps = self._backend.all_gather_object("the number of steps", counted)
            keras_fit.set_steps(epoch_iterator, None if None in steps else max(steps))

    def _group_batches(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return sources.group_batches(dataset, mode, self._backend, per_epoch)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        self.has_run = True
        (share,) = self._shares_of(batch)
        step = Step.of(share, self._backend.topology.rank, self.stopwatch if self._applied is None else None)
        self._step, step.applied = step, self._applied
        fold(self._fingerprint, share.fingerprint)
        if self.exact:
            share = share._replace(data=placed(self._backend, step, share.data))
        with step_module.entered(step), self._whole_batch(), self.logs.recording():
            if (kind := self.kind_of(function)) is None:
                tried, predictions = "" if self._applied is None else "tried_", function(share.data)
                rows = [
                    gather_rows(self._backend, real_rows(leaf, share.count), f"keras_dist_{tried}predictions_{index}")
                    for index, leaf in enumerate(tf.nest.flatten(predictions))
                ]  # of all ranks, in the order of the global batch
                outputs = tf.nest.pack_sequence_as(predictions, rows)
            else:
                self._last_count.assign(share.count)
                self._has_whole_batches.assign(share.is_whole)
                outputs = self._run_and_keep_state(lambda data: self.logs.note(kind, function(data)), share, step)
        if self._applied is None:
            self._constants += weights.of_step(self._model, share.data)
        return outputs

    def _whole_batch(self) -> contextlib.AbstractContextManager[None]:
        return whole_batch(self._backend, self.prepare_optimizer, self._model, exact=self.exact)

    def _total_of(self, batch: Any) -> Any:
        return batch.total if isinstance(batch, Share) else row_count(as_tensors(batch))

    def whole(self, batch: Any) -> Any:
        return batch_of_all_ranks(self._backend, batch) if isinstance(batch, Share) else as_tensors(batch)

    def _unknown_logs(self, function: Callable[..., Any], outputs: Any) -> Any:
        """Returns logs of the step on shares as averages over the ranks."""
        logs, step = super()._unknown_logs(function, outputs), self._step
        if self._applied is None or step is None or not isinstance(logs, dict) or self.kind_of(function) is None:
            return logs
        names = sorted(name for name, log in logs.items() if tf.is_tensor(log) and log.dtype.is_floating)
        weighted = step.weigh([logs[name] for name in names])
        sums = [self._backend.all_reduce_exact(own, step.next_name("logs")) for own in weighted]
        return {**logs, **dict(zip(names, sums, strict=True))}

    def state_of_all(self, variable: Any) -> Any:
        own = super().state_of_all(variable)
        if variable.aggregation != "sum" or self._step is None:
            return own
        total = self._backend.all_reduce_exact(tf.cast(own, tf.float64), self._step.next_name("state"))
        return tf.cast(total, own.dtype)

    def table_of_all(self, table: Any) -> Any:
        return self._backend.all_gather(table, "keras_dist_verified_table")

    def _shares_of(self, batch: Any) -> Sequence[Share]:
        """Cuts a whole batch, which `train_on_batch` and similar methods pass without a dataset."""
        topology = self._backend.topology
        return [batch if isinstance(batch, Share) else take_share(as_tensors(batch), topology.rank, topology.size)]

    def _run_and_keep_state(self, function: Callable[..., Any], share: Share, step: Step) -> Any:
        """Runs a step. If the share is empty, it does not change metrics, and its placeholder no statistics."""
        if not may_be_empty(share):
            with combined_assignments(self._backend, self._model, step):
                return function(share.data)
        metrics = [(variable, tf.identity(variable.value)) for variable in self._model.metrics_variables]
        statistics = [(v, tf.identity(v.value)) for v in keras_layers.statistics_of_a_share(self._model, self.exact)]
        with combined_assignments(self._backend, self._model, step):
            outputs = function(share.data)
        is_empty = share.count == 0
        restored = [_restore_if(is_empty, step, metrics), _restore_if(is_empty & ~share.is_whole, step, statistics)]
        with tf.control_dependencies([operation for operation in restored if operation is not None]):
            return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, outputs)


class ReplicaStrategy(RankStrategy):
    """The strategy of a process with several replicas, which read one dataset."""

    _backend: ReplicaBackend

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.split_for_replicas(dataset, self._backend.replicas)

    def _group_batches(self, dataset: tf.data.Dataset, mode: str, per_epoch: int | None) -> tf.data.Dataset:
        return sources.group_for_replicas(dataset, self._backend.replicas, per_epoch)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        self.has_run = True
        shares = Shares(tuple(self._shares_of(batch)))
        if (kind := self.kind_of(function)) is None:
            with self._whole_batch():
                outputs = self._backend.run(self._step_on(shares, function), shares.counts)
            return _concatenate(outputs, shares)
        self._last_count.assign(shares.parts[0].total)
        self._has_whole_batches.assign(shares.parts[0].is_whole)
        with self._whole_batch(), self.logs.recording():
            step = self._step_on(shares, lambda data: self.logs.note(kind, function(data)))
            outputs = self._backend.run(step, shares.counts, self._model.metrics_variables)
        if not isinstance(outputs[-1], dict):
            return outputs[-1]
        # The last replica's metrics include the other shares.
        return {
            name: last if self.logs.is_known(kind, name) else _combined([logs[name] for logs in outputs], shares.counts)
            for name, last in outputs[-1].items()
        }

    def _shares_of(self, batch: Any) -> Sequence[Share]:
        return (batch if isinstance(batch, Shares) else take_shares(as_tensors(batch), self._backend.replicas)).parts

    # --- Verification ---

    def _total_of(self, batch: Any) -> Any:
        return batch.parts[0].total if isinstance(batch, Shares) else super()._total_of(batch)

    def whole(self, batch: Any) -> Any:
        return batch_of_shares(batch.parts) if isinstance(batch, Shares) else as_tensors(batch)

    def _step_on(self, shares: Shares, function: Callable[..., Any]) -> Callable[[int], Any]:
        def run(index: int) -> Any:
            share = shares.parts[index]
            step = Step.of(share, index)
            step.applied = self._applied if index == 0 else None
            data = placed(self._backend, step, share.data) if self.exact else share.data
            with step_module.entered(step):
                return function(data)

        return run


def _combined(leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
    """Returns the mean of the replicas' floats. Otherwise the last value: that replica has seen the other shares."""
    is_float = tf.is_tensor(leaves[-1]) and leaves[-1].dtype.is_floating
    return mean_of_shares(leaves, counts) if is_float else leaves[-1]


def _concatenate(outputs: list[Any], shares: Shares) -> Any:
    def concatenate(*by_replica: Any) -> Any:
        rows = [real_rows(rows, count) for rows, count in zip(by_replica, shares.counts, strict=True)]
        if isinstance(rows[0], tf.Tensor):
            rows[0] = check_shapes(tf.stack([tf.shape(part)[1:] for part in rows]), rows[0])
        return tf.concat(rows, 0)

    return tf.nest.map_structure(concatenate, *outputs)


def _restore_if(condition: Any, step: Step, before: Sequence[tuple[Any, Any]]) -> Any:
    """Assigns to variables what they had before the step, unless they were assigned what the whole batch gives."""
    values = [(variable, value) for variable, value in before if id(variable) not in step.whole]
    return tf.cond(
        condition, lambda: tf.group(*[variable.value.assign(value) for variable, value in values]), lambda: tf.group()
    )
