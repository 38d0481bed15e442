"""Finds out that another rank has gone, where the collectives themselves would wait for it for ever.

TensorFlow's do (2.21): the call to a process that is dead is made again and again. So a thread of each rank knocks at
the others' ports every second, and looks whether one has left word of why it failed.
"""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from keras_dist.backends.base import rank_has_failed, rank_has_gone
from keras_dist.backends.rendezvous import Rendezvous
from keras_dist.errors import DistributionError, PeerLostError
from keras_dist.topology import Topology

_TICK_SECONDS = 1.0
_HURRY_SECONDS = 0.2
_FIND_OUT_SECONDS = 5.0
_KNOCK_SECONDS = 2.0
_UNANSWERED = 2  # so often in a row, and the rank has gone
_FAREWELL_SECONDS = 5.0  # a rank that left in peace may be the first of all to reach the end of the script
_HEARD_SECONDS = 2.0


class Presence:
    """Watches the other ranks from a thread of its own.

    Args:
        topology: The place of this process.
        addresses: `"host:port"` of every rank.
        rendezvous: The store of the ranks' messages, if there is one.
        serves: True if the store is in this process, and ends with it.
        abort: Ends all pending collectives of this rank with an error.
    """

    def __init__(
        self,
        topology: Topology,
        addresses: Sequence[str],
        rendezvous: Rendezvous | None,
        serves: bool,
        abort: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._others = {rank: address for rank, address in enumerate(addresses) if rank != topology.rank}
        self._rendezvous = rendezvous
        self._serves = serves
        self._abort = abort
        self._closed = threading.Event()
        self._asked = threading.Event()
        self._known = threading.Event()
        self._failed = False
        self._cause: DistributionError | None = None
        self._tell_last_words()
        atexit.register(self._leave)
        threading.Thread(target=self._watch, name="keras_dist_presence", daemon=True).start()

    def cause(self) -> DistributionError | None:
        """Returns why the collectives ended, as soon as it is known; `None` if all ranks are still there."""
        self._asked.set()
        self._known.wait(_FIND_OUT_SECONDS)
        return self._cause

    def _watch(self) -> None:
        unanswered = dict.fromkeys(self._others, 0)
        while not self._closed.wait(_HURRY_SECONDS if self._asked.is_set() else _TICK_SECONDS):
            words = self._words()
            for rank, address in self._others.items():
                unanswered[rank] = 0 if listens(address) else unanswered[rank] + 1
            gone = [rank for rank, times in unanswered.items() if times >= _UNANSWERED]
            if words is None and not gone:
                continue
            if words is None and all(self._has_left(rank) for rank in gone):
                self._asked.wait(_FAREWELL_SECONDS)
            self._cause = self._explain(self._words(), gone)
            self._known.set()
            if self._rendezvous is not None:
                self._rendezvous.put(f"heard_{self._topology.rank}", "1")
            self._abort(self._cause.problem)
            return

    def _words(self) -> tuple[int, str] | None:
        """Returns the rank that failed first, and its error."""
        text = self._rendezvous.get("failed") if self._rendezvous is not None else None
        rank, found, words = (text or "").partition(" ")
        return (int(rank), words) if found and int(rank) != self._topology.rank else None

    def _has_left(self, rank: int) -> bool:
        return self._said("left", rank)

    def _said(self, what: str, rank: int) -> bool:
        return self._rendezvous is not None and self._rendezvous.get(f"{what}_{rank}") is not None

    def _explain(self, words: tuple[int, str] | None, gone: Sequence[int]) -> PeerLostError:
        if words is not None:
            rank, error = words
            return rank_has_failed(rank, error, self._topology)
        names = ", ".join(f"rank {rank} at {self._others[rank]}" for rank in gone)
        has_left = all(map(self._has_left, gone))
        return rank_has_gone(f"{names} {'has ended' if has_left else 'does not answer any more'}", self._topology)

    def _tell_last_words(self) -> None:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            previous(kind, error, traceback)
            self._failed = True
            # A rank that only lost its peer is not the cause.
            if self._rendezvous is None or isinstance(error, PeerLostError):
                return
            if self._rendezvous.get("failed") is None:
                self._rendezvous.put("failed", f"{self._topology.rank} {kind.__name__}: {error}")
            if self._serves:
                self._wait_until_heard()

        sys.excepthook = excepthook

    def _wait_until_heard(self) -> None:
        """The store ends with this process, so the others get a moment to look into it."""
        deadline = time.monotonic() + _HEARD_SECONDS
        while time.monotonic() < deadline and not all(self._said("heard", rank) for rank in self._others):
            time.sleep(_HURRY_SECONDS)

    def _leave(self) -> None:
        if self._rendezvous is not None and not self._failed:
            self._rendezvous.put(f"left_{self._topology.rank}", "1")
        self._closed.set()


def listens(address: str) -> bool:
    """True if somebody answers at `"host:port"`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError:
        return False
    return True
