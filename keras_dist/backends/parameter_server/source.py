"""A data set function, traced for each worker, which makes its part of the data there."""

from __future__ import annotations

import contextvars
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.worker_data import Part
from keras_dist.compat.keras_random import tensorflow_seed
from keras_dist.data.shares import any_number, row_count
from keras_dist.errors import ConfigurationError, NotSupportedError

Function = Callable[[tf.distribute.InputContext], tf.data.Dataset]

_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")

_CONTEXT: contextvars.ContextVar[tf.distribute.InputContext | None] = contextvars.ContextVar(
    "keras_dist_input_context", default=None
)


def current_context() -> tf.distribute.InputContext | None:
    """Returns whose data set is being made by a data set function, `None` outside of one."""
    return _CONTEXT.get()


class FunctionSource:
    """A data set function, traced for each worker.

    Args:
        function: The user's.
        parts: Number of workers.
        replicas: How many of them share a step's batch.

    Raises:
        ConfigurationError: If it doesn't return a data set, or another kind of elements for each worker.
        NotSupportedError: If the data set needs something of this process.
    """

    def __init__(self, function: Function, parts: int, replicas: int) -> None:
        # All parts draw the same random numbers, and the same ones again if a part is read again.
        self._seed = secrets.randbelow(2**31) if tensorflow_seed() is None else None
        self._function = function
        self._specs: list[Any] = []
        contexts = [tf.distribute.InputContext(parts, index, replicas) for index in range(parts)]
        self.makers = [self._traced(context) for context in contexts]
        self.element_spec = self._common_spec()
        iterator_spec = tf.data.IteratorSpec(self.element_spec)
        self.next: Any = tf.function(_next, autograph=False).get_concrete_function(iterator_spec)
        self.passes = 0

    def _traced(self, context: tf.distribute.InputContext) -> Any:
        def make() -> Any:
            if self._seed is not None:
                tf.compat.v1.set_random_seed(self._seed)
            token = _CONTEXT.set(context)
            try:
                dataset = self._function(context)
            finally:
                _CONTEXT.reset(token)
            _check_dataset(dataset)
            self._specs.append(tf.nest.map_structure(any_number, dataset.element_spec))
            return tf.data.experimental.to_variant(_untuned(dataset.prefetch(tf.data.AUTOTUNE)))

        maker = tf.function(make, autograph=False).get_concrete_function()
        _check_graph(maker)
        return maker

    def _common_spec(self) -> Any:
        for index, spec in enumerate(self._specs):
            if spec != self._specs[0]:
                raise ConfigurationError(
                    "The data set function returns another kind of elements for each worker.",
                    f"{self._specs[0]} for worker 0, {spec} for worker {index}",
                    "Let it depend on `context` only which examples it reads.",
                )
        return self._specs[0]

    def dataset(self, part: int) -> tf.data.Dataset:
        """Makes the data set of a part on the current device."""
        return tf.data.experimental.from_variant(self.makers[part](), self.element_spec)

    def parts(self) -> list[Part]:
        """Begins a pass over the data: returns its parts."""
        self.passes += 1
        return [Part(self, index, self.passes - 1) for index in range(len(self.makers))]


def _next(iterator: Any) -> tuple[Any, Any]:
    batch = next(iterator)
    return batch, row_count(batch)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set without TensorFlow's tuner of pipelines, unless the user has asked for it.

    A worker would wait for it after each pass: an iterator goes only once its tuner has woken up, which sleeps longer
    and longer, up to a minute (TensorFlow 2.21).
    """
    with warnings.catch_warnings():  # that these are the options only which were set here: in the user's function
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options", UserWarning)
        is_set = dataset.options().autotune.enabled is not None
    if is_set:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigurationError(
            "A data set function must return a tf.data.Dataset.",
            type(dataset).__name__,
            "Put a `return` at its end.",
        )


def _check_graph(maker: Any) -> None:
    """Raises `NotSupportedError` for what is in this process only."""
    graph = maker.graph.as_graph_def()
    operations = {node.op for node in graph.node}
    operations |= {node.op for function in graph.library.function for node in function.node_def}
    if python := sorted(operations.intersection(_PYTHON)):
        raise NotSupportedError(
            "Workers can't run Python code for their data: tf.py_function, tf.numpy_function, from_generator.",
            f"the operation {python[0]} in the data set function",
            "Use TensorFlow's operations, or pass the data set itself: then this process reads it, for all workers.",
        )
    if any(tensor.dtype == tf.variant for tensor in maker.captured_inputs):
        raise ConfigurationError(
            "The data set function uses a data set that was made outside of it, and so is in this process only.",
            "a tf.data.Dataset in the data set function",
            "Make it inside the function, from file names or arrays.",
        )
    if any(tensor.dtype == tf.resource for tensor in maker.captured_inputs):
        raise NotSupportedError(
            "Workers can't use a table or a variable of this process for their data.",
            "one in the data set function (a lookup table, a preprocessing layer with a vocabulary, a tf.Variable)",
            "Do it in the model, or pass the data set itself: then this process reads it, for all workers.",
        )
