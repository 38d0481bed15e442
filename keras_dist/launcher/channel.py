"""A connection between the launchers of two nodes, which prove to each other that they know the job's secret.

Messages are JSON, never pickles. Each is signed with a key of this connection, so none can be forged or repeated. They
are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from keras_dist.errors import DistributionError

Message = dict[str, Any]
_NONCE_BYTES = _SIGNATURE_BYTES = 32
_LENGTH = struct.Struct("!I")
_LONGEST_MESSAGE = 1 << 24
_HANDSHAKE_SECONDS = 10.0
_PINGS = 6  # within the time after which a silent node counts as lost


class ChannelError(DistributionError):
    """The other end is no launcher of this job: it doesn't know the secret, or speaks another language."""


class Channel:
    """One end of a connection. Both ends may send messages, ask questions and answer them."""

    def __init__(self, connection: socket.socket, secret: str, has_dialed: bool) -> None:
        self._socket = connection
        self._socket.settimeout(_HANDSHAKE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(own)
        nonces = b"".join(sorted([own, self._exactly(_NONCE_BYTES)]))
        keys = [hmac.digest(secret.encode(), end + nonces, "sha256") for end in (b"dialed", b"called")]
        self._send_key, self._receive_key = keys if has_dialed else keys[::-1]
        self._sent, self._received = itertools.count(), itertools.count()
        self._lock = threading.Lock()
        self._questions = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self.lost = ""  # why the connection has ended

    def send(self, kind: str, **content: Any) -> None:
        """Sends a message. Does nothing if the connection has ended: its reader learns that."""
        payload = json.dumps({"kind": kind, **content}).encode()
        with self._lock, contextlib.suppress(OSError):
            signature = _signature(self._send_key, next(self._sent), payload)
            self._socket.sendall(_LENGTH.pack(len(payload)) + signature + payload)

    def ask(self, kind: str, **content: Any) -> Any:
        """Sends a question and returns the answer; `None` if the connection ends before. Needs `start`."""
        number = next(self._questions)
        answers = self._waiting[number] = queue.SimpleQueue[Any]()
        if self.lost:
            answers.put(None)
        else:
            self.send(kind, question=number, **content)
        try:
            return answers.get()
        finally:
            del self._waiting[number]

    def answer(self, question: Message, value: Any) -> None:
        self.send("answer", to=question["question"], value=value)

    def receive(self) -> Message:
        """Returns the next message. Raises ChannelError if it isn't signed with the key of this connection."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        signature = self._exactly(_SIGNATURE_BYTES)
        payload = self._exactly(length) if length <= _LONGEST_MESSAGE else b""
        if not hmac.compare_digest(signature, _signature(self._receive_key, next(self._received), payload)):
            raise ChannelError("A message between launchers has a wrong signature.", "another secret", "Use the same.")
        message: Message = json.loads(payload)
        return message

    def start(self, handle: Callable[[Message], None], on_lost: Callable[[], None], seconds: float) -> None:
        """Receives messages in a thread, which calls `handle` with each, but for answers.

        It calls `on_lost` once the connection has ended: also if nothing has come for `seconds`.
        """
        self._socket.settimeout(seconds)
        closed = threading.Event()

        def read() -> None:
            try:
                while True:
                    message = self.receive()
                    if message["kind"] == "answer":
                        if (waiting := self._waiting.get(message["to"])) is not None:
                            waiting.put(message["value"])
                    elif message["kind"] != "ping":
                        handle(message)
            except TimeoutError:
                self.lost = f"has not answered for {seconds:g} s"
            except (OSError, ValueError, ChannelError) as error:
                self.lost = f"has closed the connection ({getattr(error, 'strerror', None) or error})"
            closed.set()
            for waiting in [*self._waiting.values()]:
                waiting.put(None)
            on_lost()

        def ping() -> None:
            while not closed.wait(seconds / _PINGS):
                self.send("ping")

        for target in (read, ping):
            threading.Thread(target=target, name="keras_dist-nodes", daemon=True).start()

    def close(self) -> None:
        """Ends the connection, for the other end too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            part = self._socket.recv(min(count - len(received), 1 << 16))
            if not part:
                raise ConnectionError("its launcher has ended")
            received += part
        return received


def _signature(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")
