"""Runs functions on several ranks, from a test or a notebook: `run_workers(fn, n)`, or a `WorkerPool` for many.

The ranks are live processes on this machine that have called `kd.init(backend)`. Functions, closures and lambdas are
sent to them, so a test of distributed code does not have to start TensorFlow on each rank. This module does not import
TensorFlow; only the workers do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import IO, Any, Self

from keras_dist import environment
from keras_dist.backends import BACKENDS, find, load
from keras_dist.errors import ConfigurationError, PeerLostError, WorkerError
from keras_dist.launcher.cluster import Cluster
from keras_dist.launcher.function import cloudpickle_module, dumps_call, dumps_failure
from keras_dist.launcher.job import LAUNCHABLE, make_cluster
from keras_dist.launcher.processes import signal_session, start_process

# One thread per process: ranks don't compete for cores, and sums have one order.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
}  # fmt: skip
_START_SECONDS = 180.0
_CHECK_SECONDS = 20.0
_SETTLE_SECONDS = 10.0  # for the other ranks, after one has failed
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.2
_SHOWN_CHARACTERS = 4000


def run_workers(
    fn: Callable[..., Any], n: int, backend: str = "horovod", *, args: Sequence[Any] = (), timeout: float = 120.0
) -> list[Any]:
    """Runs a function on `n` ranks on this machine, each a process that has called `kd.init(backend)`.

    Args:
        fn: The function, also a closure or a lambda. It runs on every rank.
        n: Number of ranks.
        backend: Name of the backend.
        args: Arguments of `fn`.
        timeout: Seconds that `fn` may take.

    Returns:
        What `fn` returned on each rank, in rank order.

    Raises:
        WorkerError: If a rank raises, dies, or does not finish in time; names the rank.

    Example:

    >>> run_workers(lambda: kd.rank(), 2)
    [0, 1]
    """
    with WorkerPool(n, backend) as pool:
        return pool.run(fn, *args, timeout=timeout)


class WorkerPool:
    """Live ranks that run one function after another. The first `run` starts them.

    Between functions each rank resets Keras's session, dtypes and random states, and the working directory. After a
    failure the pool starts new ranks if the old ones can't continue.

    Args:
        n: Number of ranks; with `"mirrored"`, `"central_storage"` and `"tpu"`, number of replicas in one process. TPU
            cores are emulated on the CPU.
        backend: Name of the backend.
        environ: Environment of the ranks. Default: that of this process.

    Raises:
        ConfigurationError: If `cloudpickle` is missing, or the backend can't run `n` ranks here.

    Example:

    >>> with WorkerPool(2) as pool:
    ...     pool.run(lambda: kd.rank())
    ...     pool.run(lambda x: x + kd.rank(), 10)
    [0, 1]
    [10, 11]
    """

    def __init__(self, n: int, backend: str = "horovod", *, environ: Mapping[str, str] | None = None) -> None:
        cloudpickle_module()
        entry = find(backend)
        if n < 1 or (n > 1 and not entry.scales_on_cpus):
            several = ", ".join(repr(name) for name, other in BACKENDS.items() if other.scales_on_cpus)
            raise ConfigurationError(
                "This backend can't run this number of ranks on one machine.", f"n={n}, backend={backend!r}",
                f"Use n=1, or one of {several}.",
            )
        self.size = 1 if entry.on_cpus else n
        options = dict(entry.on_cpus(n)) if entry.on_cpus else {}
        self._serve_arguments = backend, options, n // self.size  # the last one: threads of a rank
        self.backend = backend
        self._environ = environment.current() if environ is None else dict(environ)
        self._environ.pop(environment.INITIALIZED_BY, None)
        self._cluster: Cluster | None = None
        self._workers: list[_Worker] = []
        self._helpers: list[_Worker] = []  # workers and parameter servers, which run no functions

    @property
    def pids(self) -> list[int]:
        """Process IDs of the live ranks, in rank order."""
        return [worker.process.pid for worker in (*self._workers, *self._helpers)]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Runs `fn(*args)` on every rank and returns the results in rank order.

        Args:
            fn: The function, also a closure or a lambda.
            *args: Its arguments.
            timeout: Seconds that it may take. After that, all ranks are ended.

        Raises:
            WorkerError: If a rank raises, dies, or does not finish in time; names the rank.
        """
        request = pickle.dumps(([os.path.abspath(path) for path in sys.path], dumps_call(fn, args)))
        self._make_ready()
        return self._ask(request, timeout, "the function")

    def close(self) -> None:
        """Ends all ranks and frees their resources."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_ready(self) -> None:
        """Starts the ranks, or new ones if the old ones can't communicate after a function."""
        if self._workers:
            with contextlib.suppress(WorkerError):
                self._ask(b"", _CHECK_SECONDS, "a barrier")
                return
            self._end()
        environ = {**self._environ, **_ENVIRONMENT}
        cluster = self._cluster = make_cluster(self.backend, self.size, environ) if self.backend in LAUNCHABLE else None
        try:
            for rank in range(cluster.size if cluster else 1):
                workers = self._helpers if cluster and cluster.only_chief_runs and rank else self._workers
                rank_environ = cluster.environment(rank) if cluster else environ
                workers.append(self._worker(rank, self._serve_arguments, rank_environ))
            self._collect(_START_SECONDS, "kd.init()")
        except BaseException:
            self._end()
            raise

    def _worker(self, rank: int, serve_arguments: Sequence[Any], environ: Mapping[str, str]) -> _Worker:
        return _Worker(rank, serve_arguments, environ)

    def _ask(self, request: bytes, timeout: float, what: str) -> list[Any]:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it is dead; `receive` reports it
                worker.connection.send(request)
        return self._collect(timeout, what)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """Waits for the answers of all ranks. After a failure the other ranks have a few seconds."""
        answers: dict[int, Any] = {}
        failures: list[WorkerError] = []
        waiting, deadline = [*self._workers], time.monotonic() + timeout
        try:
            while waiting and time.monotonic() < deadline:
                ready = connection.wait([worker.connection for worker in waiting], _POLL_SECONDS)
                for worker in [one for one in waiting if one.connection in ready or one.process.poll() is not None]:
                    waiting.remove(worker)
                    try:
                        answers[worker.rank] = worker.receive()
                    except WorkerError as failure:
                        failures.append(failure)
                        deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        except BaseException:  # the user's Ctrl-C, or the time limit of a test
            self._end()
            raise
        if waiting and not failures:
            failures = [waiting[0].failure(f"did not finish {what} within {timeout:g} s")]
        if waiting or any(worker.process.poll() is not None for worker in self._workers):
            self._end()
        if failures:
            # The rank that failed first: one that only lost its peer comes later.
            raise next((one for one in failures if not isinstance(one.error, PeerLostError)), failures[0])
        return [answer for _, answer in sorted(answers.items())]

    def _end(self) -> None:
        for worker in (*self._workers, *self._helpers):
            worker.kill()
        self._workers, self._helpers = [], []
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class _Worker:
    """One rank, seen from the process that started it."""

    def __init__(self, rank: int, serve_arguments: Sequence[Any], environ: Mapping[str, str]) -> None:
        self.rank = rank
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the rank lives
        self.connection, theirs = connection.Pipe()
        arguments = ", ".join(map(repr, (theirs.fileno(), *serve_arguments)))
        program = f"from keras_dist.testing import _serve; _serve({arguments})"
        self.process = start_process(
            [sys.executable, "-c", program], environ,
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()

    def receive(self) -> Any:
        """Returns the answer. Raises if the function has raised, or the rank has died."""
        try:
            if not self.connection.poll():
                raise EOFError
            succeeded, value = self.connection.recv()
        except (EOFError, OSError):
            self.wait(1.0)
            raise self.failure(f"died with code {self.process.poll()}") from None
        if succeeded:
            return pickle.loads(value)
        error, text = pickle.loads(value)
        raise WorkerError(self.rank, f"Rank {self.rank} raised.", text, error)

    def failure(self, what: str) -> WorkerError:
        end = os.fstat(self._output.fileno()).st_size
        start = max(end - _SHOWN_CHARACTERS, 0)
        output = os.pread(self._output.fileno(), end - start, start).decode(errors="replace")
        return WorkerError(self.rank, f"Rank {self.rank} {what}.", f"its last output:\n{output}")

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(seconds, 0))

    def kill(self) -> None:
        """Ends the rank and everything that it started."""
        signal_session(self.process, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._output.close()


# --- In the process of a rank ---


def _serve(descriptor: int, backend: str, options: Mapping[str, Any], threads: int) -> None:
    """The program of a rank: runs functions that arrive through a pipe until it is closed."""
    parent = connection.Connection(descriptor)
    _answer(parent, functools.partial(_join, backend, options, threads))
    home = os.getcwd()
    with contextlib.suppress(EOFError):  # the pool is closed
        while True:
            request = parent.recv()
            os.chdir(home)
            _answer(parent, functools.partial(_run, request))


def _answer(parent: connection.Connection, work: Callable[[], Any]) -> None:
    try:
        answer = True, bytes(cloudpickle_module().dumps(work()))
    except BaseException as error:
        answer = False, dumps_failure(error, __file__)
    parent.send(answer)


def _join(backend: str, options: Mapping[str, Any], threads: int) -> None:
    import keras  # noqa: F401 - here, so that importing it does not use up the time limit of a function
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(threads)  # one for each replica of this process
    import keras_dist

    emulation = find(backend).emulation
    if emulation:
        keras_dist.init(load(emulation)(**options))
    else:
        keras_dist.init(backend, **options)
    # `clear_session` collects garbage after each function; TensorFlow's objects stay, so they need no search.
    gc.collect()
    gc.freeze()


def _run(request: bytes) -> Any:
    """Resets what an earlier function may have changed, seeds the random states, and calls the function."""
    import keras
    import tensorflow as tf

    import keras_dist

    if not request:  # whether the ranks still reach each other
        return keras_dist.barrier()
    keras.config.set_floatx("float32")
    keras.backend.clear_session()  # also resets the dtype policy
    tf.config.run_functions_eagerly(False)
    keras.utils.set_random_seed(0)
    sys.path[:], call = pickle.loads(request)
    fn, args = pickle.loads(call)
    return fn(*args)
