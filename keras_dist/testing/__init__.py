"""Functions on several ranks, from a test or a notebook: `run_workers(fn, n)`, or a `WorkerPool` for many of them.

The ranks are live processes of this machine which have called `kd.init(backend)`; functions, closures and lambdas
are sent to them. So a test of distributed code costs as much as its steps, not a start of TensorFlow a rank.
This module itself imports no TensorFlow: only the workers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import IO, Any, Self

from keras_dist import environment
from keras_dist.errors import ConfigurationError, DistributionError, PeerLostError
from keras_dist.launch.die_with_parent import wrap
from keras_dist.launch.local import CLUSTERS, Cluster
from keras_dist.testing.worker import cloudpickle_module

# One thread a process: ranks don't compete for cores, and sums are taken in one order.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# Backends whose replicas are devices of one process: the options that make so many of them, on CPUs.
_ONE_PROCESS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mirrored": lambda n: {"devices": [f"CPU:{index}" for index in range(n)]},
    "central_storage": lambda n: {"compute_devices": [f"CPU:{index + 1}" for index in range(n)]},
}
_START_SECONDS = 180.0
_CHECK_SECONDS = 20.0
_SETTLE_SECONDS = 10.0  # for the other ranks, after one has failed
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 0.2
_SHOWN_CHARACTERS = 4000


class WorkerError(DistributionError):
    """A function failed on a rank. The traceback of the rank is in the message.

    Args:
        rank: The rank that failed first.
        problem: What happened.
        received: The traceback, or the last output.
        error: The exception itself, if it could be sent; `None` if the rank died or was too late.
    """

    def __init__(self, rank: int, problem: str, received: str | None, error: BaseException | None = None) -> None:
        super().__init__(problem, received)
        self.rank = rank
        self.error = error

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.rank, self.problem, self.received, self.error)


def run_workers(
    fn: Callable[..., Any],
    n: int,
    backend: str = "horovod",
    *,
    args: Sequence[Any] = (),
    timeout: float = 120.0,
) -> list[Any]:
    """Runs a function on `n` ranks of this machine, each a process that has called `kd.init(backend)`.

    Args:
        fn: The function; closures and lambdas too. It runs on every rank.
        n: Number of ranks.
        backend: Name of the backend.
        args: Arguments of `fn`.
        timeout: Seconds that `fn` may take.

    Returns:
        What `fn` returned, in the order of rank.

    Raises:
        WorkerError: If a rank raises, dies, or is not ready in time; names the rank.

    Example:

    >>> run_workers(lambda: kd.rank(), 2)
    [0, 1]
    """
    with WorkerPool(n, backend) as pool:
        return pool.run(fn, *args, timeout=timeout)


class WorkerPool:
    """Live ranks that run one function after another. They are started by the first `run`.

    Between functions each rank forgets what one may have left: Keras's session, dtypes and random states, and the
    working directory. After a failure the pool starts new ranks where the old ones can't go on.

    Args:
        n: Number of ranks; of `"mirrored"` and `"central_storage"` the number of replicas in one rank. `"tpu"` is one
            core, emulated on the CPU.
        backend: Name of the backend.
        environ: Environment of the ranks, by default this process's.

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
        if n < 1 or (n > 1 and backend not in (*CLUSTERS, *_ONE_PROCESS)):
            raise ConfigurationError(
                "This backend can't run so many processes on one machine.",
                f"n={n}, backend={backend!r}",
                f"Use n=1, or one of {', '.join(map(repr, (*CLUSTERS, *_ONE_PROCESS)))}.",
            )
        self.size = 1 if backend in _ONE_PROCESS else n
        options = _ONE_PROCESS[backend](n) if backend in _ONE_PROCESS else {}
        self._serve_arguments = backend, options, n // self.size  # the last one: threads of a rank
        self.backend = backend
        self._environ = environment.current() if environ is None else dict(environ)
        self._environ.pop(environment.INITIALIZED_BY, None)
        self._cluster: Cluster | None = None
        self._workers: list[_Worker] = []
        self._helpers: list[_Worker] = []  # of parameter servers: they run no functions

    @property
    def pids(self) -> list[int]:
        """Process numbers of the live ranks, in the order of rank."""
        return [worker.process.pid for worker in (*self._workers, *self._helpers)]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Runs `fn(*args)` on every rank and returns the results in the order of rank.

        Args:
            fn: The function; closures and lambdas too.
            *args: Its arguments.
            timeout: Seconds that it may take. Then all ranks are ended.

        Raises:
            WorkerError: If a rank raises, dies, or is not ready in time; names the rank.
        """
        request = pickle.dumps(([os.path.abspath(path) for path in sys.path], _dumps((fn, args), fn)))
        self._make_ready()
        return self._ask("run", request, timeout)

    def close(self) -> None:
        """Ends all ranks and frees what they used."""
        for worker in self._workers:
            worker.send("close")
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_ready(self) -> None:
        """Starts the ranks, or new ones if a function has left the old ones unable to talk to each other."""
        if self._workers:
            with contextlib.suppress(WorkerError):
                self._ask("check", b"", _CHECK_SECONDS)
                return
            self._end()
        self._start()

    def _start(self) -> None:
        environ = {**self._environ, **_ENVIRONMENT}
        make = CLUSTERS.get(self.backend)
        self._cluster = make(self.size, environ) if make else None
        try:
            for rank in range(self._cluster.size if self._cluster else self.size):
                own = self._cluster.environment(rank) if self._cluster else environ
                helps = bool(self._cluster and self._cluster.helps and rank)
                (self._helpers if helps else self._workers).append(_Worker(rank, self._serve_arguments, own))
            self._collect(_START_SECONDS, "kd.init()")
        except BaseException:
            self._end()
            raise

    def _ask(self, kind: str, request: bytes, timeout: float) -> list[Any]:
        for worker in self._workers:
            worker.send(kind, request)
        return self._collect(timeout, "the function" if kind == "run" else "a barrier")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """Waits for the answers of all ranks. One that fails leaves the others a few seconds."""
        answers: dict[int, _Answer] = {}
        failures: list[WorkerError] = []
        deadline = time.monotonic() + timeout
        try:
            while len(answers) < len(self._workers) and time.monotonic() < deadline:
                for worker in self._waiting(answers):
                    answer = answers[worker.rank] = worker.receive()
                    if answer.failure is not None:
                        failures.append(answer.failure)
                        deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        except BaseException:  # the user's Ctrl-C, or a test's own time limit
            self._end()
            raise
        late = [worker for worker in self._workers if worker.rank not in answers]
        if late and not failures:
            failures = [worker.failure(f"was not ready with {what} after {timeout:g} s") for worker in late[:1]]
        if late or any(answer.is_dead for answer in answers.values()):
            self._end()
        if failures:
            raise _first_cause(failures)
        return [answers[worker.rank].value for worker in self._workers]

    def _waiting(self, answers: Mapping[int, _Answer]) -> Iterator[_Worker]:
        """Yields the ranks that have something to tell: an answer, or their end."""
        waiting = [worker for worker in self._workers if worker.rank not in answers]
        ready = connection.wait([worker.connection for worker in waiting], _POLL_SECONDS)
        for worker in waiting:
            if worker.connection in ready or worker.process.poll() is not None:
                yield worker

    def _end(self) -> None:
        for worker in (*self._workers, *self._helpers):
            worker.kill()
        self._workers, self._helpers = [], []
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _first_cause(failures: list[WorkerError]) -> WorkerError:
    """A rank that only lost its peer is not to blame."""
    causes = [failure for failure in failures if not isinstance(failure.error, PeerLostError)]
    return (causes or failures)[0]


@dataclasses.dataclass(frozen=True)
class _Answer:
    value: Any = None
    failure: WorkerError | None = None
    is_dead: bool = False


class _Worker:
    """One rank, seen from the process that started it."""

    def __init__(self, rank: int, serve_arguments: Sequence[Any], environ: Mapping[str, str]) -> None:
        self.rank = rank
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the rank lives
        self.connection, theirs = connection.Pipe()
        arguments = ", ".join(map(repr, (theirs.fileno(), *serve_arguments)))
        program = f"from keras_dist.testing.worker import serve; serve({arguments})"
        self.process = subprocess.Popen(
            wrap([sys.executable, "-c", program]),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def send(self, kind: str, request: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # it is dead; whoever waits for its answer learns so
            self.connection.send_bytes(kind.encode())
            self.connection.send_bytes(request)

    def receive(self) -> _Answer:
        """Returns the answer, or the news that the rank has died."""
        try:
            if not self.connection.poll():
                raise EOFError
            succeeded, value = cloudpickle_module().loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.wait(1.0)
            failure = self.failure(f"died with code {self.process.poll()}")
            return _Answer(failure=failure, is_dead=True)
        if succeeded:
            return _Answer(value)
        error, text = value
        return _Answer(failure=WorkerError(self.rank, f"Rank {self.rank} raised.", text, error))

    def failure(self, what: str) -> WorkerError:
        return WorkerError(self.rank, f"Rank {self.rank} {what}.", f"its last output:\n{self._last_output()}")

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(seconds, 0))

    def kill(self) -> None:
        """Ends the rank with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._output.close()

    def _last_output(self) -> str:
        end = os.fstat(self._output.fileno()).st_size
        start = max(end - _SHOWN_CHARACTERS, 0)
        return os.pread(self._output.fileno(), end - start, start).decode(errors="replace")


def _dumps(value: Any, fn: Callable[..., Any]) -> bytes:
    """Pickles by reference what the ranks can import too, the rest by value."""
    cloudpickle = cloudpickle_module()
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or _can_be_imported(module.__name__):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    """False for a module that was loaded from a file which is not on `sys.path`, as pytest may do."""
    top = name.partition(".")[0]
    return top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top) is not None
