"""Detects that another rank is gone, where the collectives would wait for it forever.

TensorFlow's collectives (2.21) retry calls to a dead process without end. So each rank asks the TensorFlow servers of
the others every second, in a thread for each, and another thread reads their failure reports. The kernel accepts
connections to a process that is stopped, so it is not enough that one listens: it must answer.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from keras_dist import environment
from keras_dist.comm.watchdog import FailureReports, rank_has_gone
from keras_dist.errors import PeerLostError
from keras_dist.logging import logger
from keras_dist.topology import Topology

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
    """True if a process listens at `"host:port"`."""
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
def only_for_its_network(address: str) -> Iterator[None]:
    """Lets only this machine connect to what begins to listen in this context, if its `"host:port"` is a loopback one.

    TensorFlow's servers listen on all interfaces, whatever their address is, and ask for no password.
    """
    before = _listening_sockets()
    yield
    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK_HOSTS:
        logger().warning(
            "TensorFlow's server listens at port %s on all interfaces, without authentication: anyone who can reach it "
            "can run anything here. Let only the cluster reach it (a firewall, a Kubernetes NetworkPolicy).", port,
        )  # fmt: skip
        return
    for descriptor in _listening_sockets() - before:
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            except (OSError, AttributeError) as error:  # Linux before 5.7, or another system
                logger().warning("TensorFlow's server listens on all interfaces, and can't be restricted: %s", error)


def _listening_sockets() -> set[int]:
    """Returns the file descriptors on which this process listens for connections."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as candidate:
                if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
        except OSError:  # closed in the meantime
            continue
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

    thread = threading.Thread(target=call, name="keras_dist_call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if thread.is_alive():
            check()
    return future.result()


def _connection(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)


_TICK_SECONDS = 1.0
_URGENT_SECONDS = 0.2
_CAUSE_SECONDS = 5.0
_ATTEMPTS = 2  # refused connections in a row after which a rank is gone
_EXIT_SECONDS = 1.0  # a rank that exits without an error may only be the first to reach the end of the script


class Liveness:
    """Watches from a thread whether the processes of the other ranks are alive.

    `abort` is called with the reason, and ends all pending collectives of this rank with an error. `limit` is the
    number of seconds that a rank may take to answer.
    """

    def __init__(
        self, topology: Topology, addresses: Sequence[str], failure_reports: FailureReports,
        abort: Callable[[str], None], limit: float,
    ) -> None:  # fmt: skip
        self._topology, self._failure_reports, self._abort, self._limit = topology, failure_reports, abort, limit
        self._others = {rank: address for rank, address in enumerate(addresses) if rank != topology.rank}
        self._gone: dict[int, str] = {}  # ranks, and how that was noticed
        self._closed, self._is_urgent, self._is_known = threading.Event(), threading.Event(), threading.Event()
        self._cause: PeerLostError | None = None
        atexit.register(self._closed.set)
        threading.Thread(target=self._watch, name="keras_dist_liveness", daemon=True).start()
        for rank in self._others:
            threading.Thread(target=self._watch_rank, args=(rank,), name="keras_dist_liveness", daemon=True).start()

    def cause(self) -> PeerLostError | None:
        """Returns why the collectives ended, as soon as it is known; `None` if all ranks are alive."""
        self._is_urgent.set()
        self._is_known.wait(_CAUSE_SECONDS)
        return self._cause

    def _watch(self) -> None:
        has_exited = self._failure_reports.has_exited
        while self._waits():
            failure, gone = self._failure_reports.cause(), dict(self._gone)
            if failure is None and not gone:
                continue
            if failure is None and all(map(has_exited, gone)):
                self._is_urgent.wait(_EXIT_SECONDS)
            cause = self._failure_reports.cause()
            if cause is None:
                parts = [
                    f"rank {rank} at {self._others[rank]} {'has ended' if has_exited(rank) else how}"
                    for rank, how in sorted(gone.items())
                ]
                cause = rank_has_gone(", ".join(parts), self._topology)
            self._cause = cause
            self._is_known.set()
            self._failure_reports.confirm()
            self._abort(str(self._cause))
            return

    def _watch_rank(self, rank: int) -> None:
        refused = 0
        while refused < _ATTEMPTS and self._waits():
            why = why_no_grpc(self._others[rank], self._limit)
            refused = refused + 1 if why else 0
            if why == NO_ANSWER:
                self._gone[rank] = f"has not answered for {self._limit:g} s (it is stopped, or its machine is cut off)"
                return
        if not self._closed.is_set():
            self._gone[rank] = "does not answer any more"

    def _waits(self) -> bool:
        """Waits for the next look. Returns False at the end of the process."""
        return not self._closed.wait(_URGENT_SECONDS if self._is_urgent.is_set() else _TICK_SECONDS)
