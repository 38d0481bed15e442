"""The coordinator's side of parameter servers: its devices, and the server of each variable.

A variable goes to the least loaded server. An optimizer's slots are beside their variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.cluster import HERE, SERVER, Cluster, device, first_devices
from keras_dist.backends.parameter_server.exchange import ShareStep
from keras_dist.backends.parameter_server.workers import Workers
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.compat import keras_model, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import parts_of

_ATTACHED = "_keras_dist_placed"


class Placement:
    """Moves variables to servers, which have these devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._bytes = dict.fromkeys(devices, 0)

    def place_model(self, model: keras.Model) -> None:
        """Moves the weights of a model that are not on a server. Metrics and random states stay in this process."""
        for variable in model.weights:
            self._place(variable)

    def place_optimizer(self, optimizer: Any) -> None:
        """Moves an optimizer's existing variables, and makes it place new slots beside the variables they are for."""
        for part in parts_of(optimizer):
            if getattr(part, _ATTACHED, None) is None:
                attach(part, _ATTACHED, True)
                attach(part, "add_variable_from_reference", _beside_reference(part.add_variable_from_reference))
                attach(part, "update_step", _beside_variable(part.update_step))
        for variable in optimizer.variables:
            self._place(variable)

    @contextlib.contextmanager
    def at_home(self, variables: Sequence[Any]) -> Iterator[None]:
        """While this is entered variables are in this process: TensorFlow writes a file where they are."""
        away = [(variable, keras_model.backing(variable)) for variable in variables]
        for variable, value in away:
            here = tf.Variable(value.read_value(), trainable=value.trainable, name=variable.name)
            keras_model.set_backing(variable, here)
        try:
            yield
        finally:
            for variable, value in away:
                keras_model.set_backing(variable, value)

    def _place(self, variable: Any) -> None:
        old = keras_model.backing(variable)
        if any(old.device.startswith(device + "/") for device in self._bytes):
            return
        server = min(self._bytes, key=lambda name: self._bytes[name])
        self._bytes[server] += int(variable.shape.num_elements() or 0) * old.dtype.size
        with tf.init_scope(), tf.device(server):
            value, aggregation = old.read_value(), old.aggregation
            new = tf.Variable(value, trainable=old.trainable, name=variable.name, aggregation=aggregation)
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
    value = keras_model.backing(variable) if isinstance(variable, keras.Variable) else variable
    return str(value.device)


class Coordinator(ReplicaBackend):
    """A backend whose process is the only rank, and lets workers compute. `start` calls `_lead`.

    In `fit` an engine gives them one call after another. In a custom loop they are the replicas of one graph.
    """

    _options: dict[str, Any]
    _cluster: Cluster
    workers: Workers
    placement: Placement

    def _lead(self, cluster: Cluster, workers: Workers) -> None:
        self._cluster, self.workers = cluster, workers
        self.placement = Placement(self.variable_devices())
        self._use(first_devices(workers.size), HERE, tf.distribute.ReductionToOneDevice())

    def describe_devices(self) -> str:
        return f"{len(self._cluster.workers)} workers, {len(self._cluster.servers)} servers, {self.mode}"

    @property
    def mode(self) -> str:
        return self._options["mode"]

    @property
    def not_of_one_process(self) -> str | None:
        return None if self.mode == "sync" else "asynchronous workers change the weights at any moment"

    @property
    def max_staleness(self) -> int | None:
        """How many steps of others may come between reading weights and applying gradients to them."""
        return self._options["max_staleness"]

    def variable_devices(self) -> Sequence[str]:
        """Returns the devices of the servers."""
        return [device(SERVER, index) for index in range(len(self._cluster.servers))]

    @property
    def has_processes(self) -> bool:
        return True

    @property
    def num_replicas(self) -> int:
        """How many shares a step has: an asynchronous one is on a whole batch."""
        return self.workers.size if self.mode == "sync" else 1

    # --- What a step calls ---

    def all_gather(self, tensor: Any, name: str) -> Any:
        step = _share_step()
        return super().all_gather(tensor, name) if step is None else step.all_gather(tensor, name)

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        step = _share_step()
        return super().all_reduce_exact(numbers, name) if step is None else step.all_reduce_exact(numbers, name)

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        if (step := _share_step()) is None:
            return super().all_reduce(gradients, row, name)
        return [step.all_reduce(gradient, name) for gradient in gradients], row[None, :]

    def translate(self, error: BaseException) -> BaseException:
        return self.workers.translate(error)


def _share_step() -> ShareStep | None:
    """Returns the step of `fit` that is being traced or run, `None` in a custom loop."""
    step = step_module.current()
    return step if isinstance(step, ShareStep) else None
