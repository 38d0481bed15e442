"""`kd.shard`, `kd.run` and `kd.reduce`, the functions of a custom loop.

What a step of a loop assigns to Keras variables is combined by the variable's `aggregation`. A rank's change counts in
full with `"sum"` (metrics), otherwise by its number of examples (BatchNormalization's moving averages). Of integers,
and with `"only_first_replica"`, the first rank's change counts. All changes travel in one reduction at the end of the
step, so `metric.result()` is right on each rank.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.comm.replicas import mean_of_shares
from keras_dist.compat import keras_model, keras_random, tf_compat, tf_graphs
from keras_dist.data import sources
from keras_dist.data.shares import Share, Shares, cut_again, examples_of, joined, row_count
from keras_dist.errors import ConfigurationError, MismatchError, NotSupportedError
from keras_dist.step.gathering import on_share
from keras_dist.step.step import Step, consistency_check_of
from keras_dist.step.whole_batch import combine, whole_batch
from keras_dist.training.options import Options
from keras_dist.training.trial import batch_of_all_ranks
from keras_dist.training.verification import Verification, Verified

tf_compat.keep_types(ConfigurationError, MismatchError, NotSupportedError)


@contextlib.contextmanager
def combined(backend: Backend, step: Step) -> Iterator[None]:
    """Combines what is assigned in this context, except by distributed optimizers. Every rank must enter it."""
    graph = tf_graphs.current()
    before: dict[int, tuple[Any, Any]] = {}

    def observe(variable: Any) -> None:
        # The seeds of all ranks advance alike.
        if variable.trainable or keras_random.is_seed(variable) or id(variable) in before:
            return
        if tf_graphs.current() is not graph:  # it need not be traced again
            raise NotSupportedError(
                "The step of a custom training loop assigns a variable inside a tf.function, tf.cond or "
                "tf.while_loop, where it cannot be combined over the ranks.",
                f"variable {variable.path!r}",
                "Update metrics in the step itself, and put @tf.function around the function that calls kd.run.",
            )
        before[id(variable)] = variable, tf.identity(keras_model.backing(variable))

    with keras_model.observed(observe):
        yield
    combine(backend, step, list(before.values()))


class Loop:
    """`kd.shard` and the other functions of a custom training loop, on one replica, where nothing is distributed."""

    exact: bool | None = None  # see `kd.distribute`

    def verify(self) -> None:
        """Compares the first steps of `kd.run` with those of one process, from now on."""

    def shard(self, source: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        sources.check_source(source)
        return self._split(source) if isinstance(source, tf.data.Dataset) else self._sharded(source)

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset

    def _sharded(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        return source(tf.distribute.InputContext())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        is_traced = isinstance(function, tf.types.experimental.PolymorphicFunction)
        return function(*args) if is_traced else tf_compat.converted(function)(*args)

    def reduce(self, operation: str, value: Any) -> Any:
        if operation not in ("sum", "mean"):
            raise ConfigurationError("Unknown reduction.", f"op={operation!r}", "Use one of 'sum', 'mean'.")

        def reduced(leaf: Any) -> Any:
            # A metric has counted the examples of all replicas by the end of `kd.run`.
            return leaf.result() if isinstance(leaf, keras.Metric) else self._reduce(operation, leaf)

        return tf.nest.map_structure(reduced, value)

    def _reduce(self, operation: str, value: Any) -> Any:
        return value


class ReplicaLoop(Loop, Verified):
    """The functions of a custom training loop on one of several ranks, or on several replicas that a rank leads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        consistency_check_of(backend.topology.size)  # now: a step that finds an optimizer could not create it
        # Ordinary variables, also if it is a replica of a strategy that asks for the loop first.
        self._counts = [tf_compat.host_variable(0, "loop_count") for _ in range(backend.replicas)]
        self._total = tf_compat.host_variable(0, "loop_total")
        self._fingerprint = tf_compat.host_variable(0.0, "loop_fingerprint")
        self._verification: Verification | None = None
        self._reductions: MutableMapping[Any, int] = weakref.WeakKeyDictionary()
        self._traces: MutableMapping[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
        if Options().verifies_on(backend):  # the environment asks for it
            self.verify()

    def _split(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        mode = "sharded" if sources.is_sharded(dataset) else "split"
        return sources.shares_of_rank(dataset, mode, self._backend)

    def _sharded(self, source: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        size, rank = self._backend.topology.size, self._backend.topology.rank
        dataset = source(tf.distribute.InputContext(size, rank, self._backend.num_replicas))
        if isinstance(dataset.element_spec, Shares):  # of kd.shard(dataset): the function did it all
            return dataset
        return self._split(dataset) if size == 1 else sources.shares_of_rank(dataset, "sharded", self._backend)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `kd.run`. The collectives of a `tf.function` are traced together with those of the step.

        Several replicas' outputs are `tf.distribute.DistributedValues`, for `kd.reduce`.
        """
        if isinstance(args, Shares):
            raise ConfigurationError(
                "`args` of kd.run must be a tuple of the step's arguments.",
                "an element of kd.shard",
                "Put it into a tuple: kd.run(step, args=(batch,)).",
            )
        if not isinstance(function, tf.types.experimental.PolymorphicFunction):
            return self._run(function, args)
        run = functools.partial(self._run, function.python_function)
        if not tf.executing_eagerly():
            return run(args)
        if function not in self._traces:
            self._traces[function] = tf.function(run, reduce_retracing=True)
        return self._traces[function](args)

    def verify(self) -> None:
        self._verification = Verification(self._backend, self, "kd.run", None)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        function, args = tf_compat.converted(function), self._as_shares(args)
        if self._verification is None:
            return self._run_on_shares(function, args)
        step = functools.partial(self._run_on_shares, function, args)
        return self._verification.run(function, args, self._total_of(args), step)

    def _as_shares(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cuts the examples of this rank for its replicas, if none of the arguments is from `kd.shard`."""
        if any(isinstance(arg, Shares) for arg in args):
            return args
        args, replicas = as_batches(args), self._backend.replicas
        count = row_count(args)
        total = self._backend.all_reduce_exact(tf.cast(count, tf.float64), "keras_dist_loop_total")
        share = Share(None, count, tf.cast(total, tf.int32), tf.constant(0.0))
        # One replica gets all arguments as they are.
        return tuple(
            cut_again(share._replace(data=arg), replicas) if replicas == 1 or has_examples(arg) else arg for arg in args
        )

    def _total_of(self, args: tuple[Any, ...]) -> Any:
        return self._shares_in(args).parts[0].total

    def _shares_in(self, args: tuple[Any, ...]) -> Shares:
        """Returns the shares that count: the first ones. Without any, each replica counts as one example."""
        if (shares := next((arg for arg in args if isinstance(arg, Shares)), None)) is not None:
            return shares
        one = Share(None, tf.constant(1), tf.constant(self._backend.num_replicas), tf.constant(0.0))
        return Shares((one,) * self._backend.replicas)

    def whole(self, args: tuple[Any, ...]) -> Any:
        return tuple(
            batch_of_all_ranks(self._backend, arg.parts) if isinstance(arg, Shares) else arg for arg in args
        )

    def distributed(self, function: Callable[..., Any], args: tuple[Any, ...], applied: list[Any]) -> Any:
        with self._trying_out(applied):
            self._run_on_shares(function, args)

    def plain(self, function: Callable[..., Any], whole: tuple[Any, ...]) -> Any:
        function(*whole)

    def _run_on_shares(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        shares, topology, replicas = self._shares_in(args), self._backend.topology, self._backend.replicas
        of_rank = Step.of(joined(shares), topology.rank)
        of_rank.applied = self._applied
        for variable, count in zip(self._counts, shares.counts, strict=True):
            variable.assign(count)
        self._total.assign(of_rank.total)
        self._fingerprint.assign(of_rank.fingerprint)

        def run(index: int) -> Any:
            share = shares.parts[index]
            if tf.executing_eagerly():  # a tf.function that the step calls is traced once, and reads them each time
                share = share._replace(count=self._counts[index], total=self._total, fingerprint=self._fingerprint)
            step = Step.of(share, topology.rank * replicas + index)
            step.applied = self._applied if index == 0 else None
            own = tuple(examples_of(arg.parts[index]) if isinstance(arg, Shares) else arg for arg in args)
            with on_share(self._backend, step, own, self.exact) as own:
                step.examples = [part for part, arg in zip(own, args, strict=True) if isinstance(arg, Shares)]
                return function(*own)

        of_ranks = combined(self._backend, of_rank) if topology.size > 1 else contextlib.nullcontext()
        with whole_batch(self._backend, self.prepare_found, exact=self.exact), of_ranks:
            outputs = self._backend.run(run, shares.counts)
        if replicas == 1:
            return outputs[0]
        return tf.nest.map_structure(
            lambda *values: tf_compat.per_replica(values) if tf.is_tensor(values[0]) else values[-1], *outputs
        )

    def prepare_found(self, optimizer: Any) -> None:
        self._backend.distribute(optimizer, Options())

    def _reduce(self, operation: str, value: Any) -> Any:
        if isinstance(value, tf.distribute.DistributedValues):
            values = value.values
            value = tf.add_n(values) if operation == "sum" else mean_of_shares(values, self._counts)
        if self._backend.topology.size == 1:
            return value
        number = 0  # eager reductions run one after the other, so they can share a name
        if not tf.executing_eagerly():  # each trace starts at 1: ranks may retrace at other times
            graph = tf_graphs.outermost(tf.compat.v1.get_default_graph())
            number = self._reductions[graph] = self._reductions.get(graph, 0) + 1
        value = tf.convert_to_tensor(value)
        if operation == "mean":
            count = tf.add_n(self._counts)
            weight = tf.cast(count, value.dtype) / tf.cast(self._total, value.dtype)
            value = tf.where(count > 0, value * weight, tf.zeros_like(value))
        return self._backend.all_reduce_exact(value, f"keras_dist_loop_reduce_{number}")


def as_batches(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tf.convert_to_tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args)


def has_examples(arg: Any) -> bool:
    """True if an argument of `kd.run` is a batch: a structure of tensors that are no scalars."""
    leaves = tf.nest.flatten(arg)
    return bool(leaves) and all(tf.is_tensor(leaf) and leaf.shape.rank != 0 for leaf in leaves)
