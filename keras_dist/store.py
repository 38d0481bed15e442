"""A key-value store over HTTP for short messages between ranks: who has arrived, who failed, who waits where.

Serves what `keras_dist.comm.rendezvous` asks: PUT and GET of a text under a path. Nothing of training goes
through it. Horovod's launchers serve one of their own.
"""

from __future__ import annotations

import http.server
import socketserver
import threading
from typing import Any

LOOPBACK = "127.0.0.1"
_LARGEST_VALUE = 1 << 20


class Server:
    """Any server, in a thread, until it is closed.

    Args:
        server: An HTTP server, bound already.
    """

    def __init__(self, server: socketserver.TCPServer) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.1},  # bounds the time that close() takes
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
        host: Name or address of the interface; an empty text for all.

    Raises:
        OSError: If this machine has no such interface.
    """
    return Server(_StoreServer(host))


class _StoreServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s
    daemon_threads = True

    def __init__(self, host: str) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__((host, 0), _Handler)

    def server_bind(self) -> None:
        # Past HTTPServer's own, which asks the name server who this is and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that dies in the middle of a request is the launcher's to report, not ours."""


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
        """Silent: the console is the ranks'."""
