"""The machines of a job. The launcher of node 0 leads: it decides, and the launchers of other nodes do what it says.

Which nodes there are, the command line says, or a scheduler (Slurm, Kubernetes).

Launchers prove to each other that they know the job's secret. Their messages are JSON, never pickles. Each is signed
with a key of this connection, so none can be forged or repeated. They are not encrypted.
"""

import contextlib
import dataclasses
import fcntl
import hmac
import itertools
import json
import queue
import random
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.launcher.output import CHIEF, Console, RankOutput
from keras_dist.launcher.processes import LOOPBACK_DEVICE, Ended, Events, Received

Message = dict[str, Any]
_NONCE_BYTES = _SIGNATURE_BYTES = 32
_LENGTH = struct.Struct("!I")
_LONGEST_MESSAGE = 1 << 24
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
_SHORTEST_SECRET = 16
_PINGS = 6  # within the time after which a silent node counts as lost


class ChannelError(DistributionError):
    """The other end is no launcher of this job: it doesn't know the secret, or speaks another language."""


class Channel:
    """One end of a connection. Both ends may send messages, ask questions and answer them."""

    def __init__(self, connection: socket.socket, secret: str, has_dialed: bool) -> None:
        self._socket = connection
        self._socket.settimeout(_HANDSHAKE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._input = connection.makefile("rb")
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

    def send(self, kind: str, *content: Any, question: int | None = None) -> None:
        """Sends a message. Does nothing if the connection has ended: its reader learns that."""
        payload = json.dumps({"kind": kind, "content": content, "question": question}).encode()
        with self._lock, contextlib.suppress(OSError):
            signature = _signature(self._send_key, next(self._sent), payload)
            self._socket.sendall(_LENGTH.pack(len(payload)) + signature + payload)

    def ask(self, kind: str, *content: Any) -> Any:
        """Sends a question and returns the answer; `None` if the connection ends before. Needs `start`."""
        number = next(self._questions)
        answers = self._waiting[number] = queue.SimpleQueue[Any]()
        if self.lost:
            answers.put(None)
        self.send(kind, *content, question=number)
        try:
            return answers.get()
        finally:
            del self._waiting[number]

    def obey(self, message: Message, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Calls the method that a message names, and answers if it is a question."""
        value = methods[message["kind"]](*message["content"])
        if message["question"] is not None:
            self.send("answer", value, question=message["question"])

    def receive(self) -> Message:
        """Returns the next message. Raises ChannelError if it isn't signed with the key of this connection."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        signature = self._exactly(_SIGNATURE_BYTES)
        payload = self._exactly(length) if length <= _LONGEST_MESSAGE else b""
        if not hmac.compare_digest(signature, _signature(self._receive_key, next(self._received), payload)):
            raise ChannelError("A message between launchers has a wrong signature.", "another secret", "Use the same.")
        message: Message = json.loads(payload)
        return message

    def start(self, handle: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        """Receives messages in a thread, for `handle` all but answers. Calls `on_lost` after the end, or a silence."""
        seconds = environment.seconds(environment.ANSWER_TIMEOUT, _ANSWER_SECONDS)
        self._socket.settimeout(seconds)
        closed = threading.Event()

        def read() -> None:
            try:
                while True:
                    message = self.receive()
                    if message["kind"] == "answer":
                        if (waiting := self._waiting.get(message["question"])) is not None:
                            waiting.put(message["content"][0])
                    elif message["kind"] != "ping":
                        handle(message)
            except TimeoutError:
                self.lost = f"has not answered for {seconds:g} s"
            except (OSError, ValueError, KeyError, ChannelError) as error:
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
        self._input.close()
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        received = self._input.read(count)
        if len(received) < count:
            raise ConnectionError("its launcher has ended")
        return received


def _signature(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")


LOOPBACK = store.LOOPBACK
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


@dataclasses.dataclass
class Node:
    """A machine, with some of the ranks of a job."""

    size: int  # number of its ranks
    address: str = LOOPBACK  # by which the ranks of other nodes reach it
    interface: str = LOOPBACK_DEVICE  # which has this address
    port: int = 0  # of the store that serves its ranks, on its loopback interface
    title: str = ""  # what messages call it; empty if there is no other one
    suffix: str = ""  # of the name of the job, since two launchers on one machine must not end each other's ranks

    def free_addresses(self, count: int) -> list[str]:
        return [f"{self.address}:{port}" for port in free_ports(count)]


class RemoteNode(Node):
    """Another machine, as the launcher of node 0 sees it: does what `LocalRanks` does. `place` is as for `Node`."""

    store: store.Server  # of the ranks of all nodes, another one for each start

    def __init__(self, channel: Channel, events: Events, index: int, place: Mapping[str, Any]) -> None:
        super().__init__(**place)
        self.channel, self._events, self._index = channel, events, index
        self.suffix = f"-{index}"
        self._outputs: dict[int, RankOutput] = {}  # of its ranks that run
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        return bool(self.channel.lost)

    def listen(self) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "put": lambda path, value: self.store.put(path, value),
            "get": lambda path: self.store.get(path),
            "ended": self._ended,
            "stop": lambda signum: self._events.put(Received(signal.Signals(signum), self._index)),
        }
        self.channel.start(lambda message: self.channel.obey(message, methods), self._lose_ranks)

    def free_addresses(self, count: int) -> list[str]:
        ports = self.channel.ask("free_ports", count) or [0] * count  # it is lost: its ranks don't start
        return [f"{self.address}:{port}" for port in ports]

    def start(self, rank: int, variables: Mapping[str, str], restart: int) -> RankOutput:
        # Its launcher shows the output, and sends the end of it.
        output = RankOutput(rank, CHIEF, None, Console(), place=self.title)
        with self._lock:
            self._outputs[rank] = output
        self.channel.send("start", rank, dict(variables), restart)
        if self.is_lost:
            self._lose_ranks()
        return output

    def send(self, signum: int) -> None:
        self.channel.ask("send", signum)

    def send_on(self, signum: int) -> bool:
        return bool(self.channel.ask("send_on", signum))

    def standing(self) -> list[int]:
        return self.channel.ask("standing") or []

    def all_gone(self) -> bool:
        return self.channel.ask("all_gone") is not False  # `None` if it is lost

    def end_all(self) -> None:
        self.channel.ask("end_all")

    def _ended(self, rank: int, code: int, tail: str, log: str, log_error: str) -> None:
        with self._lock:
            output = self._outputs.pop(rank, None)
        if output is not None:
            output.tail = tail.encode()
            output.log, output.log_error = Path(log) if log else None, log_error
            self._events.put(Ended(rank, code))

    def _lose_ranks(self) -> None:
        with self._lock:
            lost = dict(self._outputs)
            self._outputs.clear()
        for rank, output in lost.items():
            output.fate = f"is lost: its node {self.channel.lost}"
            self._events.put(Ended(rank, -signal.SIGKILL))


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
        if address.startswith("127."):
            if self.host != "localhost" and not self.host.startswith("127."):
                raise ConfigurationError(
                    "The name of the rendezvous resolves to the loopback interface here, where no other machine can "
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

    def ends(self) -> str:
        """Returns both ends of a connection between this node and the rendezvous, for a message."""
        to = ""
        with contextlib.suppress(OSError):  # its name has no address, or no way leads there
            address = self.resolve()
            to = f"{address} from {way_to(address)}, "
        own = [f"{name} {ip}" for _, name in socket.if_nameindex() if (ip := ipv4_of(name)) is not None]
        return f"{to}node {self.index} ({socket.gethostname()}) has {', '.join(own) or 'no address'}"

    def own_node(self, size: int, address: str) -> Node:
        """Returns this node, which the others reach at an address or, if one is named, by an interface."""
        if self.interface is not None:
            address = address_of(self.interface)
        interface = self.interface or interface_of(address)
        return Node(size, address, interface, title=f"node {self.index} ({socket.gethostname()}, {address})")

    def agreed(self, backend: str) -> Message:
        return {"version": environment.installed_version("keras_dist"), "count": self.count, "backend": backend}


# --- Addresses and ports ---


def interface_of(address: str) -> str:
    if address.startswith("127."):
        return LOOPBACK_DEVICE
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        if ipv4_of(name) == address:
            return name
    raise ConfigurationError(
        "No network interface of this machine has the address by which it reaches the other nodes.",
        f"{address}, and the interfaces {', '.join(names)}", "Name the interface: `--interface eth0`.",
    )


def address_of(interface: str) -> str:
    address = ipv4_of(interface)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigurationError(
            "This machine has no such network interface, or it has no IPv4 address.", f"--interface {interface}",
            f"Use one of: {names}.",
        )
    return address


def ipv4_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface, `None` if there is no such interface, or it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def way_to(host: str) -> str:
    """Returns the IPv4 address of this machine by which it reaches a host. Raises OSError if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:  # sends nothing
        asking.connect((host, 9))
        return str(asking.getsockname()[0])


def free_ports(count: int) -> list[int]:
    """Returns free ports of this machine, outside of the range from which the kernel assigns ports.

    The ranks bind them seconds later: by then, the kernel could have given a port of its range to another program.
    """
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32768
    candidates = range(lowest // 2, lowest) if lowest > 4096 else range(49152, 65536)
    ports: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(ports) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # TensorFlow listens on all interfaces
            ports.append(port)
    return ports


# --- What schedulers tell ---

JOB_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes's variable in a pod of an Indexed Job


def told_by(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the options that this launcher was told. What the user has set comes before what the scheduler says."""
    if environ.get(environment.LAUNCHER):  # a rank, whose place is that of its own launcher
        return {}
    # A pod of an Indexed Job of Kubernetes, also of a JobSet, has variables for the number of pods and node 0.
    of_pod = {"node_rank": environ.get(JOB_INDEX, "")} if environ.get(environment.NNODES) else {}
    of_user = {"nnodes": environment.NNODES, "node_rank": environment.NODE_RANK, "rendezvous": environment.RENDEZVOUS}
    set_by_user = {option: environ[name] for option, name in of_user.items() if environ.get(name)}
    return {**(_slurm(environ) or _train_job(environ) or of_pod), **set_by_user}


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """A task of `srun`. A launcher in the shell of `salloc` or the script of `sbatch` is alone."""
    if not environment.is_slurm_task(environ):
        return {}
    topology, hosts, _ = environment.slurm_place(environ)
    step = int(environ["SLURM_JOB_ID"]) + int(environ["SLURM_STEP_ID"])
    port = environment.PORTS[step % len(environment.PORTS)]
    place = {"nnodes": str(topology.size), "node_rank": str(topology.rank)}
    host = hosts[0] if len(hosts) > 1 else store.LOOPBACK
    return {**place, "rendezvous": f"{host}:{port}", "num_processes": "1"}


def _train_job(environ: Mapping[str, str]) -> dict[str, str]:
    """A node of a TrainJob of Kubeflow, whose variables are those of torchrun."""
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    count, index, host, port = (environ.get(name, "") for name in names)
    if not (count and index and host and port):
        return {}
    ranks = environ.get("PET_NPROC_PER_NODE", "")
    told = {"nnodes": count, "node_rank": index, "rendezvous": f"{host}:{port}"}
    return {**told, "num_processes": ranks} if ranks.isdecimal() else told
