"""What TensorFlow leaves open of its connections: whether the other end is alive, and an end to waiting for it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from keras_dist import environment

_Result = TypeVar("_Result")
_KNOCK_SECONDS = 2.0
_ANSWER_SECONDS = 10.0  # of a process on a busy machine
_TICK_SECONDS = 0.2
# What both sides of HTTP/2, which gRPC speaks, say first: the client this, the server a frame of the type SETTINGS.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113: 3.4
_FRAME_HEADER, _TYPE_AT, _SETTINGS = 9, 3, 4
# How TensorFlow calls other processes, so that it never waits for ever (2.21).
# A stream of operations to a process that has died swallows them; a single call ends with an error. TensorFlow's own
# tests of processes that are lost set this too.
SINGLE_CALLS = {"TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False"}
# A process that hangs, or a machine that is cut off, doesn't answer gRPC's pings, and a call there ends with an error.
# More often than every 5 minutes servers take them for an attack (https://grpc.io/docs/guides/keepalive/).
KEEPALIVE = {
    "TF_GRPC_DEFAULT_OPTIONS": "grpc.keepalive_time_ms=310000,grpc.keepalive_timeout_ms=60000,"
    "grpc.http2.ping_timeout_ms=60000,grpc.http2.max_pings_without_data=0,grpc.min_reconnect_backoff_ms=2000"
}


def bypass_proxies(addresses: Iterable[str]) -> None:
    """Lets gRPC connect to other processes itself: a proxy of the user's is for the world outside."""
    hosts = sorted({address.rpartition(":")[0] for address in addresses})
    environment.set_defaults({"no_grpc_proxy": ",".join(hosts)})


def let_calls_end() -> None:
    """Lets TensorFlow's calls to processes that have gone, or hang, end with an error. Before it has connected."""
    environment.set_defaults(KEEPALIVE)
    environment.set_values(SINGLE_CALLS)


def listens(address: str) -> bool:
    """True if somebody answers at `"host:port"`."""
    try:
        _connection(address, _KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def answers(address: str) -> bool:
    """True if a gRPC server at `"host:port"` is not only there (`listens`: the kernel says so) but alive."""
    return not why_no_grpc(address, _ANSWER_SECONDS)


def why_no_grpc(address: str, seconds: float = _KNOCK_SECONDS) -> str:
    """Returns why no server of gRPC can be spoken to at `"host:port"`, nothing if one answers."""
    try:
        with _connection(address, seconds) as connection:
            connection.sendall(_HELLO)
            header = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return "" if header[_TYPE_AT : _TYPE_AT + 1] == bytes([_SETTINGS]) else "not a server of TensorFlow"


def listening_sockets() -> set[int]:
    """Returns the descriptors on which this process listens for connections."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as candidate:
                if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


def call_in_thread(function: Callable[[], _Result], check: Callable[[], None]) -> _Result:
    """Calls what may wait for ever, deaf to Ctrl-C, in a thread that is left behind if need be.

    Args:
        function: What to call.
        check: Called every 0.2 s while that runs; raises to leave it.

    Returns:
        What `function` has returned.

    Raises:
        BaseException: What `function` or `check` has raised.
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
