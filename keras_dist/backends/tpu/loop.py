"""`kd.shard`, `kd.run` and `kd.reduce` on a TPU: full batches, and steps that are traced."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.backends.tpu import step
from keras_dist.backends.tpu.step import Even
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, keras_strategy, tf_compat
from keras_dist.compat.keras_strategy import ReplicaScope
from keras_dist.data.shares import all_equal, lengths_of
from keras_dist.errors import NotSupportedError
from keras_dist.step import step as step_module
from keras_dist.step.gathering import gather_in_step
from keras_dist.step.optimizer import all_reduce
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.loop import Loop, as_batches, has_examples
from keras_dist.training.options import Options
from keras_dist.training.verification import Verification, Verified

_SCOPE: contextvars.ContextVar[ReplicaScope | None] = contextvars.ContextVar("keras_dist_core", default=None)


class CoreLoop(Loop, Verified):
    """The functions of a custom training loop on the cores of a TPU.

    `kd.shard` returns whole batches, and `kd.run` cuts them: filler rows would count in code that the library doesn't
    know, so all shares have the same number of examples.
    """

    def __init__(self, backend: Backend, strategy: tf.distribute.Strategy) -> None:
        self._backend = backend
        self._strategy = strategy
        self._cores = backend.num_replicas
        self._verification: Verification | None = None
        if Options().verifies_on(backend):  # the environment asks for it
            self.verify()

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        step.check_shapes(dataset)
        size, are_full = step.batch_size_of(dataset)
        if size is None:
            raise step.unknown_size(dataset)
        if size % self._cores or are_full is False:
            last = ", and a smaller one at the end" if are_full is False else ""
            raise step.not_filled(f"kd.shard of batches of {size} examples{last}, on {self._cores} core(s)")
        return step.even(dataset, size).map(lambda element: element.batch)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`. Returns the cores' outputs as `tf.distribute.DistributedValues`, for `kd.reduce`."""
        if tf.executing_eagerly():
            raise NotSupportedError(
                "A TPU runs whole steps, which must be traced.",
                "kd.run outside of a tf.function",
                "Call it in a function with @tf.function.",
            )
        args = as_batches(args)
        counts = [step.size_of(arg) // self._cores for arg in args if has_examples(arg)]
        if self._cores == 1:
            return self._strategy.run(function, args=args)
        function = tf_compat.converted(function)
        run = functools.partial(self._run_on_cores, function, args, counts[0])
        if self._verification is None:
            return run()
        return self._verification.run(self, function, args, tf.constant(counts[0] * self._cores), run)

    def _run_on_cores(self, function: Callable[..., Any], args: tuple[Any, ...], count: int) -> Any:
        traced: list[Any] = []  # by the last core; on all of them it is the same

        @tf.autograph.experimental.do_not_convert
        def replica(*args: Any) -> Any:
            current, scope = step.step_on(Even(args), self._cores), ReplicaScope(tf.constant(count), ())
            current.applied = None if self._applied is None else []
            token = _SCOPE.set(scope)
            try:
                with step_module.entered(current):
                    with scope, keras_strategy.initialized_at_once():
                        outputs = function(*args)
                    _assign_combined(self._backend, scope)
            finally:
                _SCOPE.reset(token)
            traced[:] = current.applied or []
            return outputs, step.gradients_of(traced)

        shares = tuple(self._cut(arg) if has_examples(arg) else arg for arg in args)
        distribute = functools.partial(self._backend.distribute, options=Options())
        with keras_strategy.unscaled_losses(), whole_batch(self._backend, distribute, exact=self.exact):
            outputs, gradients = self._strategy.run(replica, args=shares)
        if self._applied is not None:
            local = self._strategy.experimental_local_results
            self._applied += step.with_gradients(traced, tf.nest.map_structure(lambda leaf: local(leaf)[0], gradients))
        return outputs

    # --- Verification ---

    def verify(self) -> None:
        distribute = functools.partial(self._backend.distribute, options=Options())
        self._verification = Verification(self._backend, "kd.run", None, distribute)

    def whole(self, args: tuple[Any, ...]) -> Any:
        return args

    def distributed(self, function: Callable[..., Any], args: tuple[Any, ...], applied: list[Any]) -> Any:
        count = next(step.size_of(arg) for arg in args if has_examples(arg)) // self._cores
        with self._trying_out(applied):
            self._run_on_cores(function, args, count)

    def plain(self, function: Callable[..., Any], whole: tuple[Any, ...]) -> Any:
        with tf_compat.strategy_hidden(), keras_strategy.updates_outside_of_replicas():
            function(*whole)

    def all_reduce(self, gradients: Any) -> Any:
        return all_reduce(self._backend, gradients)

    def gather(self, tensor: Any) -> Any:
        return gather_in_step(self._backend, tensor)

    def _cut(self, batch: Any) -> Any:
        """Cuts a batch here, on the host, so that each core gets its share only."""
        if all_equal(lengths := lengths_of(batch)) is not True:
            raise step.different_lengths(lengths)
        if (size := step.size_of(batch)) % self._cores:
            raise step.not_filled(f"kd.run of a batch of {size} examples, on {self._cores} cores")
        return tf.nest.map_structure(lambda leaf: tf_compat.per_replica(tf.split(leaf, self._cores)), batch)

    def _reduce(self, operation: str, value: Any) -> Any:
        if not isinstance(value, tf.distribute.DistributedValues):
            return value
        total = tf.add_n(self._strategy.experimental_local_results(value))
        return total if operation == "sum" else total / self._cores


def once(backend: Backend, function: Callable[[], Any]) -> Any:
    """Calls a function that every replica calls with the same values: an optimizer's `apply`."""
    if (scope := _SCOPE.get()) is None:
        return function()
    _assign_combined(backend, scope)
    with keras_model.outside_stateless_scope():
        return function()


def _assign_combined(backend: Backend, scope: ReplicaScope) -> None:
    """Assigns what the replicas have assigned to variables: of floats the mean by examples, else the first one's."""
    current = step_module.current()
    assert current is not None
    for variable in scope.assigned():
        value = scope.take(variable)
        if keras_strategy.is_float(variable):
            (value,) = current.weigh([value])
            value = backend.all_reduce_exact(value, current.next_name("variables"))
        keras_strategy.assign(variable, value)
    scope.clear()
