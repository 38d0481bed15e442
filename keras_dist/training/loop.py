"""`kd.shard`, `kd.run` and `kd.reduce`, the functions of a custom loop; what steps call, also those of `fit`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import tf_compat, tf_graphs
from keras_dist.data import sources
from keras_dist.data.shares import Share, Shares, examples_of, row_count
from keras_dist.errors import ConfigurationError
from keras_dist.step import step as step_module
from keras_dist.step.agreement import agreement_of
from keras_dist.step.draws import placed
from keras_dist.step.gathering import gather_in_step
from keras_dist.step.gradients import all_reduce
from keras_dist.step.step import Step
from keras_dist.step.whole_batch import whole_batch
from keras_dist.training.loop_state import combined
from keras_dist.training.options import Options
from keras_dist.training.rows import batch_of_all_ranks
from keras_dist.training.verification import Verification, Verified

_OPERATIONS = ("sum", "mean")


class Loop:
    """The functions of a custom training loop on one replica, where nothing is distributed."""

    exact = False  # see `kd.distribute`

    def verify(self) -> None:
        """Compares the first steps of `kd.run` with those of one process, from now on."""

    def shard(self, source: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """See `kd.shard`."""
        sources.check_source(source)
        return self._split(source) if isinstance(source, tf.data.Dataset) else self._sharded(source)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset

    def _sharded(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        return source(tf.distribute.InputContext())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`."""
        return function(*args)

    def reduce(self, operation: str, value: Any) -> Any:
        """See `kd.reduce`."""
        if operation not in _OPERATIONS:
            known = ", ".join(repr(known) for known in _OPERATIONS)
            raise ConfigurationError("Unknown reduction.", f"op={operation!r}", f"Use one of {known}.")
        reduce = functools.partial(self._reduce, operation)
        # A metric has counted the examples of all replicas by the end of `kd.run`.
        return tf.nest.map_structure(lambda leaf: leaf.result() if _is_metric(leaf) else reduce(leaf), value)

    def _reduce(self, operation: str, value: Any) -> Any:
        return value

    def all_reduce(self, gradients: Any) -> Any:
        """See `kd.all_reduce`."""
        return gradients

    def gather(self, tensor: Any) -> Any:
        """See `kd.gather`."""
        return tensor


def _is_metric(value: Any) -> bool:
    return isinstance(value, keras.Metric)


class RankLoop(Loop, Verified):
    """The functions of a custom training loop on one of several ranks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        agreement_of(backend.topology.size)  # before a step that finds an optimizer: there it could not be created
        # Ordinary variables, also if it is a replica of a strategy that asks for the loop first.
        with tf.init_scope(), tf_compat.variables_made_by(), tf.device("CPU:0"):
            self._count = tf.Variable(0, trainable=False, name="keras_dist_loop_count")
            self._total = tf.Variable(0, trainable=False, name="keras_dist_loop_total")
            self._fingerprint = tf.Variable(0.0, trainable=False, name="keras_dist_loop_fingerprint")
        self._verification: Verification | None = None
        self._reductions: MutableMapping[Any, int] = weakref.WeakKeyDictionary()
        self._traces: MutableMapping[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
        if Options().verifies_on(backend):  # the environment asks for it
            self.verify()

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return sources.MODES["sharded" if sources.is_sharded(dataset) else "split"](dataset, self._backend)

    def _sharded(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        size, rank = self._backend.topology.size, self._backend.topology.rank
        dataset = source(tf.distribute.InputContext(size, rank, size))
        return dataset if size == 1 else sources.sharded(dataset, self._backend)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`. The collectives of a `tf.function` are traced together with those of the step."""
        if isinstance(args, Share | Shares):
            raise ConfigurationError(
                "`args` of kd.run must be a tuple of the step's arguments.",
                "an element of kd.shard",
                "Put it into a tuple: kd.run(step, args=(batch,)).",
            )
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            return self._traced(function)(args)
        return self._run(function, args)

    def _traced(self, function: Any) -> Callable[..., Any]:
        run = functools.partial(self._run, function.python_function)
        if not tf.executing_eagerly():
            return run
        if function not in self._traces:
            self._traces[function] = tf.function(run, reduce_retracing=True)
        return self._traces[function]

    def verify(self) -> None:
        self._verification = Verification(self._backend, "kd.run", None, self._distribute)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._verification is None:
            return self._run_on_shares(function, args)
        step = functools.partial(self._run_on_shares, function, args)
        return self._verification.run(self, tf_compat.converted(function), args, self._total_of(args), step)

    # --- What a verification asks for, see `verification.Verified` ---

    def _total_of(self, args: tuple[Any, ...]) -> Any:
        return self._counts([arg for arg in args if isinstance(arg, Share)], args)[1]

    def whole(self, args: tuple[Any, ...]) -> Any:
        if not any(isinstance(arg, Share) for arg in args):  # tensors of each rank
            return batch_of_all_ranks(self._backend, Share(args, row_count(args), *[tf.constant(0)] * 2))
        return tuple(batch_of_all_ranks(self._backend, arg) if isinstance(arg, Share) else arg for arg in args)

    def distributed(self, function: Callable[..., Any], args: tuple[Any, ...], applied: list[Any]) -> Any:
        with self._trying_out(applied):
            self._run_on_shares(function, args)

    def plain(self, function: Callable[..., Any], whole: tuple[Any, ...]) -> Any:
        function(*whole)

    def table_of_all(self, table: Any) -> Any:
        return self._backend.all_gather(table, "keras_dist_verified_table")

    # --- Steps ---

    def _run_on_shares(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        shares = [arg for arg in args if isinstance(arg, Share)]
        count, total, fingerprint = self._counts(shares, args)
        self._count.assign(count)
        self._total.assign(total)
        self._fingerprint.assign(fingerprint)
        # The variables: a tf.function that an eager step calls is traced once, and reads them each time.
        step = Step(self._count, self._total, self._fingerprint, replica=self._backend.topology.rank)
        step.applied = self._applied
        args = tuple(examples_of(arg) if isinstance(arg, Share) else arg for arg in args)
        if self.exact:
            args = placed(self._backend, step, args)
        whole = whole_batch(self._backend, self._distribute, exact=self.exact)
        with step_module.entered(step), whole, combined(self._backend, step):
            return function(*args)

    def _distribute(self, optimizer: Any) -> None:
        self._backend.distribute(optimizer, Options())

    def _counts(self, shares: list[Share], args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        if shares:
            return shares[0].count, shares[0].total, shares[0].fingerprint
        count = row_count(args)
        total = self._backend.all_reduce_exact(tf.cast(count, tf.float64), "keras_dist_loop_total")
        return count, tf.cast(total, tf.int32), tf.constant(0.0)

    def _reduce(self, operation: str, value: Any) -> Any:
        value, name = tf.convert_to_tensor(value), f"keras_dist_loop_reduce_{self._number_in_trace()}"
        if operation == "mean":
            weight = tf.cast(self._count, value.dtype) / tf.cast(self._total, value.dtype)
            value = tf.where(self._count > 0, value * weight, tf.zeros_like(value))
        return self._backend.all_reduce_exact(value, name)

    def all_reduce(self, gradients: Any) -> Any:
        return all_reduce(self._backend, gradients)

    def gather(self, tensor: Any) -> Any:
        return gather_in_step(self._backend, tensor)

    def _number_in_trace(self) -> int:
        """Returns the number of this reduction in its trace. Each trace starts at 1: ranks may retrace at other times.

        Eager reductions run one after the other, so they can share a name.
        """
        if tf.executing_eagerly():
            return 0
        graph = tf_graphs.outermost(tf.compat.v1.get_default_graph())
        self._reductions[graph] = self._reductions.get(graph, 0) + 1
        return self._reductions[graph]
