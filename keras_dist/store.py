"""A key-value store over HTTP for short messages between ranks: which have arrived, failed, or wait in which call.

Serves what `keras_dist.comm.rendezvous` asks for: PUT and GET of a text under a path. No training data goes through
it. Horovod's launchers have a store of their own.

On the loopback interface only processes of this user, or of root, may connect. On others requests must be signed with a
secret, which the ranks tell each other.
"""

from __future__ import annotations

import hmac
import http.server
import os
import socket
import socketserver
import struct
import threading
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
SIGNATURE = "X-Keras-Dist-Signature"
_LARGEST_VALUE = 1 << 20
_CONNECTIONS, _ESTABLISHED = Path("/proc/net/tcp"), "01"


class Server:
    """Runs a server in a thread until it is closed.

    Args:
        server: An HTTP server that is already bound.
    """

    def __init__(self, server: socketserver.TCPServer) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.1},  # limits the time that close() takes
            name="keras_dist-rendezvous",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops serving and frees the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def signature(secret: str, method: str, path: str, body: bytes) -> str:
    """Returns what signs a request."""
    return hmac.new(secret.encode(), b" ".join([method.encode(), path.encode(), body]), "sha256").hexdigest()


def serve(host: str = LOOPBACK, secret: str = "") -> Server:
    """Serves a new store on a free port.

    Args:
        host: Name or address of the interface; `""` for all interfaces.
        secret: Requests must be signed with it, if it is given.

    Raises:
        OSError: If this machine has no such interface.
    """
    return Server(_StoreServer(host, secret))


def _owner_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Returns the user whose process has opened a connection on this machine; `None` if it has gone.

    Args:
        client: IPv4 address and port of its end.
        server: Of the other end.
    """
    ends = [_as_in_proc(*client), _as_in_proc(*server)]
    for line in _CONNECTIONS.read_text().splitlines()[1:]:
        _, local, remote, state, _, _, _, user, *_ = line.split()
        # A socket that its process has closed has no owner any more.
        if [local, remote] == ends and state == _ESTABLISHED:
            return int(user)
    return None


def _as_in_proc(host: str, port: int) -> str:
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"


class MessageServer(socketserver.TCPServer):
    """What all servers of messages between ranks have in common."""

    request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for the name of this address, and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuses the connections of other users of this machine."""
        server_address: Any = self.server_address
        if server_address[0] != LOOPBACK or not _CONNECTIONS.exists():
            return True
        return _owner_of(client_address, server_address) in (0, os.geteuid())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: the launcher reports a rank that dies in the middle of a request."""


class _StoreServer(MessageServer, http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, secret: str) -> None:
        self.values: dict[str, bytes] = {}
        self.secret = secret
        super().__init__((host, 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _StoreServer

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > _LARGEST_VALUE:
            self._answer(413)
            return
        value = self.rfile.read(length)
        if self._is_signed(value):
            self.server.values[self.path] = value
            self._answer(200)

    def do_GET(self) -> None:
        if not self._is_signed(b""):
            return
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _is_signed(self, body: bytes) -> bool:
        secret = self.server.secret
        expected = signature(secret, self.command, self.path, body) if secret else ""
        if hmac.compare_digest(expected, self.headers.get(SIGNATURE, "") if secret else ""):
            return True
        self._answer(403)
        return False

    def _answer(self, code: int, value: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the console belongs to the ranks."""
