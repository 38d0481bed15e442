"""The limit of a sum over two ranks: the bytes that a ring sends, over TCP, both ways at once; nothing is computed."""

import os
import socket
import time
from collections.abc import Callable

from contestants import Sum
from keras_dist.diagnostics.selftest_ranks import exchange

_CONNECTION: list[socket.socket] = []


def start() -> None:
    """Connects the two ranks, by a path that both know."""
    path = os.environ["RENDEZVOUS"]
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as meeting:
        if os.environ["RANK"] == "0":
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            meeting.bind(path)
            meeting.listen()
            with meeting.accept()[0] as other:
                other.sendall(str(listener.getsockname()[1]).encode())
            connected = listener.accept()[0]
        else:
            _connect(meeting, path)
            connected = socket.create_connection(("127.0.0.1", int(meeting.recv(16))))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setblocking(False)
    _CONNECTION.append(connected)


def _connect(meeting: socket.socket, path: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return meeting.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def build_sum(job: Sum) -> Callable[[], tuple[float, float]]:
    connected, size = _CONNECTION[0], 4 * job.count  # a ring of n ranks sends 2 (n - 1) / n of it: with 2, all of it
    sent, received = bytearray(size), bytearray(size)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(job.times):
            exchange(connected, memoryview(sent), connected, memoryview(received))
        return time.perf_counter() - start, 3.0

    return run
