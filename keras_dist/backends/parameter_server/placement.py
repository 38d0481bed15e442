"""Chooses the server of each variable: the least loaded one. An optimizer's slots are beside their variable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.compat import keras_model, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.logging import logger
from keras_dist.step.optimizer import parts_of

_ATTACHED = "_keras_dist_placed"


class Placement:
    """Moves variables to servers.

    Args:
        devices: Of the servers.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._bytes = dict.fromkeys(devices, 0)

    def place_model(self, model: keras.Model) -> None:
        """Moves the weights of a model that are not on a server. Metrics and random states stay in this process."""
        for variable in model.weights:
            self._place(variable, None)

    def place_optimizer(self, optimizer: Any) -> None:
        """Moves an optimizer's existing variables, and makes it place new slots beside the variables they are for."""
        for part in parts_of(optimizer):
            if getattr(part, _ATTACHED, None) is None:
                attach(part, _ATTACHED, True)
                attach(part, "add_variable_from_reference", _beside_reference(part.add_variable_from_reference))
                attach(part, "update_step", _beside_variable(part.update_step))
        for variable in optimizer.variables:
            self._place(variable, None)

    @contextlib.contextmanager
    def at_home(self, variables: Sequence[Any]) -> Iterator[None]:
        """While this is entered variables are in this process: TensorFlow writes a file where they are."""
        away = [(variable, keras_model.backing(variable)) for variable in variables]
        for variable, value in away:
            keras_model.set_backing(
                variable, tf.Variable(value.read_value(), trainable=value.trainable, name=variable.name)
            )
        try:
            yield
        finally:
            for variable, value in away:
                keras_model.set_backing(variable, value)

    def _server_of(self, value: tf.Variable) -> str | None:
        return next((device for device in self._bytes if value.device.startswith(device + "/")), None)

    def _place(self, variable: Any, device: str | None) -> None:
        old = keras_model.backing(variable)
        if (server := self._server_of(old)) is not None:
            return
        server = device or min(self._bytes, key=lambda name: self._bytes[name])
        self._bytes[server] += int(variable.shape.num_elements() or 0) * old.dtype.size
        with tf.init_scope(), tf.device(server):
            new = tf.Variable(
                old.read_value(), trainable=old.trainable, name=variable.name, aggregation=old.aggregation
            )
        tf_compat.copy_identity(new, of=old)
        keras_model.set_backing(variable, new)
        logger().debug("variable %s is on %s", variable.path, server)


def _beside_reference(plain: Callable[..., Any]) -> Callable[..., Any]:
    def add_variable_from_reference(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(device_of(reference_variable)):
            return plain(reference_variable, *args, **kwargs)

    return add_variable_from_reference


def _beside_variable(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Updates a variable on its server: only the gradient travels."""

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(device_of(variable)):
            return plain(gradient, variable, learning_rate)

    return update_step


def beside(value: Any, variable: Any) -> Any:
    """Returns a tensor, `tf.IndexedSlices` or `None` on the server of a variable."""
    with tf.device(device_of(variable)):
        return tf.nest.map_structure(
            lambda part: None if part is None else tf.identity(part), value, expand_composites=True
        )


def device_of(variable: Any) -> str:
    """Returns the device of a variable."""
    value = keras_model.backing(variable) if isinstance(variable, keras.Variable) else variable
    return str(value.device)
