"""The machines of a job. The launcher of node 0 leads: it decides, and the launchers of other nodes do what it says."""

from __future__ import annotations

import dataclasses
import fcntl
import ipaddress
import itertools
import random
import signal
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_dist import store
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.channel import Channel, Message
from keras_dist.launcher.output import RankOutput
from keras_dist.launcher.processes import Ended, Events, StopRequest

LOOPBACK = store.LOOPBACK
LOOPBACK_DEVICE = "lo"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


@dataclasses.dataclass
class Node:
    """A machine, with some of the ranks of a job.

    Args:
        size: Number of its ranks.
        address: By which the ranks of other nodes reach it.
        interface: The network interface that has this address.
        port: Of the store that serves its ranks, on its loopback interface.
        title: What messages call it; empty if there is no other one.
        suffix: Of the name of the job, since two launchers on one machine must not end each other's ranks.
    """

    size: int
    address: str = LOOPBACK
    interface: str = LOOPBACK_DEVICE
    port: int = 0
    title: str = ""
    suffix: str = ""

    def free_addresses(self, count: int) -> list[str]:
        """Returns addresses of this node with free ports."""
        return [f"{self.address}:{port}" for port in free_ports(count)]


class RemoteNode(Node):
    """Another machine, as the launcher of node 0 sees it.

    Args:
        channel: The connection to its launcher.
        events: Gets the ends of its ranks, and the signals that its launcher receives.
        index: Its number.
        **place: As for `Node`.
    """

    values: store.Values  # the store of the ranks of all nodes, another one for each start

    def __init__(self, channel: Channel, events: Events, index: int, **place: Any) -> None:
        super().__init__(**place)
        self._channel = channel
        self._events = events
        self._index = index
        self.suffix = f"-{index}"
        self._outputs: dict[int, RankOutput] = {}  # of its ranks that run
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        """True after the connection has ended."""
        return bool(self._channel.lost)

    def listen(self, seconds: float) -> None:
        """Begins to receive what its launcher sends.

        Args:
            seconds: After which it counts as lost if it doesn't answer.
        """
        self._channel.start(self._handle, self._lose_ranks, seconds)

    def free_addresses(self, count: int) -> list[str]:
        ports = self._channel.ask("free ports", count=count) or [0] * count  # it is lost: its ranks don't start
        return [f"{self.address}:{port}" for port in ports]

    def start(self, rank: int, variables: Mapping[str, str], output: RankOutput, restart: int) -> RemoteRank:
        """Starts one of its ranks.

        Args:
            rank: Index of the rank.
            variables: What its launcher adds to its own environment.
            output: Gets the end of the output when the rank ends.
            restart: How often all ranks were started before.
        """
        with self._lock:
            self._outputs[rank] = output
        self._channel.send("start", rank=rank, variables=dict(variables), restart=restart)
        if self.is_lost:
            self._lose_ranks()
        return RemoteRank(rank, self._channel)

    def finish(self) -> None:
        """Waits until its launcher has ended all that its ranks have started."""
        self._channel.ask("finish")

    def show(self, message: str) -> None:
        """Shows a message of the launcher there too."""
        self._channel.send("show", message=message)

    def leave(self, code: int) -> None:
        """Lets its launcher end with an exit code."""
        self._channel.ask("leave", code=code)
        self._channel.close()

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "put":
                self.values.put(message["path"], message["value"].encode("latin-1"))
                self._channel.answer(message, True)
            case "get":
                value = self.values.get(message["path"])
                self._channel.answer(message, None if value is None else value.decode("latin-1"))
            case "ended":
                with self._lock:
                    output = self._outputs.pop(message["rank"], None)
                if output is not None:
                    output.tail(message["tail"].encode())
                    output.log = Path(message["log"]) if message["log"] else None
                    output.log_error = message["log error"]
                    self._events.put(Ended(message["rank"], message["code"]))
            case "stop":
                self._events.put(StopRequest(signal.Signals(message["signal"]), self._index))

    def _lose_ranks(self) -> None:
        with self._lock:
            lost = dict(self._outputs)
            self._outputs.clear()
        for rank, output in lost.items():
            output.fate = f"is lost: its node {self._channel.lost}"
            self._events.put(Ended(rank, -signal.SIGKILL))


class RemoteRank:
    """A rank on another machine. Does what `RankProcess` does."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self._channel = channel

    def send(self, signum: int) -> None:
        """Sends a signal to the rank and to everything that it started."""
        self._ask("send", signum)

    def send_to_rank_only(self, signum: int) -> None:
        """Sends a signal to the rank."""
        self._ask("send_to_rank_only", signum)

    def handles(self, signum: int) -> bool:
        """True if the rank has a handler for a signal."""
        return bool(self._ask("handles", signum))

    def is_stopped(self) -> bool:
        """True if the rank was stopped, by SIGSTOP or a debugger, and does nothing."""
        return bool(self._ask("is_stopped"))

    def is_gone(self) -> bool:
        """True if nothing is left of the rank and of what it started, or its node is lost."""
        return self._ask("is_gone") is not False

    def _ask(self, method: str, *arguments: int) -> Any:
        return self._channel.ask("do", rank=self.rank, method=method, arguments=arguments)


class ForwardedValues:
    """The values of the store of node 0, for the ranks of another node."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def get(self, path: str) -> bytes | None:
        """Returns a value, `None` if there is none."""
        value = self._channel.ask("get", path=path)
        return None if value is None else str(value).encode("latin-1")

    def put(self, path: str, value: bytes) -> None:
        """Stores a value."""
        self._channel.ask("put", path=path, value=value.decode("latin-1"))


# --- Addresses and ports ---


def is_loopback(address: str) -> bool:
    """True for an address that only this machine can reach."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """Returns the name of the network interface that has an address of IPv4.

    Raises:
        ConfigurationError: If there is none.
    """
    if is_loopback(address):
        return LOOPBACK_DEVICE
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        if ipv4_of(name) == address:
            return name
    raise ConfigurationError(
        "No network interface of this machine has the address by which it reaches the other nodes.",
        f"{address}, and the interfaces {', '.join(names)}",
        "Name the interface: `--interface eth0`.",
    )


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface.

    Raises:
        ConfigurationError: If there is no such interface, or it has no address.
    """
    address = ipv4_of(interface)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigurationError(
            "This machine has no such network interface, or it has no IPv4 address.",
            f"--interface {interface}",
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


def free_ports(count: int) -> list[int]:
    """Returns free ports of this machine, outside of the range from which the kernel assigns ports.

    The ranks bind them seconds later: by then, the kernel could have given a port of its range to another program.
    """
    lowest = _first_ephemeral_port()
    candidates = range(lowest // 2, lowest) if lowest > 4096 else range(49152, 65536)
    shuffled = random.SystemRandom().sample(candidates, len(candidates))
    return [*itertools.islice(filter(_is_free, shuffled), count)]


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # TensorFlow listens on all interfaces
        except OSError:
            return False
        return True
