"""The coordinator's hands: runs functions on whichever worker is free, and again if a worker is lost.

A thread per worker hands it one function after another. What a function returns is fetched at once, so that a worker
which is lost later takes nothing with it. TensorFlow is told of workers that went or came by the thread that waits for
results, while no function runs: what it does at that moment (a tensor on its way, a variable that is made) may never
end.
"""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.backends.parameter_server.cluster import (
    COORDINATOR,
    WORKER,
    Cluster,
    device,
    lost_server,
    worker_is_there,
)
from keras_dist.backends.parameter_server.lost import may_be_loss
from keras_dist.backends.parameter_server.worker_data import Batch, Held
from keras_dist.comm.connections import answers, why_no_grpc
from keras_dist.compat import tf_compat
from keras_dist.errors import DistributionError, PeerLostError
from keras_dist.logging import logger

_TICK_SECONDS = 0.2
_ATTEMPTS = 4  # of a function that fails as if a worker were lost, though all are there
_HERE = device(COORDINATOR, 0) + "/device:CPU:0"


class Job:
    """A function to run on a worker, and what has become of it.

    Args:
        function: Concrete: it isn't traced any more. `None` to read only.
        args: Its arguments, tensors of the coordinator.
        batch: What the worker reads itself, and the function gets before these.
    """

    def __init__(self, function: Any, args: Sequence[Any], batch: Batch | None = None) -> None:
        self.function = function
        self.args = args
        self.batch = batch
        self.attempts = 0
        self.started = 0.0
        self.view = 0  # of the cluster, when it was started
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
        self._updating = threading.Lock()
        self._has_changed = False  # and TensorFlow is to be told
        self._pauses = False
        self._view = 0  # of the cluster: how often TensorFlow was told
        for index in range(self.size):
            self._start_thread(index)
        threading.Thread(target=self._watch, name="keras_dist_watch_workers", daemon=True).start()

    @property
    def size(self) -> int:
        """Number of workers, with those that are lost."""
        return len(self._cluster.workers)

    def submit(self, function: Any, *args: Any, batch: Batch | None = None) -> Job:
        """Lets the next free worker run a function; with `batch` the one which reads that part."""
        self._tell_tensorflow()
        job = Job(function, args, batch)
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def first_done(self, jobs: Sequence[Job]) -> Job:
        """Waits until one of some functions has ended, and returns it."""
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
        """Waits for a function, and returns what it returned.

        Raises:
            PeerLostError: If a server is lost, or all workers for too long.
            BaseException: What the function raised.
        """
        self.first_done([job])
        if job.error is not None:
            self.forget()
            raise job.error
        return job.value

    def forget(self) -> None:
        """Drops what nobody has begun with."""
        with self._changed:
            self._queue.clear()

    def translate(self, error: BaseException) -> BaseException:
        """Returns the error that names a lost server, if that is what `error` comes from."""
        if isinstance(error, DistributionError) or not may_be_loss(error):
            return error
        return self._fatal or lost_server(self._cluster) or error

    # --- A thread for each worker ---

    def _start_thread(self, index: int) -> None:
        threading.Thread(target=self._work, args=(index,), name=f"keras_dist_worker_{index}", daemon=True).start()

    def _work(self, index: int) -> None:
        while self._work_until_error(index):
            pass

    def _work_until_error(self, index: int) -> bool:
        """False if this thread is to end."""
        held = Held()
        with tf_compat.own_executor():
            while True:
                job = self._next(index)
                try:
                    value = self._run(index, job, held)
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # they hold tensors
                    held.clear()
                    return self._has_failed(index, job, error)
                if not self._is_finished(index, job, value=value):
                    return False

    def _next(self, index: int) -> Job:
        with self._changed:
            while self._pauses or index in self._lost or (job := self._first_for(index)) is None:
                self._changed.wait()
            self._queue.remove(job)
            if job.batch is not None:
                job.batch.note_reader(index)
            job.view, job.started = self._view, time.monotonic()
            self._running[index] = job
            return job

    def _first_for(self, index: int) -> Job | None:
        being_read = [job.batch.part for job in self._running.values() if job.batch is not None]
        for job in self._queue:
            part = None if job.batch is None else job.batch.part
            if part is None or (part not in being_read and part.is_for(index, self._lost)):
                return job
        return None

    def _run(self, index: int, job: Job, held: Held) -> Any:
        # Tensors of this thread alone: whoever drops one that was sent tells the worker, and waits if it hangs.
        with tf.device(_HERE):
            args = _copied(job.args)
        with tf.device(device(WORKER, index)):
            outputs = job.function(*args) if job.batch is None else held.run(job.batch, job.function, args)
        with tf.device(_HERE):
            return _copied(outputs)

    def _is_finished(self, index: int, job: Job, value: Any = None, error: BaseException | None = None) -> bool:
        """Notes how a function ended; False if this worker was given up meanwhile, and its answer doesn't count."""
        with self._changed:
            if not self._takes_off(index, job):
                return False
            job.value, job.error, job.done = value, error, True
            self._changed.notify_all()
            return True

    def _has_failed(self, index: int, job: Job, error: BaseException) -> bool:
        """Decides whose fault it was; False if this thread is to end."""
        if not self._may_be_loss(job, error):
            return self._is_finished(index, job, error=error)
        if (lost := lost_server(self._cluster)) is not None:
            lost.__cause__ = error
            self._end(lost)
            return self._is_finished(index, job, error=lost)
        if job.view == self._view and worker_is_there(self._cluster, index):
            job.attempts += 1
        if job.attempts >= _ATTEMPTS:
            return self._is_finished(index, job, error=error)
        if not self._takes_away(index, job):
            return False
        self._lose(index, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return True

    def _may_be_loss(self, job: Job, error: BaseException) -> bool:
        """TensorFlow has many words for a function that met a change of the cluster."""
        return may_be_loss(error) or (isinstance(error, tf.errors.OpError) and job.view != self._view)

    def _takes_away(self, index: int, job: Job) -> bool:
        """Lets another worker do what this one has not done; False if it was given up meanwhile."""
        with self._changed:
            if not self._takes_off(index, job):
                return False
            self._queue.appendleft(job)
            self._changed.notify_all()
            return True

    def _takes_off(self, index: int, job: Job) -> bool:
        """Frees a worker of a function; False if it was given up with it. It has come to an end now."""
        if self._running.get(index) is job:
            del self._running[index]
            return True
        self._hanging.discard(index)
        self._has_changed = True
        return False

    # --- Losing workers, and finding them again ---

    def _lose(self, index: int, why: str) -> None:
        address = self._cluster.workers[index]
        with self._changed:
            self._lost.add(index)
            left = self.size - len(self._lost)
            if not left:
                self._lost_all_at = time.monotonic()
            self._has_changed = self._has_changed or index not in self._hanging
            self._changed.notify_all()
        others = f"{left} of {self.size} go on" if left else "waiting for one to return"
        logger().warning("worker %d at %s is lost (%s); %s.", index, address, why, others)

    def _tell_tensorflow(self) -> None:
        """Tells TensorFlow which workers there are, if others than before; it would wait for one that hangs."""
        if not self._has_changed or self._hanging:
            return
        with self._updating:
            with self._changed:
                self._pauses = True
                self._changed.wait_for(lambda: not self._running or self._fatal is not None)
            try:
                self._update()
            finally:
                with self._changed:
                    self._pauses = False
                    self._changed.notify_all()

    def _update(self) -> None:
        with self._changed:
            self._has_changed = False
            away = self._lost - self._hanging
        listening = {index for index in away if answers(self._cluster.workers[index])}
        shown = self._show(away - listening)
        back = {index for index in listening if shown and worker_is_there(self._cluster, index)}
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
        except tf.errors.OpError as error:  # another one was lost, and its own function will say so
            logger().debug("the cluster could not be updated: %s", error)
            return False
        return True

    def _watch(self) -> None:
        """Takes workers back that have returned, and gives up those that hang."""
        while self._fatal is None:
            self._let_time_pass()
            self._give_up_hanging()
            if any(not why_no_grpc(self._cluster.workers[index]) for index in sorted(self._lost - self._hanging)):
                self._note_change()
            if self._lost_all_at is not None and time.monotonic() - self._lost_all_at > self._wait_seconds:
                self._end(self._all_have_gone())

    def _let_time_pass(self) -> None:
        began = time.monotonic()
        time.sleep(_TICK_SECONDS)
        # Python's threads stand still while TensorFlow tells a worker that hangs of a new function: nobody's fault.
        stood_still = time.monotonic() - began - _TICK_SECONDS
        with self._changed:
            for job in self._running.values():
                job.started += stood_still

    def _note_change(self) -> None:
        with self._changed:
            self._has_changed = True
            self._changed.notify_all()

    def _give_up_hanging(self) -> None:
        if not self._too_slow():
            return
        if (lost := lost_server(self._cluster)) is not None:  # then all workers hang with it
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
        now = time.monotonic()
        return [index for index, job in [*self._running.items()] if now - job.started > self._hang_seconds]

    def _all_have_gone(self) -> PeerLostError:
        return PeerLostError(
            f"All workers have gone, and none has returned within {self._wait_seconds:g} s.",
            ", ".join(f"worker {index} at {address}" for index, address in enumerate(self._cluster.workers)),
            "Look at the output of the workers. With keras.callbacks.BackupAndRestore the next start goes on from "
            "the last checkpoint.",
        )

    def _end(self, error: PeerLostError) -> None:
        with self._changed:
            self._fatal = error
            self._changed.notify_all()


def _copied(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, structure, expand_composites=True
    )
