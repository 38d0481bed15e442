"""Private names of Keras's models, layers and optimizers. Keras 3.13 to 3.15, 2026-11.

`tests/unit/test_keras_compat.py` fails when one of them changes or is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.models.functional import Functional

from keras_dist.compat.keras_random import seed_generators

# An optimizer calls this method before each real update, after gradient accumulation and before clipping.
CLIP_GRADIENTS = "_clip_gradients"


def attach(target: Any, name: str, value: Any) -> None:
    """Sets an attribute of one object without Keras's attribute tracking.

    The class does not change, so saving, loading, cloning and pickling still work as before.
    """
    object.__setattr__(target, name, value)


@contextlib.contextmanager
def attached(target: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of one object in this context, as `attach` does."""
    attributes = vars(target)
    before = [attributes[name]] if name in attributes else []
    attach(target, name, value)
    try:
        yield
    finally:
        if before:
            attach(target, name, before[0])
        else:
            attributes.pop(name, None)


@contextlib.contextmanager
def kept_collections(metric: Any) -> Iterator[None]:
    """Gives a metric of the script's back, after this context, the items of its plain lists, dicts and sets."""
    own = vars(metric).keys() - vars(keras.metrics.Metric(name="plain")).keys()
    found = {name: vars(metric)[name] for name in own if isinstance(vars(metric)[name], list | dict | set | deque)}
    before = {name: dict(value) if isinstance(value, dict) else list(value) for name, value in found.items()}
    try:
        yield
    finally:
        for name, value in found.items():
            vars(metric)[name] = value
            if _ids(value) != _ids(before[name]):
                value.clear()
                value.update(before[name]) if isinstance(value, dict | set) else value.extend(before[name])


def _ids(value: Any) -> list[int]:
    return [id(item) for item in (value.values() if isinstance(value, dict) else value)]


def subclasses(cls: type) -> set[type]:
    """Returns a class with all classes that inherit from it."""
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def is_kerass(part: Any) -> bool:
    """True if a class or function is one of Keras, and not of the script."""
    return str(part.__module__).split(".")[0] == "keras"


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list that `evaluate` returns by default."""
    return model._flatten_metrics_in_order(logs)


def build(model: keras.Model, batch_spec: Any) -> None:
    """Builds a model's weights and metrics from the specification of a batch.

    `Trainer._symbolic_build` also builds the optimizer, which some models never use (a GAN).
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_symbolic, batch_spec))
    spec_of = keras_backend.compute_output_spec
    y_pred = spec_of(model, x, training=False)
    if y is None:  # to predict, and a model without targets builds them in its step
        return
    if (metrics := getattr(model, "_compile_metrics", None)) is not None and not metrics.built:
        spec_of(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if (loss := getattr(model, "_compile_loss", None)) is not None and not loss.built:
        spec_of(model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False)


def _symbolic(spec: Any) -> Any:
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    sparse, ragged = isinstance(spec, tf.SparseTensorSpec), isinstance(spec, tf.RaggedTensorSpec)
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse, ragged=ragged)


def is_built(model: keras.Model) -> bool:
    """True if all layers and metrics of the model are built. A model without `call` (a GAN) itself is never built."""
    compiled = (getattr(model, "_compile_metrics", None), getattr(model, "_compile_loss", None))
    layers = model._flatten_layers(include_self=has_call(model))
    return all(part.built for part in (*layers, *compiled) if part is not None)


def why_batch_size_is_fixed(model: keras.Model) -> str | None:
    """Returns why a model with a fixed batch size computes no other one, `None` if it does.

    Keras itself passes batches of other sizes to such a model. Only a few depend on the size, for example by a reshape.
    To find out, the graph is traced with one example more.
    """
    graph = getattr(model, "_functional", model)  # of a Sequential
    if not isinstance(graph, Functional) or not any(tensor.shape[:1] not in ((), (None,)) for tensor in graph.inputs):
        return None
    try:
        outputs = graph.compute_output_spec(keras.tree.map_structure(_with_one_more, graph._inputs_struct))
    except Exception as error:
        return " ".join(str(error).split())
    before, after = graph.outputs, keras.tree.flatten(outputs)
    fixed = [old for old, new in zip(before, after, strict=True) if old.shape[:1] == new.shape[:1] != (None,)]
    return f"its output has the shape {tuple(fixed[0].shape)} for any batch" if fixed else None


def _with_one_more(tensor: Any) -> Any:
    shape = [size and size + 1 for size in tensor.shape[:1]] + list(tensor.shape[1:])
    return keras.KerasTensor(shape, tensor.dtype, sparse=tensor.sparse, ragged=tensor.ragged)


def has_call(model: keras.Model) -> bool:
    """False for a model that only has steps of its own (a GAN)."""
    return type(model).call is not keras.Model.call


def flatten_layers(model: keras.Model) -> list[Any]:
    """Returns the model and all layers in it."""
    return list(model._flatten_layers())


def float_statistics(model: keras.Model) -> list[Any]:
    """Returns the floats of `statistics_of`, without integer counters of steps."""
    return [variable for variable in statistics_of(model) if keras_backend.is_float_dtype(variable.dtype)]


def statistics_of(model: keras.Model) -> list[Any]:
    """Returns the variables that training updates without gradients, such as BatchNormalization's moving averages."""
    seeds = {id(generator.state) for generator in seed_generators(model)}
    return [variable for variable in model.non_trainable_variables if id(variable) not in seeds]


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of Keras's `compile`; an empty dict for a model with a custom `compile`."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None else dict(config.config)


def logs_are_metrics(model: keras.Model, logs: Any) -> bool:
    """True if a step returned the model's metrics, False if it returned custom logs."""
    return isinstance(logs, dict) and set(logs) == set(model.get_metrics_result())


def flat_metrics(model: keras.Model) -> list[Any]:
    """Returns a model's metrics, and those that Keras holds together in one metric: what was passed to `compile`."""
    compiled = getattr(model, "_compile_metrics", None)
    return [*model.metrics, *(compiled.metrics if compiled is not None else ())]


def has_own_update(metric: Any) -> bool:
    """True if a user has written how a metric is updated, or the function whose values it averages."""
    owner = next(cls for cls in type(metric).__mro__ if "update_state" in vars(cls))
    written = [owner, metric._fn] if hasattr(metric, "_fn") else [owner]
    return not all(map(is_kerass, written))


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer attached to a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)
