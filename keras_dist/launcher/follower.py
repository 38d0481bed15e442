"""The launcher of a node other than node 0: starts and ends the ranks of its machine as the launcher of node 0 says."""

from __future__ import annotations

import contextlib
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
from keras_dist.launcher.channel import Channel, ChannelError, Message
from keras_dist.launcher.cluster import rank_environment
from keras_dist.launcher.joining import QUIET_SECONDS, Place, answer_seconds, described
from keras_dist.launcher.nodes import ForwardedValues, Node, free_ports
from keras_dist.launcher.output import Console, RankOutput
from keras_dist.launcher.processes import Ended, RankProcess, SentOn, StopRequest, on_signals, on_stop_signals

_DRAIN_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 5.0
_LOST_CODE = 128 + signal.SIGKILL  # the same as if node 0 loses a node
_LOST: Message = {"kind": "lost"}
# What node 0 may ask of a rank.
_METHODS: Mapping[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (
        RankProcess.send, RankProcess.send_to_rank_only, RankProcess.handles, RankProcess.is_stopped,
        RankProcess.is_gone,
    )
}  # fmt: skip


class Follower:
    """The ranks of this node, and the connection to node 0.

    Args:
        command: The program and its arguments.
        environ: What the ranks inherit.
        output: Whose output is shown here: `"all"`, or `"chief"`, which is on node 0.
        log_dir: Folder for the whole output of each rank of this node, if any.
        console: Where the launcher's messages go.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: str,
        log_dir: str | None,
        console: Console,
    ) -> None:
        self._command = command
        self._environ = environ
        self._mode = output
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._console = console
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ranks: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._closing = contextlib.ExitStack()  # of one start

    def run(self, place: Place, size: int, backend: str) -> int:
        """Joins node 0 and serves it until the job has ended; for the main thread only.

        Args:
            place: Where this node is.
            size: Number of its ranks.
            backend: What the ranks communicate by.

        Returns:
            The exit code that node 0 has too.

        Raises:
            ConfigurationError: If node 0 refuses this node.
            PeerLostError: If node 0 isn't reached in time.
        """
        self._channel, self._node = dial(place, size, backend, self._console.print)
        stop = on_stop_signals(lambda signum: self._inbox.put(StopRequest(signum)))
        pass_on = on_signals((signal.SIGUSR1, signal.SIGUSR2), lambda signum: self._inbox.put(SentOn(signum)))
        server = store.serve(values=ForwardedValues(self._channel))
        try:
            self._node.port = server.port
            introduce(self._channel, place, self._node, backend)
            self._channel.start(self._receive, lambda: self._inbox.put(_LOST), answer_seconds())
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
                self._report(event)
            elif isinstance(event, StopRequest):
                self._channel.send("stop", signal=int(event.signal))
            elif isinstance(event, SentOn):
                for rank in self._ranks.values():
                    if rank.handles(event.signal):
                        rank.send_to_rank_only(event.signal)
            elif event["kind"] == "start":
                self._start(event["rank"], event["variables"], event["restart"])
            elif event["kind"] == "do":
                rank = self._ranks[event["rank"]]
                self._channel.answer(event, _METHODS[event["method"]](rank, *event["arguments"]))
            elif event["kind"] == "finish":
                self._finish()
                self._channel.answer(event, True)
            elif event["kind"] == "show":
                self._console.print(event["message"])
            elif event["kind"] == "leave":
                self._channel.answer(event, True)
                return int(event["code"])
            else:
                self._finish()
                self._console.print(
                    f"keras-dist: node 0 at {place.rendezvous} {self._channel.lost}. All ranks of this node have ended."
                )
                return _LOST_CODE

    def _start(self, rank: int, variables: Mapping[str, str], restart: int) -> None:
        if not self._ranks:
            self._closing.enter_context(descendants.ended(variables[descendants.JOB]))
        shows_notes = environment.get(environment.TENSORFLOW_LOG_LEVEL) is not None
        output = RankOutput(rank, self._mode, self._log_dir, self._console, shows_notes, restart)
        self._outputs[rank] = output
        self._closing.callback(output.close)
        environ = rank_environment(self._environ, self._node, variables)
        self._ranks[rank] = RankProcess(rank, [*self._command], environ, output, self._inbox)

    def _report(self, event: Ended) -> None:
        output = self._outputs[event.rank]
        output.drain(_DRAIN_SECONDS)
        self._channel.send(
            "ended",
            rank=event.rank,
            code=event.code,
            tail=output.tail.text(),
            log=str(output.log.resolve()) if output.log else "",
            **{"log error": output.log_error},
        )

    def _finish(self) -> None:
        self._closing.close()
        self._ranks.clear()
        self._outputs.clear()


def dial(place: Place, size: int, backend: str, show: Callable[[str], None]) -> tuple[Channel, Node]:
    """Connects to node 0.

    Args:
        place: Of this node.
        size: Number of its ranks.
        backend: What the ranks communicate by.
        show: Shows a message to the user.

    Returns:
        The connection, which isn't started, and this node.

    Raises:
        ConfigurationError: If there is no secret.
        PeerLostError: If node 0 isn't reached in time.
    """
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
                f"Node 0 was not reached within {seconds:g} s.",
                f"--rendezvous {place.rendezvous}: {why}",
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
                "A process of another user listens at the rendezvous.",
                f"--rendezvous {place.rendezvous}",
                "Name another port.",
            )
    except BaseException:
        connection.close()
        raise
    return channel, str(connection.getsockname()[0])


def introduce(channel: Channel, place: Place, node: Node, backend: str) -> None:
    """Tells node 0 which node this is.

    Raises:
        ConfigurationError: If node 0 refuses it.
    """
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
            f"Node 0 at {place.rendezvous} has refused this node.",
            answer["why"],
            f"Run the same command on every node, but for --node-rank, with the same {environment.SECRET}.",
        )
