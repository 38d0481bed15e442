"""What layers do besides returning outputs, and their calls as pure functions for XLA. Keras 3.13 to 3.15, 2026-11."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import set_keras_mask
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from keras_dist.compat import keras_model
from keras_dist.compat.keras_model import attached, attached_to, is_kerass, stateless_scope
from keras_dist.compat.keras_random import global_seed_generator, is_seed, seed_generators
from keras_dist.compat.tf_compat import OWN_NAME, WRITES, context_value, nodes_of, patched

_IN_KERAS = contextvars.ContextVar("keras_dist_in_keras", default=False)  # a `keras.Variable` is being assigned

# Keras's layers that assign variables in `call`. They normalize over a share.
_NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


def is_symbolic() -> bool:
    """True while Keras calls a layer only to learn the shapes of its outputs."""
    return bool(in_symbolic_scope())


def own_layers(model: keras.Model) -> list[tuple[keras.layers.Layer, bool]]:
    """Returns the layers of a model that are not Keras's own, and whether they have state; the model may be one."""
    state = {id(variable) for variable in own_state(model)}
    return [
        (layer, any(id(variable) in state for variable in layer.non_trainable_variables))
        for layer in model._flatten_layers() if not is_kerass(type(layer)) and not isinstance(layer, _NORMALIZATIONS)
    ]  # fmt: skip


def own_state(model: keras.Model) -> list[Any]:
    """Returns the variables that only the user's code assigns: no metrics, random states, normalizations."""
    ignored = {id(variable) for variable in model.metrics_variables} | _of_normalizations(model)
    ignored |= {id(generator.state) for generator in seed_generators(model)}
    return [variable for variable in model.non_trainable_variables if id(variable) not in ignored]


@contextlib.contextmanager
def observed_layers(by_script: Callable[[Any, Any], None] | None, inexact: list[Any] | None) -> Iterator[None]:
    """Looks at what layers assign.

    Args:
        by_script: Takes variables, of TensorFlow too, before the user's code changes them (no optimizer, no
            normalization), and by what: a value, or the arguments of a method.
        inexact: To it are appended the layers that draw random numbers in training, or normalize by a share.
    """
    plain = keras.Variable.assign

    def assign(variable: Any, value: Any) -> Any:
        callers = [scope.caller for scope in get_global_attribute("name_scope_stack") or ()]
        layer = next((caller for caller in reversed(callers) if isinstance(caller, keras.layers.Layer)), None)
        is_of_share = isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        # In inference a recurrent layer draws, too, and does not use it.
        is_trained = getattr(get_global_attribute("current_call_ctx"), "training", None) is not False
        if inexact is not None and layer is not None and is_trained and (is_of_share or is_seed(variable)):
            inexact.append(layer)
        is_by_keras = isinstance(layer, _NORMALIZATIONS) or any(isinstance(each, keras.Optimizer) for each in callers)
        if by_script is not None and not is_by_keras:
            by_script(variable, value)
        with context_value(_IN_KERAS, True):
            return plain(variable, value)

    def method(name: str) -> Callable[..., Any]:
        plain = getattr(ResourceVariable, name)

        def write(variable: Any, *args: Any, **kwargs: Any) -> Any:
            is_of_library = _IN_KERAS.get() or variable.name.startswith(OWN_NAME)
            if by_script is not None and not is_of_library:
                by_script(variable, (args, kwargs))
            return plain(variable, *args, **kwargs)

        return write

    with patched(keras.Variable, assign=assign), patched(ResourceVariable, **{name: method(name) for name in WRITES}):
        yield


def _of_normalizations(layer: Any) -> set[int]:
    inner = [inner for inner in layer._flatten_layers() if isinstance(inner, _NORMALIZATIONS)]
    return {id(variable) for part in inner for variable in part._non_trainable_variables}


def statistics_of_a_share(model: keras.Model, are_synchronized: bool | None) -> list[Any]:
    """Returns the float state that may depend on the share of a replica.

    That of `SpectralNormalization` depends on weights only, and a BatchNormalization that is synchronized, or every one
    if `are_synchronized`, sees the whole batch.
    """
    same = _NORMALIZATIONS if are_synchronized else keras.layers.SpectralNormalization
    layers = model._flatten_layers()
    whole = [layer for layer in layers if isinstance(layer, same) or getattr(layer, "synchronized", False)]
    ignored = {id(variable) for layer in whole for variable in layer._non_trainable_variables}
    return [variable for variable in keras_model.float_statistics(model) if id(variable) not in ignored]


def normalizations_of_a_share(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns what normalizes by a share when it is trained; a frozen one uses its moving averages."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if layer.trainable and not layer.synchronized]


@dataclasses.dataclass
class Record:
    """What a layer did in a call. `assigned` is without metrics, random states and normalizations."""

    assigned: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # variables and values
    losses: list[Any] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)  # tensors that the layers in it returned
    called: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # layers in it, and their arguments
    adding: list[Any] = dataclasses.field(default_factory=list)  # the layers in it that added a loss


class _Scope(keras.StatelessScope):
    def __init__(self, record: Record, ignored: set[int]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._outer, self._record, self._ignored = stateless_scope(), record, ignored

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update((update[0], tf.stop_gradient(update[1])))
        if id(update[0]) not in self._ignored and update[0].aggregation == "none":
            self._record.assigned.append(update)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if id(variable) in self._ignored:
            return value
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value


@contextlib.contextmanager
def recorded(layer: keras.layers.Layer) -> Iterator[Record]:
    """Records what a call of a layer does, which has no other effect."""
    record = Record()

    def noting(part: Any, call: Callable[..., Any]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            record.called.append((part, (args, kwargs)))
            outputs = call(*args, **kwargs)
            record.outputs += [output for output in keras.tree.flatten(outputs) if isinstance(output, tf.Tensor)]
            return outputs

        return noted

    metrics = {id(variable) for metric in layer.metrics for variable in metric.variables}
    seeds = {id(generator.state) for generator in seed_generators(layer)}
    parts = list(layer._flatten_layers(include_self=False))
    with (
        attached(layer, "add_loss", lambda loss: record.losses.extend(keras.tree.flatten(loss))),
        attached_to(parts, "call", noting),
        attached_to(parts, "add_loss", lambda part, plain: lambda loss: record.adding.append(part)),
        _Scope(record, metrics | seeds | _of_normalizations(layer)),
    ):
        yield record


def padded_texts(longest: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Makes `TextVectorization` without `output_sequence_length` pad to the longest text of the whole batch.

    `longest` takes the width of a share, an int32 scalar, and returns the greatest one.
    """
    plain = keras.layers.TextVectorization.call

    def call(layer: Any, inputs: Any) -> Any:
        outputs = plain(layer, inputs)
        config = layer.get_config()
        is_fixed = config["output_mode"] != "int" or config["output_sequence_length"] is not None or config["ragged"]
        if is_fixed or not isinstance(outputs, tf.Tensor):
            return outputs
        width = tf.shape(outputs)[-1]
        padding = [[0, 0]] * (outputs.shape.rank - 1) + [[0, longest(width) - width]]
        return tf.ensure_shape(tf.pad(outputs, padding), outputs.shape)

    return patched(keras.layers.TextVectorization, call=call)


class Outside(Exception):
    """A layer has an effect that cannot be a part of a pure function."""


def is_compiled(model: keras.Model) -> bool:
    """True if a model was compiled with XLA, by the script or by Keras's own choice."""
    return bool(getattr(model, "compiled", False) and model._jit_compile and not model.run_eagerly)


def variables_of(layer: keras.layers.Layer) -> list[Any]:
    """Returns the variables that a call may use: the layer's, of its metrics, the state of the global generator."""
    generator, metrics = global_seed_generator(), [each for part in layer._flatten_layers() for each in part._metrics]
    of_metrics = [variable for metric in metrics for variable in metric.variables]
    return [*layer.variables, *of_metrics, *([] if generator is None else [generator.state])]


def current_value(variable: Any) -> Any:
    """Returns a variable's value in this step, without the cast of mixed precision."""
    scope = stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(keras_model.backing(variable) if value is None else value)


class PureScope(keras.StatelessScope):
    """Holds back what a layer assigns and the losses that it adds, where the layer has no other effect.

    `variables` have `values` here. It raises `Outside` if something else is assigned than statistics, random states and
    metrics: a weight that is trained (SpectralNormalization), or the state of a layer of the script's own.
    """

    def __init__(self, layer: keras.layers.Layer, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update({id(variable): value for variable, value in zip(variables, values, strict=True)})
        self.assigned: dict[int, Any] = {}
        self._layer, self._outer = layer, stateless_scope()
        self._own = {id(variable) for variable in own_state(layer)}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if variable.trainable or id(variable) in self._own:
            raise Outside(f"assigns {variable.path!r}")
        self.assigned[id(variable)] = variable
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value

    def take_losses(self) -> tuple[list[Any], list[Any]]:
        losses: list[Any] = []
        owners: list[Any] = []
        for layer in self._layer._flatten_layers():
            own = [loss for loss in self.losses if id(loss) in layer._loss_ids]
            layer._loss_ids.difference_update(map(id, own))  # they are no losses of the step: their copies will be
            losses += own
            owners += [layer] * len(own)
        return losses, owners


def masks_of(tensors: Sequence[Any]) -> dict[int, Any]:
    """Returns the masks that layers have attached to tensors, by the index of the tensor."""
    return {index: mask for index, tensor in enumerate(tensors) if (mask := keras_model.mask_of(tensor)) is not None}


def set_masks(tensors: Sequence[Any], masks: Mapping[int, Any]) -> None:
    for index, mask in masks.items():
        set_keras_mask(tensors[index], mask)


def has_loop(graph: Any) -> bool:
    """True if a graph, or a function in it, has a loop.

    Its gradient reads lists of tensors that the forward pass has filled, and XLA returns no such list.
    """
    return any(node.op in ("While", "StatelessWhile") for node in nodes_of(graph.as_graph_def()))
