"""The coordinator's side of parameter servers: what workers run, the server of each variable.

Functions run on whichever worker is free, and once more if a worker is lost. A thread for each worker gives it one
function after another. Outputs are fetched at once, as one tensor, so nothing is lost with a worker that is lost later.
The thread that waits for results tells TensorFlow which workers have gone or returned, while no function runs: what
TensorFlow does at that moment (it sends a tensor, makes a variable) may never end.

A variable goes to the least loaded server. An optimizer's slots are beside their variable.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.parameter_server import cluster as tasks
from keras_dist.backends.parameter_server.cluster import HERE, SERVER, WORKER, Cluster, device, is_on_server
from keras_dist.backends.parameter_server.exchange import Outputs, ShareStep, teller, type_of
from keras_dist.backends.parameter_server.shards import ShardBatch, ShardReader, packed, unpacked
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.comm.watchdog import answers, why_no_grpc
from keras_dist.compat import keras_model, keras_random, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.errors import DistributionError, PeerLostError
from keras_dist.logging import logger
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import parts_of, variables_of


class RemoteFunction:
    """A traced function. Its results are sent as one tensor.

    Results whose shape is not known (predictions) are fetched one by one. What the function has put on a server
    (gradients) stays there. The first argument is a batch of the specification `spec`.
    """

    def __init__(self, function: Callable[..., Any], spec: Any, types: Sequence[Any]) -> None:
        self._function = function
        self._specs: Any = None  # of the results
        self._packs: list[bool] = []  # for each of their tensors whether it is sent with others
        self.tell: Callable[..., list[Any]] | None = None  # see `exchange.teller`
        self._traced = tf.function(self._run, autograph=False).get_concrete_function(spec, *types)

    def __call__(self, *args: Any) -> Any:
        return self._traced(*args)

    def results(self, sent: Any) -> Any:
        """Returns the results of a call from what it returned."""
        strings, others = sent
        together, apart = map(tf.constant, unpacked(strings.numpy())), iter(others)
        leaves = [next(together if packs else apart) for packs in self._packs]
        return tf.nest.pack_sequence_as(self._specs, leaves, expand_composites=True)

    def _run(self, data: Any, *args: Any) -> tuple[Any, list[Any]]:
        # With a seed in the graph, `tf.random.*` would draw the same numbers on every worker.
        tf.compat.v1.get_default_graph().seed = None
        results = self._function(data, *args)
        if isinstance(results, Outputs) and results.told:
            self.tell = teller(results.told, data, args[0])
        leaves = tf.nest.flatten(results, expand_composites=True)
        self._specs = tf.nest.map_structure(type_of, results)
        self._packs = [leaf is not None and leaf.shape.is_fully_defined() and not is_on_server(leaf) for leaf in leaves]
        pairs = [*zip(leaves, self._packs, strict=True)]
        return packed([leaf for leaf, packs in pairs if packs]), [leaf for leaf, packs in pairs if not packs]


@dataclasses.dataclass(eq=False)
class Job:
    """A function to run on a worker, and its result."""

    function: Any  # a `RemoteFunction` or `RemoteSteps`; `None` to read only
    args: Sequence[Any]  # tensors of the coordinator
    batch: ShardBatch | None = None  # that the worker reads itself, the function's first argument
    attempts: int = 0  # how often it has failed
    started: float = 0.0  # when it was started
    seconds: float = 0.0  # that it took
    view: int = 0  # of the cluster, when it was started
    done: bool = False
    value: Any = None  # what the function returned
    error: BaseException | None = None


_TICK_SECONDS = 0.2
_ATTEMPTS = 4  # of a function that fails as if a worker were lost, though none is


class Workers:
    """All workers of a cluster.

    Once all are lost, one may take `wait_seconds` to return. A worker is given up if a step takes `hang_seconds`.
    """

    def __init__(self, cluster: Cluster, wait_seconds: float, hang_seconds: float) -> None:
        self._cluster = cluster
        self._definition = tf_compat.cluster_definition()
        self._wait_seconds = wait_seconds
        self._hang_seconds = hang_seconds
        self._changed = threading.Condition()
        self._queue: collections.deque[Job] = collections.deque()
        self._running: dict[int, Job] = {}
        self._lost: set[int] = set()
        self._hanging: set[int] = set()  # those of the lost ones that hang; calls to them would hang too
        self._lost_all_at: float | None = None
        self._fatal: BaseException | None = None
        self._updating = threading.Lock()
        self._has_changed = False  # TensorFlow must be told
        self._pauses = False
        self._view = 0  # of the cluster: how often TensorFlow was told
        tf_compat.keep_functions_while(lambda: self.hang)
        for index in range(self.size):
            self._start_thread(index)
        threading.Thread(target=self._watch, name="keras_dist_watch_workers", daemon=True).start()

    @property
    def size(self) -> int:
        """The number of workers, including the lost ones."""
        return len(self._cluster.workers)

    @property
    def hang(self) -> bool:
        """True if a worker hangs. Then nothing can be traced: TensorFlow sends each function to all, and waits."""
        return bool(self._hanging)

    def submit(self, job: Job) -> Job:
        """Lets the next free worker run a function, or the one that reads its batch. Returns `job`."""
        self._tell_tensorflow()
        with self._changing():
            self._queue.append(job)
        return job

    def first_done(self, jobs: Sequence[Job]) -> Job:
        """Waits until one of these has ended, and returns it."""
        while (done := next((job for job in jobs if job.done), None)) is None:
            self._tell_tensorflow()
            with self._changed:
                if self._fatal is not None:
                    raise self._fatal
                self._changed.wait_for(
                    lambda: any(job.done for job in jobs) or (self._has_changed and not self._hanging), _TICK_SECONDS
                )
        return done

    def result(self, job: Job) -> Any:
        self.first_done([job])
        if job.error is not None:
            self.forget()
            raise job.error
        return job.value if job.function is None else job.function.results(job.value)

    def forget(self) -> None:
        """Drops the functions that no worker has begun."""
        with self._changed:
            self._queue.clear()

    def translate(self, error: BaseException) -> BaseException:
        """Returns the error that names a lost server if that is the cause of `error`, else `error`."""
        if isinstance(error, DistributionError) or not tasks.may_be_loss(error):
            return error
        return self._fatal or tasks.lost_server(self._cluster) or error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    # --- A thread for each worker ---

    def _start_thread(self, index: int) -> None:
        threading.Thread(target=self._work, args=(index,), name=f"keras_dist_worker_{index}", daemon=True).start()

    def _work(self, index: int) -> None:
        while self._work_until_error(index):
            pass

    def _work_until_error(self, index: int) -> bool:
        """Returns False if this thread must end."""
        reader = ShardReader()
        with tf_compat.separate_executor():
            while True:
                job = self._next(index)
                try:
                    value = self._run(index, job, reader)
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # they hold tensors
                    reader.clear()
                    return self._has_failed(index, job, error)
                if not self._is_finished(index, job, value=value):
                    return False
                del job, value  # they hold the model, and the next function may never come

    def _next(self, index: int) -> Job:
        with self._changed:
            while self._pauses or index in self._lost or (job := self._first_for(index)) is None:
                self._changed.wait()
            self._queue.remove(job)
            if job.batch is not None:
                job.batch.shard.note_reader(index, job.batch.number)
            job.view, job.started = self._view, time.monotonic()
            self._running[index] = job
            return job

    def _first_for(self, index: int) -> Job | None:
        being_read = [job.batch.shard for job in self._running.values() if job.batch is not None]
        for job in self._queue:
            shard = None if job.batch is None else job.batch.shard
            if shard is None or (shard not in being_read and shard.is_for(index, self._lost)):
                return job
        return None

    def _run(self, index: int, job: Job, reader: ShardReader) -> Any:
        # Tensors of this thread alone: dropping one that was sent calls the worker, and waits if that hangs.
        with tf.device(HERE):
            args = _copied(job.args)
        with tf.device(device(WORKER, index)):
            outputs = reader.run(job.batch, job.function, args) if job.batch else job.function(*args)
        with tf.device(HERE):
            return _copied(outputs)

    def _is_finished(self, index: int, job: Job, value: Any = None, error: BaseException | None = None) -> bool:
        """Notes how a function ended. Returns False if this worker was given up: then its answer doesn't count."""
        with self._changing():
            if not self._free(index, job):
                return False
            job.seconds = time.monotonic() - job.started
            job.value, job.error, job.done = value, error, True
            return True

    def _has_failed(self, index: int, job: Job, error: BaseException) -> bool:
        """Finds out what has failed: the function, a server or the worker. Returns False if this thread must end."""
        # TensorFlow has many errors for a function that runs while the cluster changes.
        if not tasks.may_be_loss(error) and not (isinstance(error, tf.errors.OpError) and job.view != self._view):
            return self._is_finished(index, job, error=error)
        if (lost := tasks.lost_server(self._cluster)) is not None:
            lost.__cause__ = error
            self._end(lost)
            return self._is_finished(index, job, error=lost)
        if job.view == self._view and tasks.worker_is_there(self._cluster, index):
            job.attempts += 1
        if job.attempts >= _ATTEMPTS:
            return self._is_finished(index, job, error=error)
        with self._changing():
            if not self._free(index, job):
                return False
            self._queue.appendleft(job)  # for another worker
        self._lose(index, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return True

    def _free(self, index: int, job: Job) -> bool:
        """Notes that a function has ended on a worker. Returns False if the worker was given up while it ran."""
        if self._running.get(index) is job:
            del self._running[index]
            return True
        self._hanging.discard(index)
        self._has_changed = True
        return False

    # --- Workers that are lost, and that return ---

    def _lose(self, index: int, why: str) -> None:
        address = self._cluster.workers[index]
        with self._changing():
            self._lost.add(index)
            left = self.size - len(self._lost)
            if not left:
                self._lost_all_at = time.monotonic()
            self._has_changed = self._has_changed or index not in self._hanging
        others = f"{left} of {self.size} continue" if left else "waiting for one to return"
        logger().warning("worker %d at %s is lost (%s); %s.", index, address, why, others)

    def _tell_tensorflow(self) -> None:
        """Tells TensorFlow which workers there are if that has changed, unless one hangs: it would wait for that."""
        if not self._has_changed or self._hanging:
            return
        with self._updating:
            with self._changed:
                self._pauses = True
                self._changed.wait_for(lambda: not self._running or self._fatal is not None)
            try:
                self._update()
            finally:
                with self._changing():
                    self._pauses = False

    def _update(self) -> None:
        with self._changed:
            self._has_changed = False
            away = self._lost - self._hanging
        listening = {index for index in away if answers(self._cluster.workers[index])}
        shown = self._show(away - listening)
        back = {index for index in listening if shown and tasks.worker_is_there(self._cluster, index)}
        if back != listening:
            self._show(away - back)
        for index in back:
            logger().warning("worker %d at %s is back.", index, self._cluster.workers[index])
        if back:
            with self._changed:
                self._lost -= back
                self._lost_all_at = None

    def _show(self, without: Iterable[int]) -> bool:
        self._view += 1
        try:
            tf_compat.update_cluster(self._definition, [(WORKER, index) for index in sorted(without)])
        except tf.errors.OpError as error:  # another one was lost, and its function will fail
            logger().debug("the cluster could not be updated: %s", error)
            return False
        return True

    def _watch(self) -> None:
        """Looks for workers that have returned, and gives up those that hang."""
        while self._fatal is None:
            self._let_time_pass()  # a frame of its own: a job that this thread keeps would hold the model
            self._give_up_hanging()
            if any(not why_no_grpc(self._cluster.workers[index]) for index in sorted(self._lost - self._hanging)):
                with self._changing():
                    self._has_changed = True
            if self._lost_all_at is not None and time.monotonic() - self._lost_all_at > self._wait_seconds:
                addresses = enumerate(self._cluster.workers)
                self._end(
                    PeerLostError(
                        f"All workers are lost, and none has returned within {self._wait_seconds:g} s.",
                        ", ".join(f"worker {index} at {address}" for index, address in addresses),
                        "Look at the output of the workers. With keras.callbacks.BackupAndRestore the next start "
                        "resumes from the last checkpoint.",
                    )
                )

    def _let_time_pass(self) -> None:
        began = time.monotonic()
        time.sleep(_TICK_SECONDS)
        # All Python threads stand still while TensorFlow sends a new function to a worker that hangs. Don't count that.
        stood_still = time.monotonic() - began - _TICK_SECONDS
        with self._changed:
            for job in self._running.values():
                job.started += stood_still

    def _give_up_hanging(self) -> None:
        if not self._too_slow():
            return
        if (lost := tasks.lost_server(self._cluster)) is not None:  # then all workers hang with it
            self._end(lost)
            return
        with self._changed:
            hanging = self._too_slow()
            self._hanging.update(hanging)
            for index in hanging:
                self._queue.appendleft(self._running.pop(index))
        for index in hanging:
            self._lose(index, f"no answer for {self._hang_seconds:g} s")
            self._start_thread(index)  # the old one hangs with the worker

    def _too_slow(self) -> list[int]:
        def limit(job: Job) -> float:
            return job.started + self._hang_seconds * (1 if job.batch is None else job.batch.count)

        return [index for index, job in [*self._running.items()] if time.monotonic() > limit(job)]

    def _end(self, error: PeerLostError) -> None:
        with self._changing():
            self._fatal = error


def _copied(structure: Any) -> Any:
    """Returns copies on the current device. What a server holds stays there: no worker takes it along."""
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) and not is_on_server(leaf) else leaf,
        structure,
        expand_composites=True,
    )


_ATTACHED = "_keras_dist_placed"  # attribute of an optimizer


@contextlib.contextmanager
def at_home(variables: Sequence[Any]) -> Iterator[None]:
    """While this is entered, copies of variables are here, where TensorFlow writes a file."""
    away = list(map(keras_model.backing, variables))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # several come at the same time
        copies = list(pool.map(lambda variable: _copied_to(HERE, variable), variables))
    for variable, copy in zip(variables, copies, strict=True):
        keras_model.set_backing(variable, copy)
    try:
        yield
    finally:
        for variable, value in zip(variables, away, strict=True):
            keras_model.set_backing(variable, value)


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

    def _lead(self, cluster: Cluster, workers: Workers) -> None:
        self._cluster, self.workers = cluster, workers
        self._bytes = dict.fromkeys(self.variable_devices(), 0)  # on each server
        self._use(tasks.first_devices(workers.size), HERE, tf.distribute.ReductionToOneDevice())

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

    def place(self, variables: Sequence[Any]) -> None:
        """Moves those variables to servers that are not on one."""
        for variable in variables:
            old = keras_model.backing(variable)
            if not any(old.device.startswith(device + "/") for device in self._bytes):
                server = min(self._bytes, key=lambda name: self._bytes[name])
                self._bytes[server] += int(variable.shape.num_elements() or 0) * old.dtype.size
                keras_model.set_backing(variable, _copied_to(server, variable))
                logger().debug("variable %s is on %s", variable.path, server)

    def place_optimizer(self, optimizer: Any) -> None:
        """Moves an optimizer's existing variables, and makes it place new slots beside the variables they are for."""
        for part in parts_of(optimizer):
            if getattr(part, _ATTACHED, None) is None:
                attach(part, _ATTACHED, True)
                attach(part, "add_variable_from_reference", _on_server_of(0, part.add_variable_from_reference))
                attach(part, "update_step", _on_server_of(1, part.update_step))
        self.place([variable for variable in variables_of(optimizer) if not keras_random.is_seed(variable)])

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
