"""Connections to other processes: whether the other end is alive, and how calls to it end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from keras_dist import environment
from keras_dist.logging import logger

_Result = TypeVar("_Result")
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 10.0  # for a process on a busy machine
_TICK_SECONDS = 0.2
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_LOOPBACK_DEVICE = b"lo"
NO_ANSWER = "no answer"  # why there is no gRPC
# gRPC runs over HTTP/2. The client begins with these bytes, and the server answers with a frame of the type SETTINGS.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113: 3.4
_FRAME_HEADER, _TYPE_AT, _SETTINGS = 9, 3, 4
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
    try:
        _connection(address, _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def answers(address: str) -> bool:
    """True if a gRPC server answers at `"host:port"`. A server that hangs `listens`, but doesn't answer."""
    return not why_no_grpc(address, _ANSWER_SECONDS)


def why_no_grpc(address: str, seconds: float = _CONNECT_SECONDS) -> str:
    """Returns why no gRPC server answers at `"host:port"`, an empty text if one does."""
    try:
        with _connection(address, seconds) as connection:
            connection.sendall(_HELLO)
            header = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    except TimeoutError:
        return NO_ANSWER
    except OSError as error:
        return error.strerror or str(error)
    return "" if header[_TYPE_AT : _TYPE_AT + 1] == bytes([_SETTINGS]) else "not a server of TensorFlow"


@contextlib.contextmanager
def only_for_its_network(address: str) -> Iterator[None]:
    """Lets only this machine connect to what begins to listen in this context, if its address is a loopback one.

    TensorFlow's servers listen on all interfaces, whatever their address is, and ask for no password.

    Args:
        address: `"host:port"`.
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
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
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

    Args:
        function: The function to call.
        check: Called every 0.2 s while `function` runs. Raises an exception to abandon it.

    Returns:
        The result of `function`.

    Raises:
        BaseException: The exception of `function` or `check`.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="keras_dist_call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_SECONDS)
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return results[0]


def _connection(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
