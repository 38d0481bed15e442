"""What Keras sees instead of TPUStrategy: datasets of shares of one shape, and steps on all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.tpu import data, step
from keras_dist.backends.tpu.data import Even, Filled
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_optimizers, keras_random, keras_strategy, tf_compat
from keras_dist.data.shares import row_count
from keras_dist.errors import NotSupportedError
from keras_dist.state.metrics import not_additive
from keras_dist.step import step as step_module
from keras_dist.step.draws import whole_draws
from keras_dist.step.optimizer import build_optimizer
from keras_dist.training.rows import as_tensors
from keras_dist.training.strategy import Strategy


class ReplicaStrategy(Strategy):
    """Runs Keras's steps on the replicas of TPUStrategy.

    Args:
        model: The model.
        backend: The TPU.
        strategy: The TPUStrategy.
    """

    def __init__(self, model: keras.Model, backend: Backend, strategy: tf.distribute.Strategy) -> None:
        super().__init__(model, backend)
        self._strategy = strategy
        self._replicas = backend.num_replicas
        self._kinds: list[str] = []
        self._asked_for: Any = None
        self._lengths: dict[str, int] = {}
        self._why_not_filled: str | None = None

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Returns an empty context: the variables are on the TPU, so there is no model of this process alone."""
        return contextlib.nullcontext()

    def scope(self) -> Any:
        return self._strategy.scope()

    # --- Data ---

    @contextlib.contextmanager
    def preparing(self, *kinds: str, first: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Cuts each dataset that Keras iterates over into shares, in this context.

        Args:
            *kinds: The kinds of steps, in the order of the datasets: `"train"`, `"test"`, `"predict"`. The last one is
                the kind of all further datasets.
            first: Called with the first of Keras's iterators.
        """
        outer, self._kinds = self._kinds, list(kinds)
        looks = [first] if first is not None else []

        def prepare(epoch_iterator: Any) -> None:
            # A callback may evaluate this model or train another one, so several contexts may be entered.
            if keras_fit.distributed_dataset(epoch_iterator) is self._asked_for:
                self._asked_for = None
                kind = self._kinds.pop(0) if len(self._kinds) > 1 else self._kinds[0]
                grows = self._groups_next and self._replicas > 1 and kind == "train"
                if grows:
                    data.make_fewer_steps(epoch_iterator, self._replicas)
                if looks:
                    looks.pop()(epoch_iterator)
                self._prepare(epoch_iterator, kind, self._replicas if grows else 1)

        try:
            with keras_fit.epoch_iterators(prepare):
                yield
        except tf.errors.InvalidArgumentError as error:
            data.refuse_lengths(error)
            if (refused := data.refused_sizes(error)) is None:
                raise
            reason = f"; {self._why_not_filled}" if self._why_not_filled else ""
            raise step.not_filled(refused + reason) from error
        finally:
            self._kinds = outer

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        """Returns the dataset unchanged. `_prepare` follows and has more of what Keras knows about it."""
        self.given = self._asked_for = dataset
        return dataset

    def _prepare(self, epoch_iterator: Any, kind: str, batches: int) -> None:
        dataset, adapter = keras_fit.distributed_dataset(epoch_iterator), epoch_iterator.data_adapter
        data.check_shapes(dataset)
        told, are_full = data.batch_size_of(dataset)
        size = told or keras_strategy.batch_size_of(adapter)
        if size is None:
            raise data.unknown_size(dataset)
        if are_full is None:
            are_full = keras_strategy.batches_are_full(adapter)
        if batches > 1:
            size, are_full = size * batches, None
            dataset = dataset.rebatch(size)
        self.build(dataset.element_spec, kind == "train")
        self._note_length(kind, -(-size // self._replicas))
        stops_early = epoch_iterator.steps_per_epoch is not None
        keras_fit.set_dataset(epoch_iterator, self._shares(dataset, size, are_full, kind, stops_early))

    def _note_length(self, kind: str, length: int) -> None:
        if self._lengths.get(kind, length) != length:
            keras_strategy.forget_function(self._model, kind)  # traced for another length
        self._lengths[kind] = length

    def _shares(self, dataset: Any, size: int, are_full: bool | None, kind: str, stops_early: bool) -> Any:
        replicas = self._replicas
        self._why_not_filled = None
        if are_full and size % replicas == 0:
            batches = data.even(dataset, size)
        elif (reason := step.why_not_filled(self._model, kind)) is None:
            batches = data.filled(dataset, size, replicas)
        elif size % replicas or (are_full is False and not stops_early):
            raise step.not_filled(reason)
        else:  # a smaller batch is refused when it comes
            self._why_not_filled = reason
            batches = data.even(dataset, size)

        def of_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return data.shares(batches, replicas, context.input_pipeline_id, context.num_input_pipelines)

        return self._strategy.distribute_datasets_from_function(of_host)

    def build(self, specs: Any, trains: bool) -> None:
        """Creates the variables of a step before it is traced: a step cannot create any.

        Args:
            specs: Specification of a batch.
            trains: True if the optimizer's are needed too.
        """
        with self._strategy.scope():
            if not keras_model.is_built(self._model):
                keras_model.build(self._model, specs)
            optimizer = getattr(self._model, "optimizer", None)
            if trains and optimizer is not None and not optimizer.built:
                build_optimizer(optimizer, self._model.trainable_variables)
        if self._replicas > 1:
            self._check_aggregations()

    def _check_aggregations(self) -> None:
        sums = [variable.path for variable in self._model.variables if variable.aggregation == "sum"]
        if sums:
            raise NotSupportedError(
                "A variable of a layer that is summed over TPU cores is not supported: TensorFlow would sum its old "
                "value too.",
                f"aggregation='sum' of {', '.join(sums)}",
                "Count in a metric, such as keras.metrics.Sum.",
            )
        for variable in self._model.metrics_variables:
            if variable.aggregation == "none":
                raise not_additive(variable.aggregation, variable.path)

    def build_for_batch(self, batch: Any) -> None:
        """Creates the variables for `train_on_batch` and `test_on_batch`."""
        specs = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)), batch
        )
        self.build(specs, True)

    # --- Steps ---

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        """Runs one step of Keras on all replicas."""
        element = batch
        kind = self.kind_of(function)
        is_filled = self._is_filled(element)
        counts = kind is not None and (is_filled or self._replicas > 1)

        traced: list[Any] = []  # by the last core; on all of them it is the same

        def replica(share: Any) -> Any:
            share = _copied(self._share(share))
            if kind is None and (self.exact or self._replicas > 1):
                with step_module.entered(step.step_on(share, self._replicas)):
                    outputs = function(share.batch)
            elif kind is None or not counts:
                outputs = function(share.batch)
            else:
                applied: list[Any] | None = None if self._applied is None else []
                outputs = step.run(self._backend, self._model, function, share, self.logs, kind, applied)
                if applied:
                    traced[:] = applied
            return outputs, share.rows if is_filled else (), step.gradients_of(traced)

        if isinstance(element, Even | Filled):
            element = tf.nest.map_structure(lambda leaf: self._with_length(leaf, kind or "predict"), element)
        with contextlib.ExitStack() as stack:
            if counts:
                stack.enter_context(
                    step.counting(self._backend, self._model, self.prepare_optimizer, is_filled, self.exact)
                )
                stack.enter_context(self.logs.recording())
            else:
                noise = whole_draws(self._backend) if self.exact else keras_random.replica_streams(_replica)
                stack.enter_context(noise)
                stack.enter_context(keras_optimizers.found_optimizers(self.prepare_optimizer))
            outputs, rows, gradients = self._strategy.run(replica, args=(element,))
        if self._applied is not None:
            first = tf.nest.map_structure(lambda leaf: self._parts(leaf)[0], gradients)
            self._applied += step.with_gradients(traced, first)
        if kind is not None:
            return tf.nest.map_structure(lambda leaf: self._parts(leaf)[0], outputs)
        real = tf.concat(self._parts(rows), 0) > 0 if is_filled else None
        return tf.nest.map_structure(lambda leaf: self._together(leaf, real), outputs)

    # --- Verification ---

    def _total_of(self, batch: Any) -> Any:
        if isinstance(batch, Filled):
            return self._parts(batch.totals)[0][0]
        if not isinstance(batch, Even):
            return tf.constant(data.size_of(batch))
        first = tf.nest.flatten(batch.batch)[0]
        return tf.add_n([row_count(part) for part in self._parts(first)])

    def whole(self, batch: Any) -> Any:
        if not isinstance(batch, Even | Filled):
            return as_tensors(batch)
        real = tf.concat(self._parts(batch.rows), 0) > 0 if isinstance(batch, Filled) else None
        return tf.nest.map_structure(lambda leaf: self._together(leaf, real), batch.batch)

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        with tf_compat.strategy_hidden(), keras_strategy.updates_outside_of_replicas():
            return super().plain(function, whole)

    def _with_length(self, leaf: Any, kind: str) -> Any:
        """Restores the length of shares, which a TPU needs and Keras's loop over several steps loses."""
        parts = self._parts(leaf)
        if None not in parts[0].shape:
            return leaf
        parts = [tf.ensure_shape(part, [self._lengths[kind], *part.shape[1:]]) for part in parts]
        return parts[0] if tf.is_tensor(leaf) else tf_compat.per_replica(parts)

    def _is_filled(self, element: Any) -> bool:
        if isinstance(element, Even | Filled):
            return isinstance(element, Filled)
        return data.size_of(element) % self._replicas != 0

    def _share(self, element: Any) -> Even | Filled:
        """Returns the share of the current replica, cut here if the batch does not come from a dataset."""
        if isinstance(element, Even | Filled):
            return element
        return data.share_of_batch(element, _replica(), self._replicas)

    def _parts(self, leaf: Any) -> Any:
        return self._strategy.experimental_local_results(leaf)

    def _together(self, leaf: Any, real: Any) -> Any:
        """Returns the rows of all shares. How many is known when the step runs, as it is in one process."""
        rows = tf.concat(self._parts(leaf), 0)
        rows = rows if real is None else tf.boolean_mask(rows, real)
        return tf.compat.v1.placeholder_with_default(rows, tf.TensorShape([None]).concatenate(rows.shape[1:]))


def _copied(structure: Any) -> Any:
    """Returns copies of tensors. A step's own graph shows what depends on them, see `assigned.py`."""
    return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, structure)


def _replica() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group
