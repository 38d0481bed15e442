"""A dataset function, traced for each worker: it makes the worker's dataset on that worker."""

from __future__ import annotations

import contextvars
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.compat.keras_random import tensorflow_seed
from keras_dist.data.shares import any_batch_size, row_count
from keras_dist.errors import ConfigurationError, NotSupportedError

Function = Callable[[tf.distribute.InputContext], tf.data.Dataset]

_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")

_CONTEXT: contextvars.ContextVar[tf.distribute.InputContext | None] = contextvars.ContextVar(
    "keras_dist_input_context", default=None
)


def current_context() -> tf.distribute.InputContext | None:
    """Returns the context of the dataset function that is being traced, `None` outside of one."""
    return _CONTEXT.get()


class DatasetFunction:
    """A dataset function, traced for each worker.

    Args:
        function: The user's function.
        workers: Number of workers.
        replicas: How many of them share the batch of a step.

    Raises:
        ConfigurationError: If it doesn't return a dataset, or the workers' elements have different types.
        NotSupportedError: If the dataset needs something of this process.
    """

    def __init__(self, function: Function, workers: int, replicas: int) -> None:
        # All shards draw the same random numbers, and the same ones again if a shard is read again.
        self._seed = secrets.randbelow(2**31) if tensorflow_seed() is None else None
        self._function = function
        self._specs: list[Any] = []
        contexts = [tf.distribute.InputContext(workers, index, replicas) for index in range(workers)]
        self.makers = [self._traced(context) for context in contexts]
        self.element_spec = self._common_spec()
        iterator_spec = tf.data.IteratorSpec(self.element_spec)
        # Takes an iterator, returns its next batch and the number of examples in it.
        self.next: Any = tf.function(_next, autograph=False).get_concrete_function(iterator_spec)

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
            self._specs.append(tf.nest.map_structure(any_batch_size, dataset.element_spec))
            return tf.data.experimental.to_variant(_untuned(dataset.prefetch(tf.data.AUTOTUNE)))

        maker = tf.function(make, autograph=False).get_concrete_function()
        _check_graph(maker)
        return maker

    def _common_spec(self) -> Any:
        for index, spec in enumerate(self._specs):
            if spec != self._specs[0]:
                raise ConfigurationError(
                    "The dataset function returns elements of different types for different workers.",
                    f"{self._specs[0]} for worker 0, {spec} for worker {index}",
                    "Use `context` only to choose the examples.",
                )
        return self._specs[0]

    def dataset(self, worker: int) -> tf.data.Dataset:
        """Makes the dataset of a worker on the current device, always the same."""
        return tf.data.experimental.from_variant(self.makers[worker](), self.element_spec)


def _next(iterator: Any) -> tuple[Any, Any]:
    batch = next(iterator)
    return batch, row_count(batch)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without TensorFlow's autotuning, unless the user has asked for it.

    A worker would wait for it after each pass: an iterator ends only when its tuner has woken up, which sleeps longer
    and longer, up to a minute (TensorFlow 2.21).
    """
    with warnings.catch_warnings():  # only the options that were set in this trace are known, and those are asked for
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
            "A dataset function must return a tf.data.Dataset.",
            type(dataset).__name__,
            "Add a `return` at its end.",
        )


def _check_graph(maker: Any) -> None:
    """Raises an error if a dataset needs what only this process has."""
    graph = maker.graph.as_graph_def()
    operations = {node.op for node in graph.node}
    operations |= {node.op for function in graph.library.function for node in function.node_def}
    if python := sorted(operations.intersection(_PYTHON)):
        raise NotSupportedError(
            "Workers can't run Python code for their data: tf.py_function, tf.numpy_function, from_generator.",
            f"the operation {python[0]} in the dataset function",
            "Use TensorFlow's operations, or pass the dataset itself: then this process reads it for all workers.",
        )
    if any(tensor.dtype == tf.variant for tensor in maker.captured_inputs):
        raise ConfigurationError(
            "The dataset function uses a dataset that was made outside of it, so only this process has it.",
            "a tf.data.Dataset in the dataset function",
            "Make it inside the function, from file names or arrays.",
        )
    if any(tensor.dtype == tf.resource for tensor in maker.captured_inputs):
        raise NotSupportedError(
            "Workers can't use a table or a variable of this process for their data.",
            "one in the dataset function (a lookup table, a preprocessing layer with a vocabulary, a tf.Variable)",
            "Use it in the model, or pass the dataset itself: then this process reads it for all workers.",
        )
