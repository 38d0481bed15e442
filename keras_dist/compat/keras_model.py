"""Private names of Keras's models, layers and variables. Keras 3.13 to 3.15, 2026-11."""

import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

from keras_dist.compat.keras_random import global_state, seed_generators
from keras_dist.compat.tf_compat import context_value, patched

# An optimizer calls this method before each real update, after gradient accumulation and before clipping.
CLIP_GRADIENTS = "_clip_gradients"


def attach(target: Any, name: str, value: Any) -> None:
    """Sets an attribute of one object without Keras's attribute tracking.

    The class does not change, so saving, loading, cloning and pickling still work as before.
    """
    object.__setattr__(target, name, value)


def attached(target: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    return patched(target, **{name: value})


@contextlib.contextmanager
def attached_to(targets: Iterable[Any], name: str, make: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Sets an attribute of objects or classes in this context, to what `make` returns for each and its value."""
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(attached(target, name, make(target, getattr(target, name))))
        yield


class Attributes:
    """What a model, its layers and metrics hold in Python."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def now(self) -> Any:
        held = [dict(vars(part)) for part in self._parts]
        values = [value for attributes in held for value in attributes.values()]
        return held, [(value, items) for value in values if (items := _items(value)) is not None]

    def set(self, state: Any) -> None:
        held, collections = state
        for part, attributes in zip(self._parts, held, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
        for value, items in collections:
            if isinstance(value, np.ndarray):
                value[...] = items
                continue
            now, before = (each.values() if isinstance(each, dict) else each for each in (value, items))
            if [*map(id, now)] != [*map(id, before)]:
                value.clear()
                value.update(items) if isinstance(value, dict | set) else value.extend(items)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns TensorFlow's variables that are attributes, or in collections that are, by their names there."""
        found = {}
        for owner, name, value in [(part, *item) for part in self._parts for item in vars(part).items()]:
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for index, item in enumerate(items):
                if isinstance(item, tf.Variable) and not name.startswith("_self_"):  # those of TensorFlow's tracking
                    found[f"{owner.name}.{name}" + (f"[{index}]" if item is not value else "")] = item
        return found

    def different(self, one: Any, other: Any) -> list[str]:
        numbers = (int, float, np.ndarray, np.generic, tf.Tensor)
        return [
            f"{part.name}.{name}"
            for part, attributes, others in zip(self._parts, one[0], other[0], strict=True)
            for name, value in attributes.items() if isinstance(value, numbers) and value is not others.get(name)
            if not np.array_equal(np.asarray(value), np.asarray(others.get(name)))
        ]  # fmt: skip


def _items(value: Any) -> Any:
    """Returns what a collection or an array holds, `None` for anything that does not change in place."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= 1_000_000 else None  # more numbers are data, not a state
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set | deque) else None


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def is_kerass(part: Any) -> bool:
    return str(getattr(part, "__module__", "")).split(".")[0] == "keras"


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list that `evaluate` returns by default."""
    return model._flatten_metrics_in_order(logs)


def build(model: keras.Model, batch_spec: Any) -> None:
    """Builds a model's weights and metrics from the specification of a batch.

    `Trainer._symbolic_build` also builds the optimizer, which some models never use (a GAN).
    """

    def symbolic(spec: Any) -> Any:
        if spec is None or isinstance(spec, tf.OptionalSpec):
            return None
        sparse, ragged = isinstance(spec, tf.SparseTensorSpec), isinstance(spec, tf.RaggedTensorSpec)
        return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse, ragged=ragged)

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(symbolic, batch_spec))
    spec_of = keras_backend.compute_output_spec
    y_pred = spec_of(model, x, training=False)
    if y is None:  # to predict, and a model without targets builds them in its step
        return
    if (metrics := getattr(model, "_compile_metrics", None)) is not None and not metrics.built:
        spec_of(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if (loss := getattr(model, "_compile_loss", None)) is not None and not loss.built:
        spec_of(model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False)


def is_built(model: keras.Model) -> bool:
    """True if all layers and metrics of the model are built. A model without `call` (a GAN) itself is never built."""
    compiled = (getattr(model, "_compile_metrics", None), getattr(model, "_compile_loss", None))
    layers = model._flatten_layers(include_self=has_call(model))
    return all(part.built for part in (*layers, *compiled) if part is not None)


def why_batch_size_is_fixed(model: keras.Model) -> str | None:
    """Returns why a model with a fixed batch size can't compute other sizes, `None` if it can.

    Keras itself passes batches of other sizes to such a model. Only a few depend on the size, for example by a reshape.
    To find out, the graph is traced with one example more.
    """

    def with_one_more(tensor: Any) -> Any:
        shape = [size and size + 1 for size in tensor.shape[:1]] + list(tensor.shape[1:])
        return keras.KerasTensor(shape, tensor.dtype, sparse=tensor.sparse, ragged=tensor.ragged)

    graph = getattr(model, "_functional", model)  # of a Sequential
    if not isinstance(graph, Functional) or not any(tensor.shape[:1] not in ((), (None,)) for tensor in graph.inputs):
        return None
    try:
        outputs = graph.compute_output_spec(keras.tree.map_structure(with_one_more, graph._inputs_struct))
    except Exception as error:
        return " ".join(str(error).split())
    before, after = graph.outputs, keras.tree.flatten(outputs)
    fixed = [old for old, new in zip(before, after, strict=True) if old.shape[:1] == new.shape[:1] != (None,)]
    return f"its output has the shape {tuple(fixed[0].shape)} for any batch" if fixed else None


def has_call(model: keras.Model) -> bool:
    """False for a model that only has steps of its own (a GAN)."""
    return type(model).call is not keras.Model.call


def flatten_layers(model: keras.Model) -> list[Any]:
    """Returns the model and all layers in it."""
    return list(model._flatten_layers())


def has_operations(layer: Any) -> bool:
    """True if a functional model computes with `keras.ops` between its layers."""
    is_functional = isinstance(layer, keras.Model) and hasattr(layer, "operations")
    return is_functional and not all(isinstance(part, keras.Layer) for part in layer.operations)


def float_statistics(model: keras.Model) -> list[Any]:
    return [variable for variable in statistics_of(model) if keras_backend.is_float_dtype(variable.dtype)]


def statistics_of(model: keras.Model) -> list[Any]:
    """Returns the variables that training updates without gradients, such as BatchNormalization's moving averages."""
    seeds = {id(generator.state) for generator in seed_generators(model)}
    return [variable for variable in model.non_trainable_variables if id(variable) not in seeds]


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of Keras's `compile`; an empty dict for a model with a custom `compile`."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None else dict(config.config)


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics that the user passed to `compile`, none before they are built."""
    return list(getattr(getattr(model, "_compile_metrics", None), "metrics", ()))


def flat_metrics(model: keras.Model) -> list[Any]:
    """Returns a model's metrics, and those that Keras holds together in one metric: what was passed to `compile`."""
    return [*model.metrics, *compiled_metrics(model)]


def has_own_update(metric: Any) -> bool:
    """True if a user has written how a metric is updated, or the function whose values it averages, or its axis."""
    owner = next(cls for cls in type(metric).__mro__ if "update_state" in vars(cls))
    written = [owner, metric._fn] if hasattr(metric, "_fn") else [owner]
    return may_mix_examples(metric) or not all(map(is_kerass, written))


def may_mix_examples(part: Any) -> bool:
    """True if a layer or metric computes over what may be the first axis: `Softmax(axis=0)`, or -2 of a matrix."""
    axis = getattr(part, "_fn_kwargs", vars(part)).get("axis")  # of a metric that averages what a function returns
    return any(isinstance(each, int) and (each == 0 or each < -1) for each in keras.tree.flatten(axis))


def mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


_PLAIN_ASSIGN = keras.Variable._direct_assign  # what `Variable.assign` calls outside of a `StatelessScope`
_OBSERVERS: list[Callable[[Any], None]] = []


@contextlib.contextmanager
def observed(observe: Callable[[Any], None]) -> Iterator[None]:
    """Calls `observe(variable)` before each assignment to a Keras variable, in this context."""
    plain = keras.Variable._direct_assign

    def assign(variable: Any, value: Any) -> None:
        observe(variable)
        plain(variable, value)

    _OBSERVERS.append(observe)
    try:
        with patched(keras.Variable, _direct_assign=assign):
            yield
    finally:
        _OBSERVERS.pop()


def announce_assignments(variables: Iterable[Any]) -> None:
    """Tells the observers that a traced function, whose assignments they don't see, is about to assign variables."""
    for observe in _OBSERVERS:
        for variable in variables:
            observe(variable)


def unobserved() -> contextlib._GeneratorContextManager[None]:
    """Assignments in this context belong to an update that is the same for all replicas."""
    return patched(keras.Variable, _direct_assign=_PLAIN_ASSIGN)


def backing(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, in any scope."""
    return variable._value


def set_backing(variable: Any, value: tf.Variable) -> None:
    """Replaces the `tf.Variable` of a Keras variable. Keras has no public way to move one to another device."""
    attach(variable, "_value", value)


def stateless_scope() -> Any:
    """Returns the innermost `keras.StatelessScope` that is open in this thread, or `None`."""
    return global_state.get_global_attribute("stateless_scope")


@contextlib.contextmanager
def global_attribute(name: str, value: Any) -> Iterator[None]:
    """Sets something that Keras keeps for each thread, in this context."""
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def outside_stateless_scope() -> contextlib.AbstractContextManager[None]:
    """Allows creating variables inside a `StatelessScope`."""
    return global_attribute("stateless_scope", None)


# An optimizer's step counter. The public `iterations` may be computed from it.
STEP_COUNTER = "_iterations"


def without_assignments() -> contextlib.AbstractContextManager[None]:
    """In this context only checkpoints that have waited for a variable assign to one, also to one of TPUStrategy."""
    return patched(
        keras.Variable, assign=lambda variable, value: value,
        _restore_from_tensors=lambda own, tensors, plain=keras.Variable.assign: plain(own, tensors["VARIABLE_VALUE"]),
    )  # fmt: skip


def update_without_gradients(optimizer: Any) -> None:
    """Does the part of an update that needs no gradients: decays the weights, drops what was accumulated, counts."""
    counter, steps = getattr(optimizer, STEP_COUNTER), optimizer.gradient_accumulation_steps or 1
    if (int(counter) + 1) % steps == 0:
        optimizer._apply_weight_decay(optimizer._trainable_variables)
        for variable in accumulators(optimizer):
            variable.assign(tf.zeros_like(variable.value))
    if steps == 1:
        optimizer._backend_update_step([], [], optimizer.learning_rate)  # Nadam multiplies a product by its momentum
        counter.assign_add(1)
    elif not (schedule_of(optimizer) or "iterations" in type(optimizer).update_step.__code__.co_names):
        counter.assign_add(1)  # else the count waits for the `tf.cond` of an accumulated update, which reads it


def weighted(dataset: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """Returns a dataset with the sample weights of `fit(class_weight=...)`, for data that Keras itself never reads."""
    return dataset.map(make_class_weight_map_fn(class_weight))


# The outermost optimizer whose plain `apply` is running.
_APPLYING: contextvars.ContextVar[Any] = contextvars.ContextVar("keras_dist_applying", default=None)


def applying() -> Any:
    """Returns the optimizer that is applying gradients; the outermost, if it calls others. `None` outside of one."""
    return _APPLYING.get()


def plain_apply(optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
    """Returns an optimizer's `apply` as it is now, to be called by what takes its place."""
    plain = optimizer.apply

    @functools.wraps(plain)
    def apply(*args: Any, **kwargs: Any) -> Any:
        with context_value(_APPLYING, applying() or optimizer):
            return plain(*args, **kwargs)

    return apply


def schedule_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what computes an optimizer's learning rate, `None` if that is a variable."""
    rate = getattr(optimizer, "_learning_rate", None)  # the public `learning_rate` is computed
    return None if rate is None or isinstance(rate, keras.Variable) else rate


def accumulators(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables in which an optimizer accumulates gradients, those that exist."""
    return [variable for variable in getattr(optimizer, "_accumulated_gradients", ()) if variable is not None]


def updated_variables(optimizer: keras.optimizers.Optimizer, given: Sequence[Any] | None) -> list[Any]:
    """Returns the variables that an optimizer updates, given what was passed to `apply`."""
    return list(optimizer._trainable_variables if given is None else given)


def before_updates(look: Callable[[Any, Sequence[Any]], object]) -> None:
    """Passes an optimizer and the variables that it updates to `look`, from now on, unless its `apply` is replaced."""
    plain = BaseOptimizer.apply

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if applying() is None:
            variables = updated_variables(self, trainable_variables)
            look(self, variables)
            trainable_variables = None if trainable_variables is None else variables  # it may be a generator
        return plain(self, grads, trainable_variables)

    BaseOptimizer.apply = apply


def found_optimizers(find: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Passes each optimizer that applies gradients to `find`, in this context.

    Optimizers that another one calls, and those whose `apply` is an attribute of the object, are left out. If `find`
    sets such an attribute, it is called. Whatever holds an optimizer, its class has an `apply`.
    """

    def finding(cls: type, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            if applying() is None:
                find(self)
                if "apply" in vars(self):
                    return self.apply(*args, **kwargs)
            return plain(self, *args, **kwargs)

        return apply

    return attached_to([cls for cls in subclasses(BaseOptimizer) if "apply" in vars(cls)], "apply", finding)


def scaled_losses(weigh: Callable[[Any, Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Passes the optimizer and each loss that a LossScaleOptimizer scales to `weigh`, and uses what it returns."""
    plain = keras.optimizers.LossScaleOptimizer.scale_loss
    return patched(
        keras.optimizers.LossScaleOptimizer, scale_loss=lambda self, loss: weigh(self, plain(self, loss))
    )
