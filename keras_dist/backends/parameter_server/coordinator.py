"""The coordinator's side of parameter servers: its devices, the server of each variable, and what Keras iterates over.

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
from keras_dist.backends.parameter_server.exchange import NO_FINGERPRINT, ShareStep
from keras_dist.backends.parameter_server.shards import DatasetFunction, Function, Shard, ShardBatch, ShardReader
from keras_dist.backends.parameter_server.workers import Job, Workers
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.compat import keras_model, keras_random, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.data import sources
from keras_dist.data.shares import Share, Shares, row_count
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import parts_of, variables_of

_ATTACHED, _DATA = "_keras_dist_placed", "_keras_dist_on_workers"


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


class OnWorkers(DatasetFunction):
    """Data that the workers read: `fit`, `evaluate` and `validation_data` take them, or a custom loop."""

    def __init__(self, function: Function, backend: Coordinator) -> None:
        self._size = backend.workers.size
        super().__init__(function, self._size, backend.num_replicas)
        self._backend = backend
        self._epochs = 0
        self._reader = ShardReader()  # of a custom loop

    def __iter__(self) -> Iterator[Shares]:
        """Yields the workers' next batches, as the shares of a step in a custom loop. They stay on the workers."""
        shards, devices = self.shards(), first_devices(self._size)
        while open_shards := [shard for shard in shards if not shard.has_ended]:
            batches = {shard.index: self._read(shard, devices[shard.index]) for shard in open_shards}
            if total := sum(int(row_count(batch)) for batch in batches.values() if batch is not None):
                yield Shares(tuple(self._share(batches.get(index), total) for index in range(self._size)))

    def _read(self, shard: Shard, device: str) -> Any:
        with tf.device(device):
            batch = self._reader.run(shard.next_batch(), lambda data: data, ())
        shard.has_ended = batch is None
        return None if isinstance(batch, int) else batch

    def _share(self, batch: Any, total: int) -> Share:
        total = tf.constant(total)
        if batch is None:
            return sources.empty_share(self.element_spec)._replace(total=total)
        return Share(batch, row_count(batch), total, tf.constant(NO_FINGERPRINT))

    def shards(self) -> list[Shard]:
        """Begins a pass over the data."""
        self._epochs += 1
        return [Shard(self, index, self._epochs - 1) for index in range(self._size)]

    def weighted(self, class_weight: dict[int, float] | None) -> OnWorkers:
        """Returns data whose examples have the weights of their classes."""
        if class_weight is None:
            return self
        function = self._function
        return OnWorkers(lambda context: keras_model.weighted(function(context), class_weight), self._backend)

    def stand_in(self) -> tf.data.Dataset:
        """Returns a dataset that Keras takes, until a `Pass` over these data replaces it."""
        nothing = tf.data.Dataset.from_generator(_not_read, output_signature=tf.TensorSpec([None]))
        attach(nothing, _DATA, self)
        return nothing


def _not_read() -> Iterator[Any]:
    raise not_read_here()


def not_read_here(received: str = "the batches of kd.shard(function), in `fit`") -> NotSupportedError:
    """Returns the error for data that this process would have to read, though the workers do."""
    return NotSupportedError(
        "What workers read is for `fit`, `evaluate`, `validation_data` and `kd.run`; this process never sees it.",
        received,
        "Pass the dataset itself: then this process reads it for all workers.",
    )


def stood_for(dataset: Any) -> OnWorkers | None:
    """Returns the data that workers read for which this dataset stands, `None` if it is a dataset of its own."""
    return getattr(dataset, _DATA, None)


class Pass:
    """Data that workers read, where Keras was given a stand-in; and one pass over them.

    An epoch has `limit` steps, or lasts as long as there are data.
    """

    def __init__(self, on_workers: OnWorkers, limit: int | None) -> None:
        self.element_spec = on_workers.element_spec
        self.reads: dict[ShardBatch, Job] = {}  # of the batches of the next synchronous step
        self.asked = 0  # asynchronous steps that Keras has asked for
        self.done = 0  # those that were made
        self._on_workers, self._limit = on_workers, limit
        self._shards: Sequence[Shard] = ()
        self._turn = 0

    def __iter__(self) -> Pass:
        begun = Pass(self._on_workers, self._limit)
        begun._shards = self._on_workers.shards()
        return begun

    def __next__(self) -> Any:
        raise not_read_here()  # the engine takes steps, not batches

    def next_batches(self) -> list[ShardBatch]:
        """Returns the next batch of each worker; raises `StopIteration` if all shards have ended."""
        batches = [shard.next_batch() for shard in self._shards if not shard.has_ended]
        if not batches:
            raise StopIteration
        return batches

    def shares(self, counts: Sequence[int | None]) -> dict[int, Share]:
        """Returns the batches that were read as the shares of a step, by replica, without empty ones.

        `counts` are their examples, `None` after the end of a shard.
        """
        total, found = sum(count or 0 for count in counts), {}
        for batch, count in zip(self.reads, counts, strict=True):
            batch.shard.has_ended = count is None
            if count:
                found[batch.shard.index] = Share(batch, count, total, NO_FINGERPRINT)
        self.reads = {}
        return found

    def next_batch(
        self, most: int, ahead: int, window: int | None, under_way: Sequence[ShardBatch]
    ) -> ShardBatch | None:
        """Returns the batches of the next call; `None` if all shards have ended, or enough steps are under way.

        `ahead` is how many calls on a shard may be under way, `window` how many steps may be; `None` for any number.
        """
        begun = sum(batch.count for batch in under_way)
        if window is not None:
            most = min(most, window - begun)
        if self._limit is not None:  # a step that Keras doesn't ask for must not be made
            most = min(most, self._limit - self.done % self._limit - begun)
        reading = [batch.shard for batch in under_way]
        for offset in range(len(self._shards) if most > 0 else 0):
            shard = self._shards[(self._turn + offset) % len(self._shards)]
            if not shard.has_ended and reading.count(shard) < ahead:
                self._turn += offset + 1
                return shard.next_batch(most)
        return None
