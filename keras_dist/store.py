"""A key-value store over HTTP for short messages between ranks: which have arrived, failed, or wait in which call.

Serves what `keras_dist.comm.backend` asks for, and Gloo while it connects the ranks: PUT and GET of bytes under a
path. No training data goes through it. `horovodrun` has a store of its own.

On the loopback interface only processes of this user, or of root, may connect. On others requests must be signed with a
secret, which the ranks tell each other.
"""

import functools
import hmac
import http.server
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
SIGNATURE = "X-Keras-Dist-Signature"
_LARGEST_VALUE = 1 << 20
_CONNECTIONS = Path("/proc/net/tcp")


class Server(http.server.ThreadingHTTPServer):
    """Runs a store on a free port, in a thread, until it is closed.

    `host` is the interface's name or address, `""` for all interfaces. With a secret, requests must be signed with it.
    The bytes of a value are the characters of a text. `get` and `put` keep the values elsewhere, by their paths.
    """

    daemon_threads = True
    request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s

    def __init__(
        self, host: str = LOOPBACK, secret: str = "", get: Callable[[str], str | None] | None = None,
        put: Callable[[str, str], object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__((host, 0), _Handler)
        values: dict[str, str] = {}
        self.secret, self.get, self.put = secret, get or values.get, put or values.__setitem__
        serve = functools.partial(self.serve_forever, poll_interval=0.1)  # limits the time that close() takes
        self._thread = threading.Thread(target=serve, name="keras_dist-rendezvous", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def is_local(self) -> bool:
        return str(self.server_address[0]).startswith("127.")

    def close(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for the name of this address, and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuses the connections of other users of this machine."""
        return is_of_this_user(client_address, self.server_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: the launcher reports a rank that dies in the middle of a request."""


def signature(secret: str, method: str, path: str, body: bytes) -> str:
    return hmac.new(secret.encode(), b" ".join([method.encode(), path.encode(), body]), "sha256").hexdigest()


def is_of_this_user(client: Any, server: Any) -> bool:
    """False for a connection over the loopback interface that another user than this one and root has opened."""
    if not str(server[0]).startswith("127.") or not _CONNECTIONS.exists():
        return True
    for of_end in _looked_up, _listed:
        if (user := of_end(client, server)) is not None:
            return user in (0, os.geteuid())
    return False


# The state of a connection that both ends have open. A socket that its process has closed has no owner any more.
_ESTABLISHED = 1


def _looked_up(client: Any, server: Any) -> int | None:
    """Returns the user at the client's end of an open connection, `None` if there is none or the kernel can't be asked.

    To ask for one connection takes microseconds, to read the list of all of them milliseconds. See `sock_diag(7)`.
    """
    (host, port), (other, other_port) = client, server
    ends = struct.pack("!HH16s16s", port, other_port, socket.inet_aton(host), socket.inet_aton(other))
    request = struct.pack("=BBxxI36sIQ", socket.AF_INET, socket.IPPROTO_TCP, 1 << _ESTABLISHED, ends, 0, 2**64 - 1)
    sock_diag, by_family, is_request = 4, 20, 1
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, sock_diag) as kernel:
            kernel.settimeout(1)
            kernel.send(struct.pack("=IHHII", 16 + len(request), by_family, is_request, 0, 0) + request)
            answer = kernel.recv(4096)
    except OSError:
        return None
    # A header with the type of the answer, then `struct inet_diag_msg`: 1 byte, the state, 62 bytes, the user.
    (answered,) = struct.unpack_from("=H", answer, 4)
    if answered != by_family or answer[17] != _ESTABLISHED:
        return None
    return int(struct.unpack_from("=I", answer, 80)[0])


def _listed(client: Any, server: Any) -> int | None:
    """Returns the same from the list of all connections."""
    ends = [f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}" for host, port in (client, server)]
    for line in _CONNECTIONS.read_text().splitlines()[1:]:
        _, local, remote, state, _, _, _, user, *_ = line.split()
        if [local, remote] == ends and int(state, 16) == _ESTABLISHED:
            return int(user)
    return None


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > _LARGEST_VALUE:
            self._answer(413)
            return
        value = self.rfile.read(length)
        if self._is_signed(value):
            self.server.put(self.path, value.decode("latin-1"))
            self._answer(200)

    def do_GET(self) -> None:
        if not self._is_signed(b""):
            return
        value = self.server.get(self.path)
        self._answer(404 if value is None else 200, (value or "").encode("latin-1"))

    def do_DELETE(self) -> None:
        """Gloo says so that a rank is connected. The values are used once only: each start has a store of its own."""
        if self._is_signed(b""):
            self._answer(200)

    def _is_signed(self, body: bytes) -> bool:
        secret = self.server.secret
        given = self.headers.get(SIGNATURE, "")
        if not secret or hmac.compare_digest(signature(secret, self.command, self.path, body), given):
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
