"""TCP connections between the ranks without anything else: what their network itself takes for the bytes of a sum."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from keras_dist.topology import Topology

_CHUNK = 2**20
_SECONDS = 30.0


class Link:
    """A ring: each rank sends to the next one, and receives from the one before. Every rank must make it.

    Args:
        all_gather: Returns the objects of all ranks, as `Backend.all_gather_object`.
        topology: This rank among the others.
        address: Name or address by which the others reach this rank.
    """

    def __init__(self, all_gather: Callable[[str, Any], list[Any]], topology: Topology, address: str) -> None:
        self._size = topology.size
        try:
            server, failure = socket.create_server((address, 0)), None
        except OSError as error:
            server, failure = socket.socket(), error  # the others are told, or they would wait for this rank
        with server:
            port = 0 if failure else server.getsockname()[1]
            places = all_gather("keras-dist selftest: addresses", [address, port])
            if failure:
                raise failure
            server.settimeout(_SECONDS)
            self._next = socket.create_connection(tuple(places[(topology.rank + 1) % topology.size]), _SECONDS)
            self._before = server.accept()[0]
        for connection in (self._next, self._before):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def ring(self, count: int) -> Callable[[], None]:
        """Returns a function that sends what a ring sends to sum: in each of 2 (n - 1) steps an n-th of the bytes.

        Every rank must call it.

        Args:
            count: The size of the tensor in bytes.
        """
        sent = bytearray(-(-count // self._size))
        received = bytearray(len(sent))

        def run() -> None:
            for _ in range(2 * (self._size - 1)):
                exchange(self._next, memoryview(sent), self._before, memoryview(received))

        return run

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: object) -> None:
        self._next.close()
        self._before.close()


def exchange(receiver: socket.socket, sent: memoryview, sender: socket.socket, received: memoryview) -> None:
    """Sends and receives at once.

    Args:
        receiver: Connection to who gets the bytes; it does not block.
        sent: The bytes.
        sender: Connection to who sends as many as `received` has room for, perhaps the same one.
        received: Where they go.

    Raises:
        OSError: If the other side has closed the connection, or nothing moves for 30 s.
    """
    while sent or received:
        readable, writable, _ = select.select([sender] if received else [], [receiver] if sent else [], [], _SECONDS)
        if writable:
            sent = sent[receiver.send(sent[:_CHUNK]) :]
        if readable:
            if not (count := sender.recv_into(received[:_CHUNK])):
                raise ConnectionError("the other side has closed the connection")
            received = received[count:]
        if not (readable or writable):
            raise TimeoutError(f"no byte has come or gone within {_SECONDS:g} s")
