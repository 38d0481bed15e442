"""Detects that another rank is gone, where the collectives would wait for it forever.

TensorFlow's collectives (2.21) retry calls to a dead process without end. So each rank asks the TensorFlow servers of
the others every second, in a thread for each, and another thread reads their failure reports. The kernel accepts
connections to a process that is stopped, so it is not enough that one listens: it must answer.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

from keras_dist.comm.connections import NO_ANSWER, why_no_grpc
from keras_dist.comm.failure_reports import FailureReports, rank_has_gone
from keras_dist.errors import PeerLostError
from keras_dist.topology import Topology

_TICK_SECONDS = 1.0
_URGENT_SECONDS = 0.2
_CAUSE_SECONDS = 5.0
_ATTEMPTS = 2  # refused connections in a row after which a rank is gone
_EXIT_SECONDS = 1.0  # a rank that exits without an error may only be the first to reach the end of the script


class Liveness:
    """Watches from a thread whether the processes of the other ranks are alive.

    Args:
        topology: The place of this process.
        addresses: `"host:port"` of every rank.
        failure_reports: The reports of this rank and the others.
        abort: Called with the reason; ends all pending collectives of this rank with an error.
        limit: The number of seconds that a rank may take to answer.
    """

    def __init__(
        self,
        topology: Topology,
        addresses: Sequence[str],
        failure_reports: FailureReports,
        abort: Callable[[str], None],
        limit: float,
    ) -> None:
        self._topology = topology
        self._others = {rank: address for rank, address in enumerate(addresses) if rank != topology.rank}
        self._failure_reports = failure_reports
        self._abort = abort
        self._limit = limit
        self._gone: dict[int, str] = {}  # ranks, and how that was noticed
        self._closed = threading.Event()
        self._is_urgent = threading.Event()
        self._is_known = threading.Event()
        self._cause: PeerLostError | None = None
        atexit.register(self._closed.set)
        watches: list[Callable[[], None]] = [self._watch]
        watches += [functools.partial(self._watch_rank, rank) for rank in self._others]
        for watch in watches:
            threading.Thread(target=watch, name="keras_dist_liveness", daemon=True).start()

    def cause(self) -> PeerLostError | None:
        """Returns why the collectives ended, as soon as it is known; `None` if all ranks are alive."""
        self._is_urgent.set()
        self._is_known.wait(_CAUSE_SECONDS)
        return self._cause

    def _watch(self) -> None:
        while self._waits():
            failure, gone = self._failure_reports.cause(), dict(self._gone)
            if failure is None and not gone:
                continue
            if failure is None and all(map(self._failure_reports.has_exited, gone)):
                self._is_urgent.wait(_EXIT_SECONDS)
            self._cause = self._failure_reports.cause() or self._gone_error(gone)
            self._is_known.set()
            self._failure_reports.confirm()
            self._abort(str(self._cause))
            return

    def _watch_rank(self, rank: int) -> None:
        refused = 0
        while refused < _ATTEMPTS and self._waits():
            why = why_no_grpc(self._others[rank], self._limit)
            refused = refused + 1 if why else 0
            if why == NO_ANSWER:
                self._gone[rank] = f"has not answered for {self._limit:g} s (it is stopped, or its machine is cut off)"
                return
        if not self._closed.is_set():
            self._gone[rank] = "does not answer any more"

    def _waits(self) -> bool:
        """Waits for the next look. Returns False at the end of the process."""
        return not self._closed.wait(_URGENT_SECONDS if self._is_urgent.is_set() else _TICK_SECONDS)

    def _gone_error(self, gone: Mapping[int, str]) -> PeerLostError:
        parts = [
            f"rank {rank} at {self._others[rank]} {'has ended' if self._failure_reports.has_exited(rank) else how}"
            for rank, how in sorted(gone.items())
        ]
        return rank_has_gone(", ".join(parts), self._topology)
