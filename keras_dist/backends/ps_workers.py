"""The coordinator's hands: runs functions on whichever worker is free, and again if a worker is lost.

A thread per worker hands it one function after another. What a function returns is fetched at once, so that a worker
which is lost later takes nothing with it.
"""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends import tf_compat
from keras_dist.backends.presence import listens
from keras_dist.backends.ps_cluster import COORDINATOR, SERVER, WORKER, Cluster, device
from keras_dist.errors import DistributionError, PeerLostError
from keras_dist.logging import logger

_TICK_SECONDS = 0.2
_ATTEMPTS = 4  # of a function that fails as if a worker were lost, though all are there
_HERE = device(COORDINATOR, 0) + "/device:CPU:0"
# What TensorFlow says when the other end of a connection has gone, or was replaced.
_LOSS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_REPLACED = (
    "Unable to find a context_id", "unknown device", "remote_handle", "does not exist", "Primary device is not remote",
    "is neither a type of a primitive operation",
)  # fmt: skip


class Job:
    """A function to run on a worker, and what has become of it.

    Args:
        function: Concrete: it isn't traced any more.
        args: Its arguments, tensors of the coordinator.
        number: Its place among all.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], number: int) -> None:
        self.function = function
        self.args = args
        self.number = number
        self.attempts = 0
        self.started = 0.0
        self.worker: int | None = None
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None


class Workers:
    """All workers of a cluster.

    Args:
        cluster: The addresses of all.
        wait_seconds: How long to wait for a worker to return, once all are gone.
        hang_seconds: How long a function may take, before its worker is given up.
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
        self._hanging: set[int] = set()  # of the lost ones; calls to them would hang too
        self._lost_all_at: float | None = None
        self._fatal: BaseException | None = None
        self._count = 0
        self._updating = threading.Lock()
        for index in range(self.size):
            self._start_thread(index)
        threading.Thread(target=self._watch, name="keras_dist_watch_workers", daemon=True).start()

    @property
    def size(self) -> int:
        """Number of workers, with those that are lost."""
        return len(self._cluster.workers)

    def submit(self, function: Callable[..., Any], *args: Any) -> Job:
        """Lets the next free worker run a function."""
        with self._changed:
            self._count += 1
            job = Job(function, args, self._count)
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def result(self, job: Job) -> Any:
        """Waits for a function, and returns what it returned.

        Raises:
            PeerLostError: If a server is lost, or all workers for too long.
            BaseException: What the function raised.
        """
        with self._changed:
            while not job.done:
                if self._fatal is not None:
                    raise self._fatal
                self._changed.wait(_TICK_SECONDS)
        if job.error is not None:
            self.forget()
            raise job.error
        return job.value

    def forget(self) -> None:
        """Drops what nobody has begun with."""
        with self._changed:
            self._queue.clear()

    def lost_server(self) -> PeerLostError | None:
        """Returns the error that names a server which is lost, `None` if all are there."""
        for index, address in enumerate(self._cluster.servers):
            if not listens(address) or not tf_compat.knows_this_process(device(SERVER, index)):
                gone = "does not answer any more" if not listens(address) else "was started anew, and holds nothing"
                return PeerLostError(
                    "A parameter server has gone, and with it the variables that it held.",
                    f"server {index} at {address} {gone}",
                    "Start all again: with keras.callbacks.BackupAndRestore training goes on from the last checkpoint.",
                )
        return None

    def translate(self, error: BaseException) -> BaseException:
        """Returns the error that names a lost server, if that is what `error` comes from."""
        if isinstance(error, DistributionError) or not _may_be_loss(error):
            return error
        return self._fatal or self.lost_server() or error

    # --- A thread for each worker ---

    def _start_thread(self, index: int) -> None:
        threading.Thread(target=self._work, args=(index,), name=f"keras_dist_worker_{index}", daemon=True).start()

    def _work(self, index: int) -> None:
        while self._work_until_error(index):
            pass

    def _work_until_error(self, index: int) -> bool:
        """False if this thread is to end."""
        with tf_compat.own_executor():
            while True:
                job = self._next(index)
                try:
                    value = self._run(index, job)
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # they hold tensors
                    return self._has_failed(index, job, error)
                if not self._is_finished(index, job, value=value):
                    return False

    def _next(self, index: int) -> Job:
        with self._changed:
            while index in self._lost or not self._queue:
                self._changed.wait()
            job = self._queue.popleft()
            job.attempts += 1
            job.worker, job.started = index, time.monotonic()
            self._running[index] = job
            return job

    def _run(self, index: int, job: Job) -> Any:
        # Tensors of this thread alone: whoever drops one that was sent tells the worker, and waits if it hangs.
        with tf.device(_HERE):
            args = _copied(job.args)
        with tf.device(device(WORKER, index)):
            outputs = job.function(*args)
        with tf.device(_HERE):
            return _copied(outputs)

    def _is_finished(self, index: int, job: Job, value: Any = None, error: BaseException | None = None) -> bool:
        """Notes how a function ended; False if this worker was given up meanwhile, and its answer doesn't count."""
        with self._changed:
            if self._running.get(index) is not job:
                self._hanging.discard(index)
                return False
            del self._running[index]
            job.value, job.error, job.done = value, error, True
            self._changed.notify_all()
            return True

    def _has_failed(self, index: int, job: Job, error: BaseException) -> bool:
        """Decides whose fault it was; False if this thread is to end."""
        if not _may_be_loss(error) or job.attempts >= _ATTEMPTS:
            return self._is_finished(index, job, error=error)
        lost_server = self.lost_server()
        if lost_server is not None:
            lost_server.__cause__ = error
            self._fatal = lost_server
            return self._is_finished(index, job, error=lost_server)
        with self._changed:
            if self._running.get(index) is not job:
                self._hanging.discard(index)
                return False
            del self._running[index]
            self._queue.appendleft(job)
        self._lose(index, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return True

    # --- Losing workers, and finding them again ---

    def _lose(self, index: int, why: str) -> None:
        address = self._cluster.workers[index]
        with self._changed:
            self._lost.add(index)
            left = self.size - len(self._lost)
            if not left:
                self._lost_all_at = time.monotonic()
            self._changed.notify_all()
        others = f"{left} of {self.size} go on" if left else "waiting for one to return"
        logger().warning("worker %d at %s is lost (%s); %s.", index, address, why, others)
        if index not in self._hanging:
            self._update()

    def _update(self) -> None:
        """Tells TensorFlow which workers there are."""
        with self._updating:
            without = [(WORKER, index) for index in sorted(self._lost - self._hanging)]
            try:
                tf_compat.update_cluster(self._definition, without)
            except tf.errors.OpError as error:  # another one was lost: its own function says so
                logger().debug("the cluster could not be updated: %s", error)

    def _watch(self) -> None:
        """Takes workers back that have returned, and gives up those that hang."""
        while True:
            time.sleep(_TICK_SECONDS)
            self._give_up_hanging()
            for index in sorted(self._lost - self._hanging):
                if listens(self._cluster.workers[index]):
                    self._take_back(index)
            waited = 0.0 if self._lost_all_at is None else time.monotonic() - self._lost_all_at
            if waited > self._wait_seconds:
                self._end_waiting()
                return

    def _take_back(self, index: int) -> None:
        with self._updating:
            without = [(WORKER, other) for other in sorted(self._lost - self._hanging - {index})]
            try:
                tf_compat.update_cluster(self._definition, without)
            except tf.errors.OpError as error:
                logger().debug("worker %d could not be taken back yet: %s", index, error)
                return
        if not tf_compat.knows_this_process(device(WORKER, index)):
            self._update()  # without it; then once more
            return
        with self._changed:
            self._lost.discard(index)
            self._lost_all_at = None
            self._changed.notify_all()
        logger().warning("worker %d at %s is back.", index, self._cluster.workers[index])

    def _give_up_hanging(self) -> None:
        now = time.monotonic()
        with self._changed:
            hanging = [i for i, job in self._running.items() if now - job.started > self._hang_seconds]
            self._hanging.update(hanging)
            for index in hanging:
                self._queue.appendleft(self._running.pop(index))
        for index in hanging:
            self._lose(index, f"no answer for {self._hang_seconds:g} s")
            self._start_thread(index)  # the old one hangs with the worker

    def _end_waiting(self) -> None:
        with self._changed:
            self._fatal = PeerLostError(
                f"All workers have gone, and none has returned within {self._wait_seconds:g} s.",
                ", ".join(f"worker {index} at {address}" for index, address in enumerate(self._cluster.workers)),
                "Look at the output of the workers. With keras.callbacks.BackupAndRestore the next start goes on from "
                "the last checkpoint.",
            )
            self._changed.notify_all()


def _may_be_loss(error: BaseException) -> bool:
    if isinstance(error, _LOSS):
        return True
    text = str(error)
    return isinstance(error, tf.errors.OpError) and any(sign in text for sign in _REPLACED)


def _copied(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, structure, expand_composites=True
    )
