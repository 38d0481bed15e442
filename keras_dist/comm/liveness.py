"""Finds out that another rank has gone, where the collectives themselves would wait for it for ever.

TensorFlow's do (2.21): the call to a process that is dead is made again and again. So a thread of each rank knocks at
the others' ports every second, and looks whether one has left word of why it failed.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence

from keras_dist.comm.backend import rank_has_gone
from keras_dist.comm.connections import listens
from keras_dist.comm.failure_reports import FailureReports
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.errors import DistributionError, PeerLostError
from keras_dist.topology import Topology

_TICK_SECONDS = 1.0
_HURRY_SECONDS = 0.2
_FIND_OUT_SECONDS = 5.0
_UNANSWERED = 2  # so often in a row, and the rank has gone
_FAREWELL_SECONDS = 5.0  # a rank that left in peace may be the first of all to reach the end of the script


class Liveness:
    """Watches the other ranks from a thread of its own.

    Args:
        topology: The place of this process.
        addresses: `"host:port"` of every rank.
        rendezvous: The store of the ranks' messages, if there is one.
        failure_reports: Those of this rank and of the others.
        abort: Ends all pending collectives of this rank with an error. Is given a text that says why.
    """

    def __init__(
        self,
        topology: Topology,
        addresses: Sequence[str],
        rendezvous: Rendezvous | None,
        failure_reports: FailureReports,
        abort: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._others = {rank: address for rank, address in enumerate(addresses) if rank != topology.rank}
        self._rendezvous = rendezvous
        self._last_words = failure_reports
        self._abort = abort
        self._closed = threading.Event()
        self._asked = threading.Event()
        self._known = threading.Event()
        self._cause: DistributionError | None = None
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
            failed = self._last_words.of_others()
            for rank, address in self._others.items():
                unanswered[rank] = 0 if listens(address) else unanswered[rank] + 1
            gone = [rank for rank, times in unanswered.items() if times >= _UNANSWERED]
            if failed is None and not gone:
                continue
            if failed is None and all(self._has_left(rank) for rank in gone):
                self._asked.wait(_FAREWELL_SECONDS)
            self._cause = self._last_words.of_others() or self._has_gone(gone)
            self._known.set()
            self._last_words.heard()
            self._abort(str(self._cause))
            return

    def _has_left(self, rank: int) -> bool:
        return self._rendezvous is not None and self._rendezvous.get(f"left_{rank}") is not None

    def _has_gone(self, gone: Sequence[int]) -> PeerLostError:
        names = ", ".join(f"rank {rank} at {self._others[rank]}" for rank in gone)
        has_left = all(map(self._has_left, gone))
        return rank_has_gone(f"{names} {'has ended' if has_left else 'does not answer any more'}", self._topology)

    def _leave(self) -> None:
        if self._rendezvous is not None and not self._last_words.are_said:
            self._rendezvous.put(f"left_{self._topology.rank}", "1")
        self._closed.set()
