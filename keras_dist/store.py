"""A key-value store over HTTP for short messages between ranks: which have arrived, failed, or wait in which call.

Serves what `keras_dist.comm.rendezvous` asks for: PUT and GET of a text under a path. No training data goes through
it. Horovod's launchers have a store of their own.
"""

from __future__ import annotations

import http.server
import socketserver
import threading
from typing import Any

LOOPBACK = "127.0.0.1"
_LARGEST_VALUE = 1 << 20


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


def serve(host: str = LOOPBACK) -> Server:
    """Serves a new store on a free port.

    Args:
        host: Name or address of the interface; `""` for all interfaces.

    Raises:
        OSError: If this machine has no such interface.
    """
    return Server(_StoreServer(host))


class MessageServer(socketserver.TCPServer):
    """What all servers of messages between ranks have in common."""

    request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for the name of this address, and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: the launcher reports a rank that dies in the middle of a request."""


class _StoreServer(MessageServer, http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__((host, 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _StoreServer

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > _LARGEST_VALUE:
            self._answer(413)
            return
        self.server.values[self.path] = self.rfile.read(length)
        self._answer(200)

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, code: int, value: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the console belongs to the ranks."""
