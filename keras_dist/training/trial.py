"""Trial steps: what a step assigns is undone, and the numbers that it computes are compared.

By default a step that runs code other than Keras's is compared with one process. The first step of `fit` and of
`evaluate` keeps the first rows of its batch, a few of each replica. After it, a trial step runs on these rows eagerly,
on shares and in one place (`verification.py`). So nothing is traced for it, and no whole batch is gathered.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_random, tf_compat, tf_graphs
from keras_dist.compat.keras_model import Attributes, attached
from keras_dist.data import sources
from keras_dist.data.shares import Share, first_rows
from keras_dist.logging import without_notes_of_tensorflow
from keras_dist.state import snapshot
from keras_dist.step.optimizer import build_at_once, parts_of, variables_of
from keras_dist.step.step import check_shapes

# Differences below this part of the group's largest value are rounding, where values cancel each other out.
_FLOOR = 0.1
_FACTOR = 0.2  # of the error may be left when a factor explains it
_AMPLIFIED = 10  # rounding errors of a step, in terms of those that come from rounding its weights and gradients once


def epsilon(dtype: Any) -> float:
    dtype = tf.as_dtype(dtype)
    return float(np.spacing(np.ones((), dtype.as_numpy_dtype))) if dtype.is_floating else 0.0


def precisions_of_float32() -> set[str]:
    """Returns the types whose precision the devices use when they multiply float32.

    A TPU rounds to bfloat16, a GPU with TF32 to as many bits as float16 has.
    """
    if tf.config.list_logical_devices("TPU"):
        return {"bfloat16"}
    if tf.config.list_logical_devices("GPU") and tf.config.experimental.tensor_float_32_execution_enabled():
        return {"float16"}
    return {"float32"}


class Quantity(NamedTuple):
    """Something that a step computes."""

    name: str  # for messages, such as `"the gradient of 'dense/kernel'"`
    group: str  # quantities whose sizes it is judged by: the gradients of one update, the state of one metric
    value: Any  # tensor


class Difference(NamedTuple):
    """The error of a quantity."""

    name: str
    group: str
    error: float  # the largest difference of a number
    size: float  # the largest number in one process
    factor: float  # if the quantity is about that of one process times a factor: this factor, otherwise NaN
    is_wrong: bool  # the difference is more than rounding
    relative: float  # the error in terms of the sizes by which it is judged


def table_of(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> Any:
    """Returns a float64 tensor of shape `(n, 4)`, a row for each quantity: error, size, factor, and what is left of the
    error without the factor.
    """
    with tf_compat.functions_run_eagerly(False):  # one call for each quantity, not forty small operations
        rows = [_row(one.value, other.value) for one, other in zip(expected, actual, strict=True)]
    return tf.reshape(tf.stack(rows), [-1, 4]) if rows else tf.zeros([0, 4], tf.float64)


def _row(expected: Any, actual: Any) -> Any:
    have_same_shape = tf.constant(False)
    if expected.shape.rank == actual.shape.rank:
        have_same_shape = tf.reduce_all(tf.shape(expected) == tf.shape(actual))
    if expected.dtype in (tf.string, tf.bool):
        same = tf.cond(have_same_shape, lambda: tf.reduce_all(expected == actual), lambda: tf.constant(False))
        error = tf.where(same, tf.zeros([], tf.float64), tf.ones([], tf.float64))
        return tf.stack([error, tf.zeros_like(error), error * np.nan, error])
    dtype = expected.dtype if expected.dtype == actual.dtype == tf.float32 else tf.float64
    flat = [tf.reshape(tf.cast(value, dtype), [-1]) for value in (expected, actual)]
    infinite = tf.constant([np.inf, 0, np.nan, np.inf], tf.float64)
    tolerated = tf.constant(epsilon(expected.dtype) ** 0.5, tf.float64)  # never taken for wrong
    return tf.cond(have_same_shape, lambda: _compared(dtype)(*flat, tolerated), lambda: infinite)


@functools.cache
def _compared(dtype: tf.DType) -> Any:
    """Returns a function that returns a row of `table_of` for two vectors and what is tolerated of their size."""

    def compared(expected: Any, actual: Any, tolerated: Any) -> Any:
        are_same = (expected == actual) | (tf.math.is_nan(expected) & tf.math.is_nan(actual))
        size = _largest(tf.where(tf.math.is_finite(expected), expected, tf.zeros_like(expected)))
        error = _largest(tf.where(are_same, tf.zeros_like(expected), actual - expected))

        def explained() -> Any:
            wide, other = tf.cast(expected, tf.float64), tf.cast(actual, tf.float64)
            factor = tf.math.divide_no_nan(tf.reduce_sum(wide * other), tf.reduce_sum(wide * wide))
            return tf.stack([factor, _largest(other - factor * wide)])

        unneeded = tf.constant([np.nan, np.inf], tf.float64)
        factor = tf.cond(error > tolerated * size, explained, lambda: unneeded)
        return tf.concat([[error, size], factor], 0)

    vector = tf.TensorSpec([None], dtype)
    return tf.function(compared, (vector, vector, tf.TensorSpec([], tf.float64)), autograph=False)


def _largest(values: Any) -> Any:
    largest = tf.cast(tf.reduce_max(tf.abs(values)), tf.float64)
    return tf.where(tf.math.is_nan(largest), tf.constant(np.inf, tf.float64), tf.maximum(largest, 0.0))


def differences_in(
    quantities: Sequence[Quantity], table: np.ndarray, precision: float, disturbed: np.ndarray | None = None
) -> list[Difference]:
    """Returns how far each quantity is off.

    `table`, see `table_of`, has a row for each quantity. So has `disturbed`, if a step with weights that were rounded
    once more was computed. Relative errors up to `precision` are rounding.
    """
    sizes = dict[str, float]()
    for quantity, row in zip(quantities, table, strict=True):
        sizes[quantity.group] = max(sizes.get(quantity.group, 0.0), row[1])
    # What each error is measured by: the size of its quantity, and a part of the largest in the group.
    scales = [row[1] + _FLOOR * sizes[quantity.group] for quantity, row in zip(quantities, table, strict=True)]
    amplified = dict[str, float]()  # rounding errors of each group
    if disturbed is not None:
        for quantity, scale, (error, *_) in zip(quantities, scales, disturbed, strict=True):
            relative = _AMPLIFIED * error / scale if error and scale else 0.0
            amplified[quantity.group] = max(amplified.get(quantity.group, 0.0), relative)
    differences = []
    for quantity, scale, (error, size, factor, rest) in zip(quantities, scales, table, strict=True):
        allowed = 0.0 if quantity.value.dtype.is_integer else max(precision, amplified.get(quantity.group, 0.0)) * scale
        relative = error / scale if error and scale else 0.0
        is_wrong = not error <= allowed
        factor = factor if is_wrong and rest <= _FACTOR * error else np.nan
        differences.append(Difference(quantity.name, quantity.group, error, size, factor, is_wrong, relative))
    return differences


class Trial:
    """Runs functions from the same state.

    Eager functions may change the `attributes` and `others`, handles of variables that are not Keras's.
    """

    def __init__(self, others: Sequence[Any] = (), attributes: Attributes | None = None) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}  # of eager steps
        self._others = [(handle, tf_graphs.read_handle(handle)) for handle in others]
        self.attributes = attributes or Attributes([])
        self._held = self.attributes.now()
        self.left: Any = None  # what the last function has left in the attributes

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function that returns a structure of tensors, and undoes what it changes."""
        if tf.executing_eagerly():
            try:
                with keras_model.observed(self.note):
                    return function()
            finally:
                for variable, value in self._before.values():
                    keras_model.backing(variable).assign(value)
                for handle, value in self._others:
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
                self.left = self.attributes.now()
                self.attributes.set(self._held)
        concrete = tf.function(function, autograph=False).get_concrete_function()
        handles = tf_graphs.captured_variables(concrete.graph)
        before = [(handle, tf_graphs.read_handle(handle)) for handle in handles]
        outputs = concrete()
        with tf.control_dependencies([leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]):
            for handle, value in before:
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return outputs

    @contextlib.contextmanager
    def beginning_with(self, held: Any) -> Iterator[None]:
        """In this context eager functions begin with what another one has `left` in the attributes, if not `None`."""
        self.attributes.set(held or self._held)
        try:
            yield
        finally:
            self.attributes.set(self._held)

    def note(self, variable: Any) -> None:
        """Notes the value of a Keras variable that an eager step is about to change."""
        if tf.executing_eagerly() and id(variable) not in self._before:
            self._before[id(variable)] = variable, tf.identity(keras_model.backing(variable))


class Applied(list[Any]):
    """A list for `Step.applied`, which also notes what is about to be updated."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial
        self._graph = tf_graphs.current()

    def append(self, update: tuple[Any, Any, Any]) -> None:
        optimizer, gradients, variables = update
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            return  # in a tf.cond: nothing of it can be returned; its effect on the variables can be seen
        if tf.executing_eagerly():
            build_at_once(optimizer, variables)
            for variable in (*keras_model.updated_variables(optimizer, variables), *state_of(optimizer)):
                self._trial.note(variable)
        # A variable in which the step accumulates gradients is set to zero after the update.
        now = [tf.convert_to_tensor(g) if isinstance(g, tf.Variable | keras.Variable) else g for g in gradients]
        super().append((optimizer, now, variables))


@contextlib.contextmanager
def descending(optimizers: Sequence[Any]) -> Iterator[None]:
    """In this context Keras's optimizers descend along the gradients, by one operation for each weight."""
    with contextlib.ExitStack() as stack:
        for part in itertools.chain.from_iterable(map(parts_of, optimizers)):
            if keras_model.is_kerass(type(part)):
                stack.enter_context(attached(part, "update_step", functools.partial(_descend, part)))
        yield


def _descend(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    gradient, rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
    if isinstance(gradient, tf.Tensor) and isinstance(variable, tf.Variable):
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
    else:
        optimizer.assign_sub(variable, keras.ops.multiply(gradient, rate))


def state_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that its update may change. `descending` leaves momenta as they are."""
    parts = list(parts_of(optimizer))
    descend = all(getattr(part.update_step, "func", None) is _descend for part in parts)
    if not descend or any(part.use_ema or part.gradient_accumulation_steps for part in parts):
        return variables_of(optimizer)
    return [variable for variable in variables_of(optimizer) if len(variable.shape) == 0]


def gather_rows(backend: Backend, rows: Any, name: str) -> Any:
    """Concatenates the rows of all ranks, in the order of the global batch. `name` must be unique in a step."""
    if backend.topology.size == 1:
        return rows
    if isinstance(rows, tf.RaggedTensor):
        lengths = backend.all_gather(rows.row_lengths(), f"{name}_lengths")
        return tf.RaggedTensor.from_row_lengths(gather_rows(backend, rows.values, f"{name}_values"), lengths)
    if rows.dtype == tf.string:  # collectives send numbers only
        lengths, characters = sources.characters_of(tf.reshape(rows, [-1]))
        lengths = backend.all_gather(lengths, f"{name}_lengths")
        strings = sources.strings_of(lengths, backend.all_gather(characters, f"{name}_characters"))
        return tf.reshape(strings, tf.concat([[-1], tf.shape(rows)[1:]], 0))
    if rows.dtype == tf.bool:
        return tf.cast(gather_rows(backend, tf.cast(rows, tf.int32), name), tf.bool)
    if tf.executing_eagerly() or None in rows.shape[1:]:
        rows = check_shapes(backend.all_gather(tf.shape(rows)[None, 1:], f"{name}_shapes"), rows)
    return backend.all_gather(rows, name)


def real_rows(output: Any, count: Any) -> Any:
    """Returns all rows, or none if the share is empty and its only row a placeholder."""
    rows = output.nrows() if isinstance(output, tf.RaggedTensor) else tf.shape(output, out_type=tf.int64)[0]
    return output[: tf.where(count > 0, rows, tf.zeros_like(rows))]


def batch_of_all_ranks(backend: Backend, shares: Sequence[Share], name: str = "keras_dist_verified") -> Any:
    """Returns the whole batch from the shares of all replicas. Every rank must call it with the shares of its own."""
    numbers = itertools.count()

    def gather(rows: Any) -> Any:
        return gather_rows(backend, rows, f"{name}_{next(numbers)}")

    return batch_of_shares(shares, gather)


def batch_of_shares(shares: Sequence[Share], gather: Callable[[Any], Any] = lambda rows: rows) -> Any:
    """Returns the whole batch from its shares in this process. `gather` adds the rows of other ones."""

    def of_all(*parts: Any) -> Any:
        rows = [real_rows(part, share.count) for part, share in zip(parts, shares, strict=True)]
        if len(rows) == 1:
            return gather(rows[0])
        if isinstance(rows[0], tf.Tensor) and (tf.executing_eagerly() or None in rows[0].shape[1:]):
            rows[0] = check_shapes(tf.stack([tf.shape(part)[1:] for part in rows]), rows[0])
        return gather(tf.concat(rows, 0))

    return tf.nest.map_structure(functools.partial(rows_of_all, of_all), *[share.data for share in shares])


def rows_of_all(of_all: Callable[..., Any], *leaves: Any) -> Any:
    """Returns one tensor of a batch from its shares' tensors, which `of_all` concatenates; the first without rows."""
    first = leaves[0]
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.from_dense(of_all(*map(tf.sparse.to_dense, leaves)))
    has_rows = isinstance(first, tf.RaggedTensor) or (isinstance(first, tf.Tensor) and first.shape.rank != 0)
    return of_all(*leaves) if has_rows else first


def as_tensors(batch: Any) -> Any:
    def tensor(leaf: Any) -> Any:
        stays = leaf is None or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        return leaf if stays else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(tensor, batch)


_ROWS = 2  # of each replica; the first one has one more
_FUNCTIONS_OF_LAYERS = ("activation", "recurrent_activation", "activity_regularizer")  # which see examples


def is_in_step(model: keras.Model, kind: str) -> bool:
    """True if a step of a model, of one of the kinds in `CALLS`, runs code that is not Keras's own, or eagerly."""
    methods = (f"{kind}_step", *(("compute_loss", "compute_metrics") if kind != "predict" else ()))
    # Of eager steps there is no graph to read anything from.
    if model.run_eagerly or any(keras_fit.is_overridden(model, method) for method in methods):
        return True
    layers = keras_model.flatten_layers(model)
    # Keras's layers too, where the script puts operations between them, or where they may mix examples.
    if any(keras_model.has_operations(layer) or keras_model.may_mix_examples(layer) for layer in layers):
        return True
    functions = [getattr(layer, "function", type(layer).call) for layer in layers]  # a `Lambda` has a `function`
    functions += [getattr(layer, name, None) for layer in layers for name in _FUNCTIONS_OF_LAYERS]
    parts = [model.optimizer] if kind == "train" else []
    if kind != "predict":
        passed = keras_model.compile_arguments(model)
        parts += keras.tree.flatten([passed.get(name) for name in ("loss", "metrics", "weighted_metrics")])
        parts += keras_model.flat_metrics(model)
    return any(_is_own(part) for part in functions + parts)


def _is_own(part: Any) -> bool:
    if isinstance(part, keras.Metric):
        return keras_model.has_own_update(part)
    is_object = isinstance(part, keras.losses.Loss | keras.optimizers.Optimizer)
    function = getattr(part, "fn", None) or (type(part) if is_object else part)
    return callable(function) and not keras_model.is_kerass(function)


class FirstRows:
    """Keeps the first rows of a batch, and the graph of the step.

    It keeps them twice: in the first step, and in the middle of the second epoch, where things may count that did not
    count before: entries that were masked, a term of the loss whose weight a callback raises.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.is_due = True  # the next step that runs keeps rows
        self.is_last = False
        self._steps = 0  # of this epoch
        self._waits = -1  # steps until the second time, if that is in this epoch
        self._specs: Any = None
        self._kept: list[Any] = []  # variables, one for each tensor of the rows
        self.graph: Any = None  # `None` of a step that runs eagerly
        self.away: Sequence[tf.Variable] = ()  # variables in the graph for which copies stand in the trial
        self._count = tf_compat.host_variable(-1, "first_count")

    def begin_step(self) -> None:
        self._steps += 1
        self._waits -= 1
        if self._waits == -1:
            self._count.assign(-1)
            self.is_due = self.is_last = True

    def end_epoch(self) -> None:
        self._waits, self._steps = self._steps // 2, 0

    def keep(self, shares: Sequence[Share]) -> None:
        """Keeps rows, in a step that runs as `is_due`."""
        more = int(self._backend.topology.is_chief)
        parts = [first_rows(share, _ROWS + (more if index == 0 else 0)) for index, share in enumerate(shares)]
        data = batch_of_shares(parts) if len(parts) > 1 else parts[0].data
        tensors = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in tensors):
            return
        if self._kept and [tensor.dtype for tensor in tensors] != [variable.dtype for variable in self._kept]:
            return  # an evaluation on other data
        self.note_graph()
        if not self._kept:
            self._specs = tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), data
            )
            self._kept = [_variable_for(tensor) for tensor in tensors]

        def keep() -> Any:
            kept = [variable.assign(tensor) for variable, tensor in zip(self._kept, tensors, strict=True)]
            return tf.group(self._count.assign(tf.add_n([part.count for part in parts])), *kept)

        tf.cond(self._count < 0, keep, lambda: tf.group())

    def note_graph(self) -> None:
        """Keeps the graph of the step, which calls this as it is traced."""
        if not tf.executing_eagerly():
            self.graph = tf_graphs.outermost(tf.compat.v1.get_default_graph())

    def batch(self) -> Any:
        """Returns the rows of all replicas, `None` if they don't belong together. Every rank must call it."""
        count = max(int(self._count), 0)
        shapes = [tuple(variable.value().shape[1:]) for variable in self._kept]
        of_all = self._backend.all_gather_object("the check of the first rows", (count, repr(shapes)))
        if len({shapes for _, shapes in of_all}) > 1 or not sum(count for count, _ in of_all):
            return None
        tensors = iter([variable.value() for variable in self._kept])
        leaves = [leaf if leaf is None else next(tensors) for leaf in tf.nest.flatten(self._specs, True)]
        data = tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)
        return batch_of_all_ranks(self._backend, [Share(data, tf.constant(count), *[tf.constant(0)] * 2)])

    def trial(self, model: keras.Model, optimizers: Sequence[Any], counters: Sequence[tf.Variable]) -> Trial:
        """Returns the `Trial` of a model's steps, which also undoes what they do to `counters`."""
        parts = [*keras_model.flatten_layers(model), *dict.fromkeys(keras_model.flat_metrics(model))]
        attributes = keras_model.Attributes(parts)
        if self.graph is None:
            return Trial([variable.handle for variable in (*attributes.variables().values(), *counters)], attributes)
        variables = [variable for part in parts for variable in part.variables]
        variables += [variable for optimizer in optimizers for variable in variables_of(optimizer)]
        known = {id(variable.handle) for variable in (*map(keras_model.backing, variables), *self.away)}
        others = [handle for handle in tf_graphs.captured_variables(self.graph) if id(handle) not in known]
        return Trial(others, attributes)


def _variable_for(tensor: Any) -> tf.Variable:
    rank = tensor.shape.rank
    shape = tf.TensorShape(None if rank is None else [None] * rank)
    return tf_compat.host_variable(lambda: tf.zeros([0] * (rank or 0), tensor.dtype), "first_rows", shape=shape)


@contextlib.contextmanager
def without_graph(model: keras.Model, optimizers: Sequence[Any]) -> Iterator[None]:
    """Steps in this context run eagerly, and leave nothing in random states and summaries."""
    with contextlib.ExitStack() as stack:
        stack.callback(snapshot.set_states, snapshot.states())
        # MirroredStrategy warns that steps without a graph are slow.
        stack.enter_context(without_notes_of_tensorflow(logging.ERROR))
        stack.enter_context(tf_compat.functions_run_eagerly(True))
        stack.enter_context(attached(model, keras_fit.RUN_EAGERLY, True))
        stack.enter_context(keras_random.kept_draws())
        stack.enter_context(tf_compat.clipping_at_once())
        stack.enter_context(tf.summary.record_if(False))
        stack.enter_context(descending(optimizers))  # what is compared are gradients
        yield
