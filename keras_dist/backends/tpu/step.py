"""Steps on a TPU, of `fit` and of a custom loop, and their filler rows, which change no number.

A TPU needs shares of one shape, so smaller ones are filled up with rows that are not examples. Only this backend has
such rows, so this module keeps them out of losses, BatchNormalization and metrics. The rest is the shared `Step`, the
loss rule and the optimizer. Keras's own division by the number of replicas is switched off.
"""

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_strategy, tf_compat, tf_data
from keras_dist.compat.keras_losses import like
from keras_dist.compat.keras_strategy import ReplicaScope
from keras_dist.data.pipeline import map_elements
from keras_dist.data.shares import all_equal, lengths_of, row_count, share_bounds
from keras_dist.errors import NotSupportedError
from keras_dist.step import step as step_module
from keras_dist.step.step import RowRange, Step, ratio
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.loop import ReplicaLoop, as_batches, has_examples

# The errors of a pipeline begin with one of these.
_REFUSED = "keras_dist: a batch of"
_LENGTHS = "keras_dist: a batch with tensors of different lengths"


class Even(NamedTuple):
    """A batch, or a replica's share of one, without filler rows."""

    batch: Any


class Filled(NamedTuple):
    """A batch, or a share of one, that may have filler rows. The step is traced separately for this structure."""

    batch: Any
    rows: Any  # 1 for each real row, 0 for each filler row
    totals: Any  # the number of real rows in the whole batch, once for each row, so that each replica gets it


def checked(dataset: tf.data.Dataset, size: int, filled_for: int | None = None) -> tf.data.Dataset:
    """Returns a dataset of `Even` batches of `size` examples; smaller ones are `Filled` up for some replicas.

    It raises at a batch of another size. The shares are those of other backends.
    """

    def checked(batch: Any) -> Even | Filled:
        lengths, count = lengths_of(batch), row_count(batch)
        have_same_length = tf.debugging.Assert(all_equal(lengths), [_LENGTHS, *lengths])
        with tf.control_dependencies([have_same_length]):
            is_right = count == size if filled_for is None else count <= size
            has_size = tf.debugging.Assert(is_right, [_REFUSED, count, "examples, of", size])
        with tf.control_dependencies([has_size]):
            if filled_for is not None:
                return _filled(batch, size, filled_for)
            return Even(_map(lambda leaf: tf.ensure_shape(tf.identity(leaf), [size, *leaf.shape[1:]]), batch))

    return map_elements(dataset, checked)


def _filled(batch: Any, size: int, replicas: int) -> Filled:
    total, share = row_count(batch), -(-size // replicas)
    start, stop = share_bounds(total, tf.range(replicas)[:, None], replicas)
    index = start + tf.range(share)[None]
    is_real = tf.reshape(index < stop, [-1])
    # Filler rows repeat a real row. From zeros a model may compute NaN, and NaN times 0 is NaN.
    index = tf.reshape(tf.minimum(index, total - 1), [-1])
    rows = share * replicas
    shared = _map(lambda leaf: tf.ensure_shape(tf.gather(leaf, index), [rows, *leaf.shape[1:]]), batch)
    return Filled(shared, tf.cast(is_real, tf.float32), tf.fill([rows], total))


def split(batch: Any, replicas: int) -> Even | Filled:
    """Returns the shares of a batch that does not come from a dataset (`train_on_batch`), cut here, on the host."""
    size, lengths = size_of(batch), lengths_of(batch)
    if all_equal(lengths) is not True:
        raise different_lengths(lengths)
    whole: Even | Filled = Even(batch) if size % replicas == 0 else _filled(batch, size, replicas)
    return _map(lambda leaf: tf_compat.per_replica(tf.split(leaf, replicas)), whole)


def current_replica() -> Any:
    """Returns the index of the replica that computes, `None` in an update of all replicas."""
    context = tf.distribute.get_replica_context()
    return None if context is None else context.replica_id_in_sync_group


def static_size(data: Any) -> int | None:
    """Returns the number of rows in a batch, or in those of an iterator; `None` if that is not known in advance."""
    leaves = tf.nest.flatten(getattr(data, "element_spec", data), expand_composites=True)
    return next((leaf.shape[0] for leaf in leaves if hasattr(leaf, "shape") and len(leaf.shape)), None)


def size_of(batch: Any) -> int:
    """Returns the number of rows of a batch. Raises `NotSupportedError` if batches of several sizes were passed."""
    if (size := static_size(batch)) is None:
        raise NotSupportedError(
            "A TPU needs batches of one size.", "batches of several sizes", "Pass batches of the same size."
        )
    return int(size)


def _map(function: Any, batch: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: function(leaf) if tf.is_tensor(leaf) else leaf, batch)


def refuse(error: Exception, why_not_filled: str | None) -> None:
    """Raises `NotSupportedError` if a pipeline of `checked` has refused a batch."""
    words = str(error)
    if _LENGTHS in words:
        raise different_lengths(words[words.index(_LENGTHS) + len(_LENGTHS) :].split("\n")[0]) from error
    if found := re.search(rf"{_REFUSED}\D*(\d+)\D*(\d+)", words):
        received = f"a batch of {found[1]} examples, where {found[2]} were expected"
        raise not_filled(received + (f"; {why_not_filled}" if why_not_filled else "")) from error


def different_lengths(received: Any) -> NotSupportedError:
    return NotSupportedError(
        "A TPU needs a batch whose tensors have the same length: each core gets the same rows of all of them.",
        f"lengths {received}",
        "Make batches of one size (`batch`, `padded_batch`), or keep a table that belongs to no example in the model.",
    )


def shares(dataset: tf.data.Dataset, replicas: int, pipeline: int, pipelines: int) -> tf.data.Dataset:
    """Cuts each batch of `checked` into shares, for the `replicas` on host `pipeline` of `pipelines`."""
    own = replicas // pipelines

    def cut(leaf: Any) -> Any:
        pieces = tf.reshape(leaf, [replicas, leaf.shape[0] // replicas, *leaf.shape[1:]])
        return pieces[pipeline * own : (pipeline + 1) * own]

    return dataset.map(lambda element: _map(cut, element)).unbatch().prefetch(tf.data.AUTOTUNE)


def batch_size_of(dataset: tf.data.Dataset) -> tuple[int | None, bool | None]:
    """Returns the number of examples of a full batch, and whether all batches are full; `None` if unknown."""
    # The dataset is not iterated over, since that would be another epoch.
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape.rank and first.shape[0] is not None:
        return int(first.shape[0]), True
    stage = tf_data.last_stage(dataset)
    while stage.kind in ("map", "repeat", "prefetch", "options"):
        stage = tf_data.last_stage(stage.input)
    size = stage.arguments["batch_size"] if stage.kind == "batch" else None
    if not isinstance(size, int):
        return None, None
    examples = int(stage.input.cardinality())  # type: ignore[union-attr]
    known = examples >= 0 or examples == tf.data.INFINITE_CARDINALITY
    return int(size), examples < 0 or examples % int(size) == 0 if known else None


def check_shapes(dataset: tf.data.Dataset) -> None:
    """Raises `NotSupportedError` if a shape varies in more than the batch size, or data are no numbers."""
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if not isinstance(spec, tf.OptionalSpec)]
    lengths = {spec.shape[0] for spec in specs if isinstance(spec, tf.TensorSpec) and spec.shape.rank} - {None}
    if len(lengths) > 1:
        raise different_lengths(sorted(lengths))
    for spec in specs:
        dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank and None not in spec.shape[1:]
        if not dense or spec.dtype == tf.string:
            raise NotSupportedError(
                "A TPU needs numbers in tensors of a fixed shape.",
                f"{spec} in the data",
                "Pad each example in the dataset (`padded_batch`, `to_tensor(shape=...)`), and turn strings into "
                "numbers there (StringLookup, TextVectorization in `map`).",
            )


def make_fewer_steps(epoch_iterator: Any, batches: int) -> None:
    """Reduces the steps of an epoch to one for each `batches` batches of the script."""
    steps, counted = epoch_iterator.steps_per_epoch, epoch_iterator.data_adapter.num_batches
    if steps and steps % batches:  # a step would have batches of two epochs
        raise NotSupportedError(
            "With batch='per_replica' on a TPU `steps_per_epoch` must be a multiple of the number of cores.",
            f"steps_per_epoch={steps}, {batches} cores",
            f"For example steps_per_epoch={-(-steps // batches) * batches}.",
        )
    keras_fit.set_steps(epoch_iterator, counted and -(-counted // batches))
    epoch_iterator.steps_per_epoch = steps and steps // batches


def unknown_size(dataset: tf.data.Dataset) -> NotSupportedError:
    return NotSupportedError(
        "A TPU needs batches of a known size.",
        f"{type(dataset).__name__.strip('_')} with {dataset.element_spec}",
        "End the dataset in `.batch(n)` or `.batch(n, drop_remainder=True)`. Turn a Python generator into a dataset "
        "by tf.data.Dataset.from_generator.",
    )


def _current() -> Step:
    step = step_module.current()
    assert step is not None
    return step


def _current_rows() -> Any:
    step = step_module.current()
    assert isinstance(step, FilledStep)
    return step.rows


@contextlib.contextmanager
def counting(
    backend: Backend, model: keras.Model, prepare_optimizer: Callable[[Any], None], is_filled: bool, exact: bool | None
) -> Iterator[None]:
    """Makes losses, metrics and statistics those of the real rows of the global batch, while replicas run in it."""
    with (
        keras_strategy.unscaled_losses(),
        whole_batch(backend, prepare_optimizer, model, _without_filler_rows, exact),
        keras_strategy.weighted_averages(model, lambda: _current().count, lambda: _current().part),
        contextlib.ExitStack() as stack,
    ):
        if is_filled:
            metrics = keras_model.compiled_metrics(model)
            for metric in metrics:
                update = functools.partial(_update_by_rows, metric, metric.update_state)
                stack.enter_context(keras_model.attached(metric, "update_state", update))
            stack.enter_context(keras_strategy.metric_values(metrics, _check_rows))
        yield


def gradients_of(applied: list[Any]) -> list[Any]:
    """Returns the gradients in `Step.applied`, dense, and `()` for `None`: a replica returns tensors only."""
    return [[() if own is None else tf.convert_to_tensor(own) for own in gradients] for _, gradients, _ in applied]


def with_gradients(applied: list[Any], of_cores: list[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns `Step.applied` with the gradients that the first core has returned."""
    values = tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], of_cores)
    return [
        (optimizer, [None if isinstance(gradient, tuple) else gradient for gradient in gradients], variables)
        for (optimizer, _, variables), gradients in zip(applied, values, strict=True)
    ]


class TPUStep(Step):
    """A step on a share without filler rows."""

    @property
    def dtype(self) -> tf.DType:
        return tf.float64 if keras.config.floatx() == "float64" else tf.float32  # a TPU computes float64 in software


@dataclasses.dataclass
class FilledStep(TPUStep):
    """A step on a share that may have filler rows."""

    rows: Any = None  # float vector: 1 for each real row, 0 for a filler row

    def mean_over_examples(self, loss: Any) -> Any:
        return loss * ratio(tf.size(self.rows), self.count, loss.dtype)

    def denominators(self, summands: Any) -> tuple[Any, Any]:
        return tf.reduce_sum(summands), tf.reduce_sum(summands * like(self.rows, summands))

    def check_concatenated(self, rows: Any) -> None:
        raise NotSupportedError(
            "A TPU can't draw for batches that a step concatenates if cores have different numbers of examples.",
            f"a tensor of {rows} rows with exact=True",
            "Use batches of a multiple of the number of cores: dataset.batch(n, drop_remainder=True).",
        )


def step_on(element: Even | Filled, replicas: int) -> TPUStep:
    """Returns the step on a share, in the context of its replica."""
    data, replica, none = element.batch, current_replica(), tf.constant(0.0)
    length = size_of(data)
    total = element.totals[0] if isinstance(element, Filled) else tf.constant(length * replicas)
    # What is drawn for a row does not depend on how many rows follow.
    place = RowRange(share_bounds(total, replica, replicas)[0], replicas * length)
    if isinstance(element, Even):
        return TPUStep(tf.constant(length), total, none, replica=replica, data=data, place=place)
    count = tf.cast(tf.reduce_sum(element.rows), tf.int32)
    return FilledStep(count, total, none, replica=replica, data=data, place=place, rows=element.rows)


def _without_filler_rows(values: Any) -> Any:
    """Returns the losses of single entries, 0 in filler rows."""
    step, values = step_module.current(), tf.convert_to_tensor(values)
    if not isinstance(step, FilledStep):
        return values
    if values.shape.rank == 0 or values.shape[0] != step.rows.shape[0]:
        raise not_filled(f"a loss of shape {values.shape} has no row for each of {step.rows.shape[0]} examples")
    return tf.where(like(step.rows, values) > 0, values, tf.zeros_like(values))


def _check_rows(metric: Any, values: Any) -> None:
    if values.shape.rank == 0:
        raise not_filled(f"the metric {metric.name!r} is one number for all examples")


def _update_by_rows(
    metric: Any, update_state: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    rows, is_r2 = _current_rows(), isinstance(metric, keras.metrics.R2Score)
    if sample_weight is None:  # the user's weights are 0 for filler rows already
        mask = keras_model.mask_of(y_pred)
        sample_weight = rows if mask is None else like(rows, mask) * tf.ones_like(mask, tf.float32)
    sample_weight = tf.identity(sample_weight)
    before = tf.identity(metric.num_samples.value) if is_r2 else None
    updated = update_state(y_true, y_pred, sample_weight=sample_weight)
    if is_r2:  # Keras's adjusted R2 counts all examples, also those of weight 0
        counted = metric.num_samples.value - before
        metric.num_samples.assign(before + counted * tf.cast(tf.reduce_sum(rows), counted.dtype) // rows.shape[0])
    if not sample_weight.consumers():
        raise not_filled(f"the metric {metric.name!r} makes no use of `sample_weight`")
    return updated


def refuse_filler_rows(received: str) -> None:
    if isinstance(step_module.current(), FilledStep):
        raise not_filled(received)


def why_not_filled(model: keras.Model, kind: str) -> str | None:
    """Returns why filler rows would count in a model's steps of a kind, `None` if they would not."""
    if kind == "predict":
        return None
    for name in (f"{kind}_step", "compute_loss"):
        if keras_fit.is_overridden(model, name):
            return f"{type(model).__name__} has a custom {name}"
    keeping = keras_strategy.layers_with_metrics(model)
    return f"the layer {keeping[0]!r} has a metric" if keeping else None


def not_filled(received: str) -> NotSupportedError:
    return NotSupportedError(
        "A batch is smaller than the others, or no multiple of the number of TPU cores. A TPU needs shares of one "
        "size, so it fills them up with rows of weight 0, and this model would count these rows.",
        received,
        "Use a batch size that divides the number of examples and is a multiple of the number of TPU cores, or "
        "`.batch(n, drop_remainder=True)`.",
    )


_SCOPE: contextvars.ContextVar[ReplicaScope | None] = contextvars.ContextVar("keras_dist_core", default=None)


class CoreLoop(ReplicaLoop):
    """The functions of a custom training loop on the cores of a TPU.

    `kd.shard` returns whole batches, and `kd.run` cuts them: filler rows would count in code that the library doesn't
    know, so all shares have the same number of examples.
    """

    def __init__(self, backend: Backend) -> None:
        self._strategy, self._cores = backend.strategy, backend.num_replicas
        super().__init__(backend)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        check_shapes(dataset)
        size, are_full = batch_size_of(dataset)
        if size is None:
            raise unknown_size(dataset)
        if size % self._cores or are_full is False:
            last = ", and a smaller one at the end" if are_full is False else ""
            raise not_filled(f"kd.shard of batches of {size} examples{last}, on {self._cores} core(s)")
        return checked(dataset, size).map(lambda element: element.batch)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`. Returns the cores' outputs as `tf.distribute.DistributedValues`, for `kd.reduce`."""
        if tf.executing_eagerly():
            raise NotSupportedError(
                "A TPU runs whole steps, which must be traced.",
                "kd.run outside of a tf.function",
                "Call it in a function with @tf.function.",
            )
        args = as_batches(args)
        self._sizes = [size_of(arg) for arg in args if has_examples(arg)]
        if self._cores == 1:
            return self._strategy.run(function, args=args)
        return self._run(function, args)

    def _as_shares(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args  # whole: `_run_on_shares` cuts them

    def _total_of(self, args: tuple[Any, ...]) -> Any:
        return tf.constant(self._sizes[0])

    def _run_on_shares(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        traced: list[Any] = []  # by the last core; on all of them it is the same

        def replica(*args: Any) -> Any:
            current = step_on(Even(args), self._cores)
            current.applied = None if self._applied is None else []
            scope = ReplicaScope(tf.constant(self._sizes[0] // self._cores), ())
            with tf_compat.context_value(_SCOPE, scope), step_module.entered(current):
                with scope, keras_strategy.initialized_at_once():
                    outputs = function(*args)
                _assign_combined(self._backend, scope)
            traced[:] = current.applied or []
            return outputs, gradients_of(traced)

        shares = tuple(self._cut(arg) if has_examples(arg) else arg for arg in args)
        with keras_strategy.unscaled_losses(), whole_batch(self._backend, self.prepare_found, exact=self.exact):
            outputs, gradients = self._strategy.run(replica, args=shares)
        if self._applied is not None:
            self._applied += with_gradients(traced, gradients, self._strategy)
        return outputs

    def _cut(self, batch: Any) -> Any:
        element = split(batch, self._cores)
        if isinstance(element, Filled):
            raise not_filled(f"kd.run of a batch of {size_of(batch)} examples, on {self._cores} cores")
        return element.batch

    def _reduce(self, operation: str, value: Any) -> Any:
        if not isinstance(value, tf.distribute.DistributedValues):
            return value
        total = tf.add_n(self._strategy.experimental_local_results(value))
        return total if operation == "sum" else total / self._cores

    # --- Verification ---

    def whole(self, args: tuple[Any, ...]) -> Any:
        return args

    def plain(self, function: Callable[..., Any], whole: tuple[Any, ...]) -> Any:
        with tf_compat.strategy_hidden(), keras_strategy.updates_outside_of_replicas():
            function(*whole)


def once(backend: Backend, function: Callable[[], Any]) -> Any:
    """Calls a function that every replica calls with the same values: an optimizer's `apply`."""
    if (scope := _SCOPE.get()) is None:
        return function()
    _assign_combined(backend, scope)
    with keras_model.outside_stateless_scope():
        return function()


def _assign_combined(backend: Backend, scope: ReplicaScope) -> None:
    """Assigns what the replicas have assigned to variables: of floats the mean by examples, else the first one's."""
    current = _current()
    for variable in scope.assigned():
        value = scope.get_current_value(variable)
        if keras_strategy.is_float(variable):
            (value,) = current.weigh([value])
            value = backend.all_reduce_exact(value, current.next_name("variables"))
        keras_strategy.assign(variable, value)
    scope.clear()
