"""How the launchers of several machines find each other: node 0 listens at the rendezvous, where the others join.

Under Slurm, nodes prove by MUNGE which user a process belongs to. Node 0 draws a secret for each connection and encodes
it so that only this user can decode it. Whoever decodes it also learns which user has encoded it. See `man munge`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Self

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError, DistributionError, PeerLostError, Stopped
from keras_dist.launcher.nodes import (
    Channel,
    ChannelError,
    Message,
    Node,
    RemoteNode,
    address_of,
    interface_of,
    is_loopback,
)
from keras_dist.launcher.processes import Events, StopRequest

_SECONDS = 20.0
_LONGEST = 4096


def send_secret(connection: socket.socket) -> str:
    """Draws a secret, sends it to a process of the same user at the other end, and returns it."""
    secret = secrets.token_hex()
    connection.sendall(_run(["munge", f"--restrict-uid={os.geteuid()}", f"--string={secret}"], b"").strip() + b"\n")
    return secret


def receive_secret(connection: socket.socket) -> str:
    """Returns the secret that the other end has sent. Raises ConfigurationError if that is another user's process."""
    connection.settimeout(_SECONDS)
    credential = b""
    while not credential.endswith(b"\n") and len(credential) < _LONGEST:
        part = connection.recv(1)
        if not part:
            raise ConnectionError("its launcher has ended")
        credential += part
    header, _, secret = _run(["unmunge", "--keys=UID", "--numeric"], credential).decode().partition("\n\n")
    sender = header.rpartition(":")[2].strip()
    if sender not in ("0", str(os.geteuid())):
        raise ConfigurationError(
            "A process of another user listens at the rendezvous.", f"user {sender}",
            "Name another port: `--rendezvous HOST:PORT`.",
        )
    return secret.strip()


def _run(command: list[str], given: bytes) -> bytes:
    try:
        return subprocess.run(command, input=given, capture_output=True, check=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigurationError(
            "MUNGE, by which Slurm's nodes know each other, does not work here.", why.decode(errors="replace").strip(),
            f"Set the same {environment.SECRET} for all tasks instead: in the batch script, export "
            f"{environment.SECRET}=$(python3 -c 'import secrets; print(secrets.token_hex(16))').",
        ) from error


QUIET_SECONDS = 3.0  # before the user is told for whom a launcher waits
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 30.0
_SHORTEST_SECRET = 16


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this node is among those of its job."""

    count: int  # of nodes
    index: int
    host: str  # name or IPv4 address of node 0
    port: int  # at which the launcher of node 0 listens
    secret: str  # which the launchers of all nodes know
    interface: str | None = None  # the network interface to use; by default the one that leads to the rendezvous
    has_munge: bool = False  # whether node 0 sends the others a secret by MUNGE

    @property
    def rendezvous(self) -> str:
        return f"{self.host}:{self.port}"

    def resolve(self) -> str:
        """Returns the IPv4 address of the rendezvous. Raises OSError if its name has none."""
        address = str(socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        if is_loopback(address):
            if self.host != "localhost" and not self.host.startswith("127."):
                raise ConfigurationError(
                    "The name of the rendezvous leads to the loopback interface here, where no other machine can "
                    "connect.",
                    f"--rendezvous {self.rendezvous}, which is {address}",
                    f"Name the address of node 0 in its network (`hostname -I` shows it), or correct the line of "
                    f"{self.host} in /etc/hosts.",
                )
        elif not self.has_munge and len(self.secret) < _SHORTEST_SECRET:
            length = f"of {len(self.secret)} characters" if self.secret else "not set"
            raise ConfigurationError(
                f"Launchers on several machines need a secret of at least {_SHORTEST_SECRET} characters: whoever "
                "can connect could otherwise take the place of a node.",
                f"--rendezvous {self.rendezvous} and {environment.SECRET} {length}",
                "Make one, and set it on every node: export KERAS_DIST_SECRET=$(python3 -c 'import secrets; "
                "print(secrets.token_hex(16))')",
            )
        return address

    def own_node(self, size: int, address: str) -> Node:
        """Returns this node, which the others reach at an address or, if one is named, by an interface."""
        if self.interface is not None:
            address = address_of(self.interface)
        interface = self.interface or interface_of(address)
        return Node(size, address, interface, title=f"node {self.index} ({socket.gethostname()}, {address})")


class Nodes:
    """All nodes of a job, as node 0 sees them. The others connect to it.

    `size` is the number of the ranks of node 0, `events` gets what happens on others, `show` tells the user
    something. While this node waits it calls `check`, which raises what is known of nodes that can't join.
    """

    def __init__(
        self, place: Place, size: int, backend: str, events: Events, show: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._place = place
        self._check = check
        self._own = described(place, size, backend)
        self._events = events
        self._joined: dict[int, RemoteNode] = {}
        self._lock = threading.Lock()
        self._show = show
        try:
            address = place.resolve()
            self._server = socket.create_server((address, place.port), backlog=128)
        except OSError as error:
            raise ConfigurationError(
                "Node 0 can't listen at the rendezvous.",
                f"--rendezvous {place.rendezvous}: {error.strerror or error}",
                "It must be an address of node 0, with a free port; --node-rank 0 belongs to that machine only.",
            ) from error
        self._node = place.own_node(size, address)
        threading.Thread(target=self._accept, name="keras_dist-nodes", daemon=True).start()
        try:
            self._wait_for_all()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    @property
    def all(self) -> list[Node]:
        return [self._node, *self.others]

    @property
    def others(self) -> list[RemoteNode]:
        with self._lock:
            return [node for _, node in sorted(self._joined.items())]

    def close(self, code: int) -> None:
        """Lets the launchers of the other nodes end with an exit code. Twice is the same as once."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for node in self.others:
            node.leave(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Lets the other nodes end as this one does: with the code and the message of `keras-dist`."""
        code = 2
        if isinstance(error, KeyboardInterrupt):
            stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
            code, error = stopped.exit_code, stopped
        if isinstance(error, DistributionError | Stopped):
            why = f"stopped by {error}" if isinstance(error, Stopped) else str(error)
            for node in self.others:
                node.show(f"keras-dist run: {why}")
        self.close(code)

    def _wait_for_all(self) -> None:
        seconds = environment.seconds(environment.JOIN_TIMEOUT, environment.JOIN_SECONDS)
        start, told = time.monotonic(), False
        while missing := self._missing():
            self._check()
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_POLL_SECONDS)
                if isinstance(event, StopRequest):
                    raise Stopped(event.signal)
            waited = time.monotonic() - start
            if waited > seconds:
                raise PeerLostError(
                    f"Not all nodes have joined within {seconds:g} s.",
                    f"missing: {_listed(missing)} of {self._place.count}",
                    f"Run the same command there, with its --node-rank; see whether it can reach "
                    f"{self._place.rendezvous} (firewalls), or set {environment.JOIN_TIMEOUT} (seconds).",
                )
            if waited > QUIET_SECONDS and not told:
                told = True
                text = f"keras-dist: waits at {self._place.rendezvous} for {_listed(missing)} of {self._place.count}."
                for show in (self._show, *(node.show for node in self.others)):
                    show(text)

    def _missing(self) -> list[int]:
        with self._lock:
            for index in [index for index, node in self._joined.items() if node.is_lost]:
                del self._joined[index]
            return [index for index in range(1, self._place.count) if index not in self._joined]

    def _accept(self) -> None:
        while True:
            try:
                connection, client = self._server.accept()
            except OSError:  # it was closed
                return
            arguments = (connection, client)
            threading.Thread(target=self._welcome, args=arguments, name="keras_dist-nodes", daemon=True).start()

    def _welcome(self, connection: socket.socket, client: tuple[str, int]) -> None:
        if not store.is_of_this_user(client, self._server.getsockname()):
            connection.close()
            return
        try:
            secret = send_secret(connection) if self._place.has_munge else self._place.secret
            channel = Channel(connection, secret, has_dialed=False)
            try:
                hello = channel.receive()
            except ChannelError:
                channel.send("refused", why="another secret")  # which it can't read, and so learns why
                self._show(f"keras-dist: a launcher at {client[0]} was refused: it has another secret.")
                channel.close()
                return
            with self._lock:
                why = self._why_not(hello)
                if not why:
                    place = {name: hello[name] for name in ("size", "address", "interface", "port", "title")}
                    node = RemoteNode(channel, self._events, hello["index"], **place)
                    channel.send("welcome")
                    node.listen(answer_seconds())
                    self._joined[hello["index"]] = node
            if why:
                channel.send("refused", why=why)
                channel.close()
        except ConfigurationError as error:  # of MUNGE
            self._show(f"keras-dist run: {error}")
            connection.close()
        except (OSError, ValueError, KeyError):
            connection.close()

    def _why_not(self, hello: Message) -> str:
        for name, ours in self._own.items():
            if name in ("version", "count", "backend") and hello[name] != ours:
                return f"{name} {hello[name]} there, {ours} on node 0"
        index = hello["index"]
        if not 0 < index < self._place.count or (index in self._joined and not self._joined[index].is_lost):
            taken = f", and {self._joined[index].title} has it" if index in self._joined else ""
            return f"--node-rank {index} of {self._place.count} nodes{taken}"
        return ""


def described(place: Place, size: int, backend: str) -> Message:
    """Returns what launchers tell each other of themselves, and must agree in."""
    version = importlib.metadata.version("keras_dist")
    return {"version": version, "count": place.count, "backend": backend, "index": place.index, "size": size}


def answer_seconds() -> float:
    return environment.seconds(environment.ANSWER_TIMEOUT, _ANSWER_SECONDS)


def _listed(nodes: list[int]) -> str:
    return ", ".join(f"node {index}" for index in nodes)
