"""The launcher of a node other than node 0: starts and ends the ranks of its machine as the launcher of node 0 says."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError, PeerLostError
from keras_dist.launcher import descendants, joining
from keras_dist.launcher.cluster import rank_environment
from keras_dist.launcher.joining import QUIET_SECONDS, Place, answer_seconds, described
from keras_dist.launcher.nodes import Channel, ChannelError, ForwardedValues, Message, Node, free_ports
from keras_dist.launcher.output import Console, RankOutput
from keras_dist.launcher.processes import Ended, RankProcess, SentOn, StopRequest, on_signals, on_stop_signals

_DRAIN_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 5.0
_LOST_CODE = 128 + signal.SIGKILL  # the same as if node 0 loses a node
_METHODS: Mapping[str, Callable[..., Any]] = {  # what node 0 may ask of a rank
    "send": RankProcess.send, "send_to_rank_only": RankProcess.send_to_rank_only, "handles": RankProcess.handles,
    "is_stopped": RankProcess.is_stopped, "is_gone": RankProcess.is_gone,
}  # fmt: skip


@dataclasses.dataclass
class Follower:
    """The ranks of this node, and the connection to node 0."""

    command: Sequence[str]
    environ: Mapping[str, str]  # what the ranks inherit
    mode: str  # whose output is shown here: `"all"`, or `"chief"`, which is on node 0
    log_dir: str | None
    console: Console
    _inbox: queue.SimpleQueue[Any] = dataclasses.field(init=False, default_factory=queue.SimpleQueue)
    _ranks: dict[int, RankProcess] = dataclasses.field(init=False, default_factory=dict)
    _outputs: dict[int, RankOutput] = dataclasses.field(init=False, default_factory=dict)
    _closing: contextlib.ExitStack = dataclasses.field(init=False, default_factory=contextlib.ExitStack)  # of one start

    def run(self, place: Place, size: int, backend: str) -> int:
        """Joins node 0, serves it until the job has ended, and returns node 0's exit code. For the main thread only."""
        self._channel, self._node = _dial(place, size, self.console.print)
        stop = on_stop_signals(lambda signum: self._inbox.put(StopRequest(signum)))
        pass_on = on_signals((signal.SIGUSR1, signal.SIGUSR2), lambda signum: self._inbox.put(SentOn(signum)))
        server = store.Server(values=ForwardedValues(self._channel))
        try:
            self._node.port = server.port
            _introduce(self._channel, place, self._node, backend)
            self._channel.start(self._receive, lambda: self._inbox.put({"kind": "lost"}), answer_seconds())
            with stop, pass_on, self._closing:
                return self._serve(place)
        finally:
            self._channel.close()
            server.close()

    def _receive(self, message: Message) -> None:
        if message["kind"] == "free ports":  # the main thread may wait for a rank
            self._channel.answer(message, free_ports(message["count"]))
        else:
            self._inbox.put(message)

    def _serve(self, place: Place) -> int:
        while True:
            event = self._inbox.get()
            if isinstance(event, Ended):
                output = self._outputs[event.rank]
                output.drain(_DRAIN_SECONDS)
                end = {"rank": event.rank, "code": event.code, "tail": output.tail.text()}
                log = {"log": str(output.log.resolve()) if output.log else "", "log error": output.log_error}
                self._channel.send("ended", **end, **log)
            elif isinstance(event, StopRequest):
                self._channel.send("stop", signal=int(event.signal))
            elif isinstance(event, SentOn):
                for rank in self._ranks.values():
                    if rank.handles(event.signal):
                        rank.send_to_rank_only(event.signal)
            elif event["kind"] == "start":
                self._start(event["rank"], event["variables"], event["restart"])
            elif event["kind"] == "do":
                method = _METHODS[event["method"]]
                self._channel.answer(event, method(self._ranks[event["rank"]], *event["arguments"]))
            elif event["kind"] == "finish":
                self._finish()
                self._channel.answer(event, True)
            elif event["kind"] == "show":
                self.console.print(event["message"])
            elif event["kind"] == "leave":
                self._channel.answer(event, True)
                return int(event["code"])
            else:
                self._finish()
                self.console.print(
                    f"keras-dist: node 0 at {place.rendezvous} {self._channel.lost}. All ranks of this node have ended."
                )
                return _LOST_CODE

    def _start(self, rank: int, variables: Mapping[str, str], restart: int) -> None:
        if not self._ranks:
            self._closing.enter_context(descendants.ended(variables[descendants.JOB]))
        shows_notes = environment.get(environment.TENSORFLOW_LOG_LEVEL) is not None
        log_dir = Path(self.log_dir) if self.log_dir is not None else None
        self._outputs[rank] = output = RankOutput(rank, self.mode, log_dir, self.console, shows_notes, restart)
        self._closing.callback(output.close)
        environ = rank_environment(self.environ, self._node, variables)
        self._ranks[rank] = RankProcess(rank, [*self.command], environ, output, self._inbox)

    def _finish(self) -> None:
        self._closing.close()
        self._ranks.clear()
        self._outputs.clear()


def _dial(place: Place, size: int, show: Callable[[str], None]) -> tuple[Channel, Node]:
    """Connects to node 0; returns the connection, which isn't started, and this node."""
    seconds = environment.seconds(environment.JOIN_TIMEOUT, environment.JOIN_SECONDS)
    start, told = time.monotonic(), False
    while True:
        try:
            channel, address = _connected(place)
            return channel, place.own_node(size, address)
        except OSError as error:
            waited, why = time.monotonic() - start, error.strerror or str(error)
        if waited > seconds:
            raise PeerLostError(
                f"Node 0 was not reached within {seconds:g} s.", f"--rendezvous {place.rendezvous}: {why}",
                "Run the same command on node 0 with --node-rank 0; see whether this machine can reach it (names, "
                f"firewalls), or set {environment.JOIN_TIMEOUT} (seconds).",
            )
        if waited > QUIET_SECONDS and not told:
            told = True
            show(f"keras-dist: node {place.index} waits for node 0 at {place.rendezvous}: {why}.")
        time.sleep(_RETRY_SECONDS)


def _connected(place: Place) -> tuple[Channel, str]:
    """Returns a connection to node 0, and the address of its end here."""
    connection = socket.create_connection((place.resolve(), place.port), timeout=_CONNECT_SECONDS)
    try:
        secret = joining.receive_secret(connection) if place.has_munge else place.secret
        channel = Channel(connection, secret, has_dialed=True)
        if not store.is_of_this_user(connection.getpeername(), connection.getsockname()):
            raise ConfigurationError(
                "A process of another user listens at the rendezvous.", f"--rendezvous {place.rendezvous}",
                "Name another port.",
            )
    except BaseException:
        connection.close()
        raise
    return channel, str(connection.getsockname()[0])


def _introduce(channel: Channel, place: Place, node: Node, backend: str) -> None:
    """Tells node 0 which node this is; raises ConfigurationError if node 0 refuses it."""
    more: Mapping[str, Any] = {name: getattr(node, name) for name in ("address", "interface", "port", "title")}
    channel.send("hello", **described(place, node.size, backend), **more)
    try:
        answer = channel.receive()
    except ChannelError:
        answer = {"why": "another secret than that of this node"}
    except OSError as error:
        answer = {"why": f"no answer ({error.strerror or error})"}
    if answer.get("kind") != "welcome":
        raise ConfigurationError(
            f"Node 0 at {place.rendezvous} has refused this node.", answer["why"],
            f"Run the same command on every node, but for --node-rank, with the same {environment.SECRET}.",
        )
