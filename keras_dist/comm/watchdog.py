"""Ends ranks that wait for each other in different calls, or for a rank that is gone, with an error that says why.

All ranks make the same collective calls in the same order, so calls can be numbered. If two ranks are in call number
17, and one is in `model.save` while the other is in a training step, neither can ever continue. A rank that has waited
for two seconds publishes its calls in the launcher's key-value store, and compares them with those of the other ranks.
A rank that is only slow is never reported: it is in a call of a lower number. A rank that fails reports its error in
the store, where the other ranks read why they can't continue.

In `fit` our Python code surrounds each step. In a custom loop the user's `tf.function` runs `kd.run`, `kd.reduce` and
the update of an optimizer as operations. There, further operations write the beginning and the end of each collective
to two variables, which the watchdog's thread reads, and these collectives have numbers of their own.

TensorFlow's collectives (2.21) retry calls to a dead process without end. So each rank also asks the TensorFlow servers
of the others every second, in a thread for each. The kernel accepts connections to a process that is stopped, so it is
not enough that one listens: it must answer.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from keras_dist import environment
from keras_dist.comm.backend import Rendezvous, check_same_call
from keras_dist.compat.tf_compat import host_variable
from keras_dist.environment import WAIT_TIMEOUT, Topology
from keras_dist.errors import DistributionError, MismatchError, PeerLostError
from keras_dist.logging import logger


def rank_has_gone(received: str, topology: Topology) -> PeerLostError:
    """Returns the error of a rank that knows only that another rank is gone, and not why."""
    return PeerLostError(
        f"Another rank has gone, so {topology} can't continue.",
        received,
        "Look for the rank that failed first: its error is the cause. `keras-dist run` prints it last, and "
        "`--log-dir DIR` keeps the output of every rank. If a rank has ended without an error, this rank made a "
        "call that all ranks must make: move it out of `if kd.is_chief():`.",
    )


# The user's calls, by the beginnings of their collectives' names.
_CALLS = {
    "keras_dist_loop_reduce": "kd.reduce()",
    "keras_dist_loop": "kd.run()",
    "keras_dist_denominator": "kd.run()",
    "keras_dist_condition": "a tf.cond around an update",
    "keras_dist_all_reduce": "kd.all_reduce()",
    "keras_dist_gradients": "the update of an optimizer in a loop",
}


def call_of(name: str) -> str | None:
    """Returns the call of a custom loop that a collective belongs to, `None` if it belongs to something else."""
    return next((call for beginning, call in _CALLS.items() if name.startswith(beginning)), None)


class LoopWaits:
    """Tracks the collectives of custom loops in this process, by operations before and after each."""

    def __init__(self) -> None:
        self._calls = ["", *dict.fromkeys(_CALLS.values())]
        self._number = host_variable(0, "loop_collectives", dtype=tf.int64)
        self._call = host_variable(0, "loop_collective")

    def track(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Traces `collective(tensors)` between operations that record its beginning and its end; returns its result."""
        with tf.device("CPU:0"):
            # Made here: under control dependencies, a constant would get the dependency instead of the assignment.
            none, one = tf.constant(0), tf.constant(1, tf.int64)
            entered = self._call.assign(self._calls.index(call))  # after the end of the previous collective
            with tf.control_dependencies([entered]):
                begun = self._number.assign_add(one)
        with tf.control_dependencies([begun]):
            tensors = tf.nest.map_structure(tf.identity, tensors, expand_composites=True)
        outputs = collective(tensors)
        with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(outputs, expand_composites=True)):
            left = self._call.assign(none)
        with tf.control_dependencies([left]):
            return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

    def position(self) -> tuple[int, str]:
        """Returns how many collectives have begun, and the call of the current one; any thread may call it."""
        return int(self._number.numpy()), self._calls[int(self._call.numpy())]


_KEY = "failed"
_READ_SECONDS = 2.0
_POLL_SECONDS = 0.1
_LIFE_SECONDS, _LIFE_RANKS = 2.0, 32  # how often a rank shows that it lives; less often if there are more ranks
_WAITED_SECONDS = 2.0
_TICK_SECONDS = 0.5
_WARN_SECONDS = 60.0  # of a wait in a custom loop
_LIVENESS_SECONDS = 1.0
_URGENT_SECONDS = 0.2
_CAUSE_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # as long as Gloo waits for data that a rank does not send
_ATTEMPTS = 2  # refused connections in a row after which a rank is gone
_EXIT_SECONDS = 1.0  # a rank that exits without an error may only be the first to reach the end of the script


class Wait(NamedTuple):
    """The call in which a rank has waited for a while."""

    calls: Sequence[Sequence[Any]]  # the numbers and names of its last calls; it may be in the last of them
    loop_number: int  # how many collectives of custom loops it has begun
    loop_call: str  # the call of the loop's collective that it is in; empty if it is in the last of `calls`

    @property
    def number(self) -> int:
        return self.calls[-1][0] if self.calls else 0

    @property
    def call(self) -> str:
        return self.loop_call or self.calls[-1][1]


def counterpart(own: Wait, other: Wait) -> str | None:
    """Returns the call that another rank makes in place of this rank's call; if they differ, both ranks wait forever.

    Returns `None` if the other rank may still make the same call as this one: it may have moved on since `other`, as
    far as it can without this rank.
    """
    if own.loop_call and other.loop_call:
        return other.call if own.loop_number == other.loop_number else None
    if own.loop_call or other.loop_call:
        loop, call = (own, other) if own.loop_call else (other, own)
        # Neither rank has begun what the other one is in.
        return other.call if call.number > loop.number and loop.loop_number > call.loop_number else None
    return next((call for number, call in other.calls if number == own.number), None)


class Watchdog:
    """Watches, in a thread, the collective calls of this rank, and by their servers whether the other ranks are alive.

    It reports the error that ends this process to the other ranks, and reads their reports. `explain` returns the error
    that explains the given one, or the given one: in a custom training loop errors of collectives reach the user as
    they are. `abort` is called with the reason, and ends all pending collectives with an error. `limit` is the number
    of seconds that a rank may wait in a custom loop; `None` for no limit. `servers` are the addresses of the ranks'
    TensorFlow servers. If this process `serves` the store, the store ends with it.
    """

    def __init__(
        self, topology: Topology, rendezvous: Rendezvous | None, explain: Callable[[BaseException], BaseException],
        abort: Callable[[str], None], limit: float | None = None, servers: Sequence[str] = (), serves: bool = False,
    ) -> None:  # fmt: skip
        self.rendezvous = rendezvous
        self._topology, self._explain, self._abort = topology, explain, abort
        self._limit, self._servers, self._serves = limit, servers, serves
        self._others = [rank for rank in range(topology.size) if rank != topology.rank]
        self._open: list[str] = []  # the calls that this rank is in
        self._calls: collections.deque[tuple[int, str]] = collections.deque(maxlen=64)
        self._entered: float | None = None
        self._loop_waits: LoopWaits | None = None  # until there is a custom loop
        self._last_position, self._position_since, self._has_warned = (0, ""), 0.0, False
        self._cause: DistributionError | None = None
        self._has_failed = False
        self._life_shown = 0.0
        self._life_seconds = _LIFE_SECONDS * max(1.0, topology.size / _LIFE_RANKS)
        self._gone: dict[int, str] = {}  # ranks, and how that was noticed
        self._answer_seconds = environment.seconds(environment.ANSWER_TIMEOUT, _SILENT_SECONDS)
        self._closed, self._is_urgent = threading.Event(), threading.Event()
        self._thread = self._start(self._watch_calls)
        if servers:
            self._start(self._watch_ranks)
            for rank in self._others:
                self._start(self._watch_rank, rank)
        self._previous, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self.close)

    def _start(self, target: Callable[..., None], *args: int) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="keras_dist_watchdog", daemon=True)
        thread.start()
        return thread

    @property
    def is_in_call(self) -> bool:
        return self._entered is not None

    @contextlib.contextmanager
    def in_call(self, call: str) -> Iterator[None]:
        """In this context the rank is in a call. After an error, or without data, it counts as not made."""
        self._open.append(call)
        self._begin(call)
        try:
            yield
        except BaseException:
            self._calls.pop()
            raise
        finally:
            self._open.pop()
            self._entered = None
            if self._open:  # the call was made inside of another one
                self._begin(self._open[-1])

    def _begin(self, call: str) -> None:
        self._calls.append((self._calls[-1][0] + 1 if self._calls else 1, call))
        self._entered = time.monotonic()

    def track(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Traces `collective(tensors)` of a custom loop, so that this rank records when it runs; returns its result."""
        if self._loop_waits is None:
            self._loop_waits = LoopWaits()
        return self._loop_waits.track(call, tensors, collective)

    def close(self) -> None:
        """Ends the thread, because it must not be inside TensorFlow when the process ends."""
        self._closed.set()
        self._thread.join(_TICK_SECONDS)
        if not self._has_failed:
            self._put(f"left_{self._topology.rank}", "1")

    def cause(self) -> DistributionError | None:
        """Returns why the collectives ended, as soon as it is known; `None` if no rank knows."""
        self._is_urgent.set()
        deadline = time.monotonic() + (_CAUSE_SECONDS if self._servers else _TICK_SECONDS)
        while self._cause is None and time.monotonic() < deadline:
            if (reported := self._reported()) is not None:
                self._cause = reported
            time.sleep(_TICK_SECONDS / 10)
        return self._cause

    def _end(self, cause: DistributionError) -> None:
        self._cause = cause
        self._abort(str(cause))

    def _watch_calls(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            if time.monotonic() - self._life_shown > self._life_seconds:
                self._life_shown = time.monotonic()
                self._put(f"life_{self._topology.rank}", str(self._life_shown))
            seconds = self._seconds()
            if seconds < _WAITED_SECONDS:
                continue
            wait = self._wait()
            cause = self._mismatch(wait) or self._timeout(wait, seconds)
            if cause is not None and self._seconds() > 0 and self._wait() == wait:
                self._end(cause)
                return

    def _watch_ranks(self) -> None:
        while self._waits():
            failure, gone = self._reported(), dict(self._gone)
            if failure is None and not gone:
                continue
            if failure is None and all(map(self._has_exited, gone)):
                self._is_urgent.wait(_EXIT_SECONDS)
            parts = [
                f"rank {rank} at {self._servers[rank]} {'has ended' if self._has_exited(rank) else how}"
                for rank, how in sorted(gone.items())
            ]
            cause = self._reported() or rank_has_gone(", ".join(parts), self._topology)
            self._put(f"read_{self._topology.rank}", "1")  # for the rank that serves the store
            self._end(cause)
            return

    def _watch_rank(self, rank: int) -> None:
        refused, seconds = 0, self._answer_seconds
        while refused < _ATTEMPTS and self._waits():
            why = why_no_grpc(self._servers[rank], seconds)
            refused = refused + 1 if why else 0
            if why == NO_ANSWER:
                self._gone[rank] = f"has not answered for {seconds:g} s (it is stopped, or its machine is cut off)"
                return
        if not self._closed.is_set():
            self._gone[rank] = "does not answer any more"

    def _waits(self) -> bool:
        """Waits for the next look. Returns False at the end of the process."""
        return not self._closed.wait(_URGENT_SECONDS if self._is_urgent.is_set() else _LIVENESS_SECONDS)

    def _position(self) -> tuple[int, str]:
        return (0, "") if self._loop_waits is None else self._loop_waits.position()

    def _seconds(self) -> float:
        """Returns how long this rank has been in its current call, 0 if it is in none."""
        entered, now = self._entered, time.monotonic()
        if entered is not None:
            return now - entered
        position = self._position()
        if position != self._last_position:
            self._last_position, self._position_since, self._has_warned = position, now, False
        return now - self._position_since if position[1] else 0.0

    def _wait(self) -> Wait:
        is_in_call, (number, call) = self.is_in_call, self._position()
        return Wait([*self._calls], number, "" if is_in_call else call)

    def _mismatch(self, own: Wait) -> MismatchError | None:
        """Publishes the wait of this rank, and compares it with those that the other ranks have published."""
        self._put(f"calls_{self._topology.rank}", json.dumps(own))
        calls = {self._topology.rank: own.call}
        for rank in self._others:
            published = self._get(f"calls_{rank}")
            if published and (call := counterpart(own, Wait(*json.loads(published)))) is not None:
                calls[rank] = call
        try:
            check_same_call(dict(sorted(calls.items())))
        except MismatchError as error:
            return error
        return None

    def _timeout(self, wait: Wait, seconds: float) -> MismatchError | None:
        """Returns an error if this rank has waited too long in a custom loop, where nothing else ends the wait."""
        if not wait.loop_call or self._limit is None:
            return None
        if seconds <= self._limit:
            if seconds > _WARN_SECONDS and not self._has_warned:
                self._has_warned = True
                logger().warning("has waited for other ranks for %d s, in %s", seconds, wait.loop_call)
            return None
        return MismatchError(
            f"Not all ranks have made the same call within {self._limit:g} s.",
            f"{self._topology} waits in {wait.loop_call}",
            "Make the call on every rank, for every batch: move it out of `if kd.is_chief():`. If a rank needs more "
            f"time for other work, set {WAIT_TIMEOUT} (seconds).",
        )

    # --- Reports ---

    def _reported(self) -> PeerLostError | None:
        """Returns the error that says which other rank failed first, and how; `None` if no report is known."""
        rank, found, report = (self._get(_KEY) or "").partition(" ")
        if not found or int(rank) == self._topology.rank:
            return None
        return PeerLostError(
            f"Rank {rank} has failed, so {self._topology} can't continue.", report, f"Fix the error on rank {rank}."
        )

    def _has_exited(self, rank: int) -> bool:
        """True if a rank has reported that it ends without an error."""
        return self._get(f"left_{rank}") is not None

    def missing(self) -> str:
        """Returns which ranks have ended, or have shown no life for a while; an empty text if none is known to."""
        asks = f"asks_{self._topology.rank}"
        self._put(asks, "1")
        if self.rendezvous is not None and self._get(asks) is None:
            return "; its launcher does not answer any more (it has ended, or one of the machines is cut off)"
        if exited := [rank for rank in self._others if self._has_exited(rank)]:
            return "".join(f"; rank {rank} has ended without an error" for rank in exited)
        before = {rank: life for rank in self._others if (life := self._get(f"life_{rank}")) is not None}
        if before:
            time.sleep(self._life_seconds + 2 * _POLL_SECONDS)
        silent = [rank for rank, life in before.items() if self._get(f"life_{rank}") == life]
        return "".join(f"; rank {rank} shows no life" for rank in silent)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._has_failed = True
        explained = self._explain(error)
        # A rank that only lost another one is not the cause.
        is_cause = self.rendezvous is not None and not isinstance(explained, PeerLostError)
        if is_cause and self._get(_KEY) is None:
            self._put(_KEY, f"{self._topology.rank} {type(explained).__name__}: {explained}")
        if explained is not error:
            explained.__cause__ = error
            kind, trace = type(explained), explained.__traceback__
        self._previous(kind, explained, trace)
        if is_cause and self._serves:
            # The other ranks get time to read the report, because the store ends with this process.
            deadline, unread = time.monotonic() + _READ_SECONDS, self._others
            while time.monotonic() < deadline and (unread := [r for r in unread if not self._get(f"read_{r}")]):
                time.sleep(_POLL_SECONDS)

    def _get(self, key: str) -> str | None:
        return None if self.rendezvous is None else self.rendezvous.get(key)

    def _put(self, key: str, value: str) -> None:
        if self.rendezvous is not None:
            self.rendezvous.put(key, value)


_Result = TypeVar("_Result")
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 10.0  # for a process on a busy machine
_LOOK_SECONDS = 0.2
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
NO_ANSWER = "no answer"  # why there is no gRPC
# gRPC runs over HTTP/2. The client begins with these bytes, and the server answers with a frame of the type SETTINGS
# (4), which is byte 3 of the 9 of its header.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113: 3.4
# TensorFlow's settings with which calls to other processes always end (2.21).
# A stream of operations to a process that has died loses them silently, while a single call ends with an error.
# TensorFlow's own tests of lost processes set this too.
SINGLE_CALLS = {"TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False"}
# A process that hangs, or a machine that is cut off, doesn't answer gRPC's pings, so the call ends with an error.
# Servers take more than one ping in 5 minutes for an attack (https://grpc.io/docs/guides/keepalive/).
KEEPALIVE = {
    "TF_GRPC_DEFAULT_OPTIONS": "grpc.keepalive_time_ms=310000,grpc.keepalive_timeout_ms=60000,"
    "grpc.http2.ping_timeout_ms=60000,grpc.http2.max_pings_without_data=0,grpc.min_reconnect_backoff_ms=2000"
}


def bypass_proxies(addresses: Iterable[str]) -> None:
    """Lets gRPC connect to other processes directly, because the user's proxy is for the internet."""
    hosts = sorted({address.rpartition(":")[0] for address in addresses})
    environment.set_defaults({"no_grpc_proxy": ",".join(hosts)})


def let_calls_end() -> None:
    """Lets TensorFlow's calls to dead or hanging processes end with an error. Call it before TensorFlow connects."""
    environment.set_defaults(KEEPALIVE)
    environment.set_values(SINGLE_CALLS)


def listens(address: str) -> bool:
    with contextlib.suppress(OSError), _connection(address, _CONNECT_SECONDS):
        return True
    return False


def answers(address: str) -> bool:
    """True if a gRPC server answers at `"host:port"`. A server that hangs `listens`, but doesn't answer."""
    return not why_no_grpc(address, _ANSWER_SECONDS)


def why_no_grpc(address: str, seconds: float = _CONNECT_SECONDS) -> str:
    """Returns why no gRPC server answers at `"host:port"`, an empty text if one does."""
    try:
        with _connection(address, seconds) as connection:
            connection.sendall(_HELLO)
            header = connection.recv(9, socket.MSG_WAITALL)
    except TimeoutError:
        return NO_ANSWER
    except OSError as error:
        return error.strerror or str(error)
    return "" if header[3:4] == b"\x04" else "not a server of TensorFlow"


@contextlib.contextmanager
def only_for_its_network(address: str, warns: bool) -> Iterator[None]:
    """In this context, servers on a loopback `"host:port"` begin to listen for this machine only.

    TensorFlow's servers listen on all interfaces, whatever their address is, and ask for no password: one process of a
    job `warns`.
    """
    before = _listening_sockets()
    yield
    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK_HOSTS:
        if warns:
            logger().warning(
                "TensorFlow's servers listen on all interfaces, here at port %s, without authentication: anyone who "
                "can reach one can run anything there. Let only the cluster reach them (a firewall, a Kubernetes "
                "NetworkPolicy).", port,
            )  # fmt: skip
        return
    for descriptor in _listening_sockets() - before:
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            except OSError as error:  # Linux before 5.7
                logger().warning("TensorFlow's server listens on all interfaces, and can't be restricted: %s", error)


def _listening_sockets() -> set[int]:
    """Returns the file descriptors on which this process listens for connections."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed in the meantime
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as candidate:
                    if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(descriptor)
    return found


def call_in_thread(function: Callable[[], _Result], check: Callable[[], None]) -> _Result:
    """Calls a function that may wait forever and ignore Ctrl-C, in a thread that can be abandoned.

    `check` is called every 0.2 s meanwhile, and raises an exception to abandon it.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="keras_dist_call", daemon=True).start()
    while not concurrent.futures.wait([future], _LOOK_SECONDS).done:
        check()
    return future.result()


def _connection(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
