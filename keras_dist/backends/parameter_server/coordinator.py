"""The coordinator's side of parameter servers: its devices, and the server of each variable.

A variable goes to the least loaded server. An optimizer's slots are beside their variable.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server.cluster import HERE, SERVER, Cluster, device, first_devices
from keras_dist.backends.parameter_server.exchange import ShareStep
from keras_dist.backends.parameter_server.workers import Workers
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.compat import keras_model, keras_random, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import parts_of, variables_of

_ATTACHED = "_keras_dist_placed"  # attribute of an optimizer


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
                attach(part, "add_variable_from_reference", _on_server_of(0, part.add_variable_from_reference))
                attach(part, "update_step", _on_server_of(1, part.update_step))
        for variable in variables_of(optimizer):
            if not keras_random.is_seed(variable):
                self._place(variable)

    @contextlib.contextmanager
    def at_home(self, variables: Sequence[Any]) -> Iterator[None]:
        """While this is entered, copies of variables are here, where TensorFlow writes a file."""
        away = [(variable, keras_model.backing(variable)) for variable in variables]
        with concurrent.futures.ThreadPoolExecutor() as pool:  # several come at the same time
            copies = list(pool.map(lambda variable: _copied_to(HERE, variable), variables))
        for variable, copy in zip(variables, copies, strict=True):
            keras_model.set_backing(variable, copy)
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
        keras_model.set_backing(variable, _copied_to(server, variable))
        logger().debug("variable %s is on %s", variable.path, server)


def _copied_to(device: str, variable: Any) -> tf.Variable:
    """Returns a copy of a Keras variable's value, which optimizers take for that value."""
    old = keras_model.backing(variable)
    with tf.init_scope(), tf.device(device):
        value, aggregation = old.read_value(), old.aggregation
        copy = tf.Variable(value, trainable=old.trainable, name=variable.name, aggregation=aggregation)
    tf_compat.copy_identity(copy, of=old)
    return copy


def _on_server_of(position: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method run on the server of the variable that is its argument there: only the gradient travels."""
    signature = inspect.signature(plain)

    def method(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        with tf.device(device_of([*arguments.values()][position])):
            return plain(*args, **kwargs)

    return method


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

    uses_xla = False
    has_processes = True
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

    def variable_devices(self) -> Sequence[str]:
        return [device(SERVER, index) for index in range(len(self._cluster.servers))]

    @property
    def num_replicas(self) -> int:
        """How many shares a step has: an asynchronous one is on a whole batch."""
        return self.workers.size if self.mode == "sync" else 1

    # --- What a step calls ---

    def all_gather(self, tensor: Any, name: str) -> Any:
        return _meeting(super()).all_gather(tensor, name)

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        return _meeting(super()).all_reduce_exact(numbers, name)

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        results: tuple[list[Any], Any] = _meeting(super()).all_reduce(gradients, row, name)
        return results

    def translate(self, error: BaseException) -> BaseException:
        return self.workers.translate(error)


def _meeting(replicas: Any) -> Any:
    """Returns where shares meet: in the step of `fit` that is being traced or run, in a custom loop as `replicas`."""
    step = step_module.current()
    return step if isinstance(step, ShareStep) else replicas
