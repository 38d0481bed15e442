"""How the launchers of several machines find each other: node 0 listens at the rendezvous, where the others join.

After that the launcher of another node starts and ends the ranks of its machine as that of node 0 says. With
`keras-dist run -H a:4,b:4` this launcher leads, has no rank of its own, and starts the others over ssh. They also end
with their connection of ssh, as they may not have joined yet.

Under Slurm, nodes prove by MUNGE which user a process belongs to. Node 0 draws a secret for each connection and encodes
it so that only this user can decode it. Decoding it also tells which user encoded it. See `man munge`.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Self, TypeVar, cast

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError, DistributionError, PeerLostError, Stopped
from keras_dist.launcher.nodes import LOOPBACK, Channel, ChannelError, Node, Place, RemoteNode, free_ports, way_to
from keras_dist.launcher.processes import SENT_ON, Ended, LocalRanks, Received, on_stop_signals

_MUNGE_SECONDS = 20.0
_LONGEST = 4096
_QUIET_SECONDS = 3.0  # before the user is told whom a launcher waits for
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 5.0
_LOST_CODE = 128 + signal.SIGKILL  # the same as if node 0 loses a node
_Result = TypeVar("_Result")


def send_secret(connection: socket.socket) -> str:
    """Draws a secret, sends it to a process of the same user at the other end, and returns it."""
    secret = secrets.token_hex()
    connection.sendall(_run(["munge", f"--restrict-uid={os.geteuid()}", f"--string={secret}"], b"").strip() + b"\n")
    return secret


def receive_secret(connection: socket.socket) -> str:
    """Returns the secret that the other end has sent. Raises ConfigurationError if that is another user's process."""
    connection.settimeout(_MUNGE_SECONDS)
    with connection.makefile("rb", buffering=0) as unbuffered:  # it takes no byte of what follows
        credential = unbuffered.readline(_LONGEST)
    if not credential:
        raise ConnectionError("its launcher has ended")
    header, _, secret = _run(["unmunge", "--keys=UID", "--numeric"], credential).decode().partition("\n\n")
    sender = header.rpartition(":")[2].strip()
    if sender not in ("0", str(os.geteuid())):
        raise _of_another_user(f"user {sender}")
    return secret.strip()


def _of_another_user(received: str) -> ConfigurationError:
    problem = "A process of another user listens at the rendezvous."
    return ConfigurationError(problem, received, "Name another port: `--rendezvous HOST:PORT`.")


def _run(command: list[str], given: bytes) -> bytes:
    try:
        return subprocess.run(command, input=given, capture_output=True, check=True, timeout=_MUNGE_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigurationError(
            "MUNGE, by which Slurm's nodes know each other, does not work here.", why.decode(errors="replace").strip(),
            f"Set the same {environment.SECRET} for all tasks instead: in the batch script, export "
            f"{environment.SECRET}=$(python3 -c 'import secrets; print(secrets.token_hex(16))').",
        ) from error


def _patiently(tell: Callable[[], None], late: Callable[[float], DistributionError]) -> Iterator[None]:
    """Yields for as long as nodes may take to join; soon tells the user whom it waits for, and at the end raises."""
    seconds = environment.join_seconds()
    start, told = time.monotonic(), False
    while True:
        yield
        waited = time.monotonic() - start
        if waited > seconds:
            raise late(seconds)
        if waited > _QUIET_SECONDS and not told:
            told = True
            tell()


def _tried(
    attempt: Callable[[], _Result], place: Place, show: Callable[[str], None], aim: str, problem: str, remedy: str
) -> _Result:
    """Returns what `attempt` returns, once it raises no OSError: node 0 and names of pods appear after a while."""
    why = ""

    def late(seconds: float) -> PeerLostError:
        return PeerLostError(
            f"{problem} within {seconds:g} s.", f"--rendezvous {place.rendezvous}: {why} ({place.ends()})",
            f"{remedy}, or set {environment.JOIN_TIMEOUT} (seconds).",
        )

    def tell() -> None:
        show(f"keras-dist: node {place.index} waits {aim} at {place.rendezvous}: {why}.")

    patience = _patiently(tell, late)
    while True:
        next(patience)
        try:
            return attempt()
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)


# --- Node 0 ---


def _listen(place: Place, show: Callable[[str], None]) -> tuple[socket.socket, str]:
    remedy = "It must be an address of node 0, with a free port; --node-rank 0 belongs to that machine only"

    def attempt() -> tuple[socket.socket, str]:
        address = place.resolve()
        try:
            return socket.create_server((address, place.port), backlog=128), address
        except OSError as error:
            # A name may still lead to the pod that this one replaces.
            if error.errno == errno.EADDRNOTAVAIL and address != place.host:
                raise
            raise ConfigurationError(
                "Node 0 can't listen at the rendezvous.",
                f"--rendezvous {place.rendezvous}: {error.strerror or error} ({place.ends()})", f"{remedy}.",
            ) from error

    return _tried(attempt, place, show, "to listen", "Node 0 could not listen at the rendezvous", remedy)


class Nodes:
    """All nodes of a job, as node 0 sees them: the others connect to it. `size` is the number of its own ranks."""

    def __init__(self, place: Place, size: int, backend: str, here: LocalRanks) -> None:
        self._place, self._events, self._show = place, here.events, here.console.print
        self._agreed = place.agreed(backend)
        self.code = 2  # of the launchers of all nodes: of an error, until the ranks have ended
        self._joined: dict[int, RemoteNode] = {}
        self._lock = threading.Lock()
        self._server, address = _listen(place, self._show)
        self._node = place.own_node(size, address)
        threading.Thread(target=self._accept, name="keras_dist-nodes", daemon=True).start()

    def wait_for_all(self, check: Callable[[], None]) -> None:
        """Waits until all have joined. Calls `check` meanwhile, which raises if a node can't join."""
        for _ in _patiently(self._tell, self._late):
            if not self._missing():
                break
            check()
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=_POLL_SECONDS)
                if isinstance(event, Received):
                    raise Stopped(event.signal)
        # A launcher that comes later, such as that of a restarted pod, waits for the next node 0.
        self._stop_listening()

    @property
    def all(self) -> list[Node]:
        return [self._node, *self.others]

    @property
    def others(self) -> list[RemoteNode]:
        with self._lock:
            return [node for _, node in sorted(self._joined.items())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Lets the launchers of the other nodes end as this one does: with the code and the message of `keras-dist`."""
        if isinstance(error, KeyboardInterrupt):
            error = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
            self.code = error.exit_code
        self._stop_listening()
        for node in self.others:
            if isinstance(error, DistributionError | Stopped):
                why = f"stopped by {error}" if isinstance(error, Stopped) else str(error)
                node.channel.send("show", f"keras-dist run: {why}")
            node.channel.ask("leave", self.code)
            node.channel.close()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):  # it has already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _missing(self) -> str:
        with self._lock:
            self._joined = {index: node for index, node in self._joined.items() if not node.is_lost}
            return ", ".join(f"node {index}" for index in range(1, self._place.count) if index not in self._joined)

    def _tell(self) -> None:
        text = f"keras-dist: waits at {self._place.rendezvous} for {self._missing()} of {self._place.count}."
        self._show(text)
        for node in self.others:
            node.channel.send("show", text)

    def _late(self, seconds: float) -> PeerLostError:
        return PeerLostError(
            f"Not all nodes have joined within {seconds:g} s.", f"missing: {self._missing()} of {self._place.count}",
            f"Run the same command there, with its --node-rank; see whether it can reach {self._place.rendezvous}, "
            f"which is {self._node.title} by {self._node.interface} (firewalls), or set {environment.JOIN_TIMEOUT} "
            "(seconds).",
        )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                arguments = self._server.accept()
                threading.Thread(target=self._welcome, args=arguments, name="keras_dist-nodes", daemon=True).start()

    def _welcome(self, connection: socket.socket, client: tuple[str, int]) -> None:
        try:
            if not store.is_of_this_user(client, self._server.getsockname()):
                raise ConnectionRefusedError
            secret = send_secret(connection) if self._place.has_munge else self._place.secret
            channel = Channel(connection, secret, has_dialed=False)
            try:
                hello = channel.receive()
            except ChannelError:
                why = "another secret"  # it can't read this, and so learns why
                self._show(f"keras-dist: a launcher at {client[0]} was refused: it has another secret.")
            else:
                why = self._add(channel, *hello["content"])
            if why:
                channel.send("refused", why)
                channel.close()
        except ConfigurationError as error:  # of MUNGE
            self._show(f"keras-dist run: {error}")
            connection.close()
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()

    def _add(self, channel: Channel, agreed: Mapping[str, Any], index: int, node: Mapping[str, Any]) -> str:
        """Adds a node, or returns why not."""
        for name, ours in self._agreed.items():
            if agreed[name] != ours:
                return f"{name} {agreed[name]} there, {ours} on node 0"
        with self._lock:
            other = self._joined.get(index)
            if not 0 < index < self._place.count or (other is not None and not other.is_lost):
                taken = "" if other is None else f", and {other.title} has it"
                return f"--node-rank {index} of {self._place.count} nodes{taken}"
            joined = RemoteNode(channel, self._events, index, node)
            channel.send("welcome")
            joined.listen()
            self._joined[index] = joined
        return ""


# --- The other nodes ---


def follow(place: Place, size: int, backend: str, here: LocalRanks) -> int:
    """Joins node 0, serves it until the job has ended, and returns node 0's exit code. For the main thread only."""
    channel, address = _dial(place, here.console.print)
    node = place.own_node(size, address)
    here.interface, here.title = node.interface, node.title
    inbox: queue.SimpleQueue[Any] = here.events  # also of what node 0 says
    names = ("start", "send", "send_on", "standing", "all_gone", "end_all")
    orders = {"show": here.console.print, "free_ports": free_ports, **{name: getattr(here, name) for name in names}}
    # The values are in node 0's store.
    server = store.Server(get=functools.partial(channel.ask, "get"), put=functools.partial(channel.ask, "put"))
    try:
        node.port = server.port
        _introduce(channel, place, backend, node)
        channel.start(inbox.put, lambda: inbox.put({"kind": "lost"}))
        with on_stop_signals(lambda signum: inbox.put(Received(signum)), SENT_ON):
            while True:
                event = inbox.get()
                if isinstance(event, Ended):
                    output = here.outputs[event.rank]
                    output.drain()
                    log = str(output.log.resolve()) if output.log else ""
                    channel.send("ended", event.rank, event.code, output.text(), log, output.log_error)
                elif isinstance(event, Received) and event.signal in SENT_ON:
                    here.send_on(event.signal)
                elif isinstance(event, Received):
                    channel.send("stop", int(event.signal))
                elif event["kind"] == "leave":
                    channel.obey(event, {"leave": int})
                    return int(event["content"][0])
                elif event["kind"] == "lost":
                    here.end_all()
                    why = f"node 0 at {place.rendezvous} {channel.lost}"
                    here.console.print(f"keras-dist: {why}. All ranks of this node have ended.")
                    return _LOST_CODE
                else:
                    channel.obey(event, orders)
    finally:
        here.end_all()
        channel.close()
        server.close()


def _dial(place: Place, show: Callable[[str], None]) -> tuple[Channel, str]:
    """Returns a connection to node 0, which isn't started, and the address of its end here."""

    def attempt() -> tuple[Channel, str]:
        connection = socket.create_connection((place.resolve(), place.port), timeout=_CONNECT_SECONDS)
        with contextlib.ExitStack() as failing:
            failing.callback(connection.close)
            secret = receive_secret(connection) if place.has_munge else place.secret
            channel = Channel(connection, secret, has_dialed=True)
            if not store.is_of_this_user(connection.getpeername(), connection.getsockname()):
                raise _of_another_user(f"--rendezvous {place.rendezvous}")
            failing.pop_all()
        return channel, str(connection.getsockname()[0])

    remedy = (
        "Run the same command on node 0 with --node-rank 0; see whether this machine can reach it (names, firewalls)"
    )
    return _tried(attempt, place, show, "for node 0", "Node 0 was not reached", remedy)


def _introduce(channel: Channel, place: Place, backend: str, node: Node) -> None:
    """Tells node 0 which node this is; raises ConfigurationError if node 0 refuses it."""
    channel.send("hello", place.agreed(backend), place.index, dataclasses.asdict(node))
    try:
        answer = channel.receive()
        why = "" if answer["kind"] == "welcome" else answer["content"][0]
    except ChannelError:
        why = "another secret than that of this node"
    except OSError as error:
        why = f"no answer ({error.strerror or error})"
    if why:
        raise ConfigurationError(
            f"Node 0 at {place.rendezvous} has refused this node.", why,
            f"Run the same command on every node, but for --node-rank, with the same {environment.SECRET}.",
        )


# --- Over ssh ---

Host = tuple[str, int]
LOCAL = ("localhost", LOOPBACK)
_BATCH = ("-o", "BatchMode=yes")  # it asks for no password
_END_SECONDS = 2.0
# What a user sets for the ranks. Everything else is as after a new login there.
_SENT = ("GLIBC_", "HOROVOD_", "TF_", "NCCL_", "OMP_", "CUDA_", "PYTHON", "PATH", "LD_LIBRARY_PATH", "KERAS_")


def parse_hosts(text: str) -> list[Host]:
    """Returns hosts and their numbers of ranks: `[("a", 4), ("user@b", 2)]` of `"a:4,user@b:2"`."""
    hosts = []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":")
        # A host that begins with a dash would be an option of ssh.
        if not host or host.startswith("-") or not count.isdecimal() or int(count) < 1:
            raise ConfigurationError("-H must be hosts with a number of ranks each.", f"-H {text}", "Use `-H a:4,b:4`.")
        hosts.append((host, int(count)))
    return hosts


def own_address(hosts: Sequence[Host]) -> str:
    """Returns the IPv4 address of the interface by which this machine reaches the hosts."""
    address = LOOPBACK
    for name in [host.rpartition("@")[2] for host, _ in hosts if host not in LOCAL]:
        try:
            address = way_to(name)
        except OSError as error:
            raise ConfigurationError(
                "The name of a host has no address, so it is not known by which interface it can reach this one.",
                f"{name}: {error.strerror or error}", "Name the interface: `--interface eth0`.",
            ) from error
        if not address.startswith("127."):  # as this machine's own name does on Debian
            break
    return address


@contextlib.contextmanager
def started(
    hosts: Sequence[Host], command: Callable[[int, int], Sequence[str]], secret: str, environ: Mapping[str, str],
    ssh: str,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Starts a command on each host, and waits for their ends at the end of the context.

    `command` returns the command of a host, given its index from 1 on and its number of ranks. The command gets the
    secret by its standard input: the command line is seen by all users. The user's settings in `environ` are sent.
    Yields a function that raises `PeerLostError` if a command has ended too early.
    """
    running: list[subprocess.Popen[bytes]] = []

    def check() -> None:
        for (host, _), process in zip(hosts, running, strict=False):
            if (code := process.poll()) is not None:
                raise PeerLostError(
                    f"The launcher on {host} has ended before all have joined.",
                    f"exit code {code}" + (" (255 is that of ssh itself)" if code == 255 else ""),
                    f"Look at the messages above. `{ssh} {host}` must work without a password, and have the same "
                    "Python and folder as here.",
                )

    try:
        for index, (host, count) in enumerate(hosts, 1):
            remote = ["sh", "-c", _script(command(index, count), environ)]
            if host not in LOCAL:
                remote = [*shlex.split(ssh), *_BATCH, host, f"exec {shlex.join(remote)}"]
            # Ctrl-C is for this launcher, which tells the others.
            process = subprocess.Popen(remote, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            running.append(process)
            with contextlib.suppress(OSError):  # it has ended: `check` says so
                cast(IO[bytes], process.stdin).write(f"{secret}\n".encode())
        yield check
    finally:
        for end in (lambda process: None, lambda process: process.stdin.close(), subprocess.Popen.kill):
            deadline = time.monotonic() + _END_SECONDS
            for process in running:
                if process.poll() is None:
                    end(process)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for process in running:
            cast(IO[bytes], process.stdin).close()


def _script(command: Sequence[str], environ: Mapping[str, str]) -> str:
    settings = [f"{name}={value}" for name, value in environ.items() if name.startswith(_SENT)]
    read = f"IFS= read -r {environment.SECRET} && export {environment.SECRET}"
    # As soon as the input ends, with the connection, the launcher is asked to stop.
    watch = "(cat; kill -TERM $$) <&3 >/dev/null 2>&1 & exec 3<&- </dev/null"
    run = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *command])}"
    return f"exec 3<&0; {read} && {{ {watch}; {run}; }}"
