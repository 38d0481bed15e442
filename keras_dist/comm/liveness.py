"""Detects that another rank is gone, where the collectives would wait for it forever.

TensorFlow's collectives (2.21) retry calls to a dead process without end. So a thread of each rank connects to the
ports of the others every second, and reads their failure reports.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence

from keras_dist.comm.connections import listens
from keras_dist.comm.failure_reports import FailureReports, rank_has_gone
from keras_dist.errors import PeerLostError
from keras_dist.topology import Topology

_TICK_SECONDS = 1.0
_URGENT_SECONDS = 0.2
_CAUSE_SECONDS = 5.0
_ATTEMPTS = 2  # failed connections in a row after which a rank is gone
_EXIT_SECONDS = 5.0  # a rank that exits without an error may only be the first to reach the end of the script


class Liveness:
    """Watches from a thread whether the processes of the other ranks are alive.

    Args:
        topology: The place of this process.
        addresses: `"host:port"` of every rank.
        failure_reports: The reports of this rank and the others.
        abort: Called with the reason; ends all pending collectives of this rank with an error.
    """

    def __init__(
        self,
        topology: Topology,
        addresses: Sequence[str],
        failure_reports: FailureReports,
        abort: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._others = {rank: address for rank, address in enumerate(addresses) if rank != topology.rank}
        self._failure_reports = failure_reports
        self._abort = abort
        self._closed = threading.Event()
        self._is_urgent = threading.Event()
        self._is_known = threading.Event()
        self._cause: PeerLostError | None = None
        atexit.register(self._close)
        threading.Thread(target=self._watch, name="keras_dist_liveness", daemon=True).start()

    def cause(self) -> PeerLostError | None:
        """Returns why the collectives ended, as soon as it is known; `None` if all ranks are alive."""
        self._is_urgent.set()
        self._is_known.wait(_CAUSE_SECONDS)
        return self._cause

    def _watch(self) -> None:
        failed_attempts = dict.fromkeys(self._others, 0)
        while not self._closed.wait(_URGENT_SECONDS if self._is_urgent.is_set() else _TICK_SECONDS):
            failure = self._failure_reports.cause()
            for rank, address in self._others.items():
                failed_attempts[rank] = 0 if listens(address) else failed_attempts[rank] + 1
            gone = [rank for rank, attempts in failed_attempts.items() if attempts >= _ATTEMPTS]
            if failure is None and not gone:
                continue
            if failure is None and all(map(self._failure_reports.has_exited, gone)):
                self._is_urgent.wait(_EXIT_SECONDS)
            self._cause = self._failure_reports.cause() or self._gone_error(gone)
            self._is_known.set()
            self._failure_reports.confirm()
            self._abort(str(self._cause))
            return

    def _gone_error(self, gone: Sequence[int]) -> PeerLostError:
        names = ", ".join(f"rank {rank} at {self._others[rank]}" for rank in gone)
        has_exited = all(map(self._failure_reports.has_exited, gone))
        return rank_has_gone(f"{names} {'has ended' if has_exited else 'does not answer any more'}", self._topology)

    def _close(self) -> None:
        self._failure_reports.report_exit()
        self._closed.set()
