"""Reports between ranks: a rank that fails reports its error, and the other ranks read why they can't go on."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from types import TracebackType

from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.errors import PeerLostError
from keras_dist.topology import Topology

_KEY = "failed"
_READ_SECONDS = 2.0
_POLL_SECONDS = 0.1
_LIFE_SECONDS, _LIFE_RANKS = 2.0, 32  # so often a rank shows that it lives; less often if there are more ranks


class FailureReports:
    """Reports the error that ends this process to the other ranks, and reads their reports.

    Args:
        topology: The place of this process.
        rendezvous: The store of the reports, if there is one.
        explain: Returns the error that explains the cause of another one, or that one itself. In a custom training
            loop the errors of collectives reach the user as they are.
        serves: True if this process serves the store, which then ends with it.
    """

    def __init__(
        self,
        topology: Topology,
        rendezvous: Rendezvous | None,
        explain: Callable[[BaseException], BaseException],
        serves: bool = False,
    ) -> None:
        self._topology = topology
        self._rendezvous = rendezvous
        self._explain = explain
        self._serves = serves
        self._previous = sys.excepthook
        self._has_failed = False
        self._life, self._life_shown = 0, 0.0
        sys.excepthook = self._excepthook
        atexit.register(self._report_exit)

    def cause(self) -> PeerLostError | None:
        """Returns the error that says which other rank failed first, and how; `None` if no report is known."""
        rank, found, report = (self._get(_KEY) or "").partition(" ")
        if not found or int(rank) == self._topology.rank:
            return None
        return PeerLostError(
            f"Rank {rank} has failed, so {self._topology} can't go on.", report, f"Fix the error on rank {rank}."
        )

    def confirm(self) -> None:
        """Tells a rank that serves the store that this rank has read its report."""
        self._put(f"read_{self._topology.rank}", "1")

    def _report_exit(self) -> None:
        """Reports that this rank ends without an error."""
        if not self._has_failed:
            self._put(f"left_{self._topology.rank}", "1")

    def has_exited(self, rank: int) -> bool:
        """True if a rank has reported that it ends without an error."""
        return self._get(f"left_{rank}") is not None

    def show_life(self) -> None:
        """Shows the other ranks that this one is not stopped, if that is due. Called often, from a thread."""
        if time.monotonic() - self._life_shown > self._life_period():
            self._life, self._life_shown = self._life + 1, time.monotonic()
            self._put(f"life_{self._topology.rank}", str(self._life))

    def missing(self) -> str:
        """Returns which ranks have ended, or have shown no life for a while; an empty text if none is known to."""
        others = [rank for rank in range(self._topology.size) if rank != self._topology.rank]
        if exited := [rank for rank in others if self.has_exited(rank)]:
            return "".join(f"; rank {rank} has ended without an error" for rank in exited)
        before = {rank: life for rank in others if (life := self._get(f"life_{rank}")) is not None}
        if before:
            time.sleep(self._life_period() + 2 * _POLL_SECONDS)
        silent = [rank for rank, life in before.items() if self._get(f"life_{rank}") == life]
        return "".join(f"; rank {rank} shows no life" for rank in silent)

    def _life_period(self) -> float:
        return _LIFE_SECONDS * max(1.0, self._topology.size / _LIFE_RANKS)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._has_failed = True
        explained = self._explain(error)
        # A rank that only lost another one is not the cause.
        is_cause = self._rendezvous is not None and not isinstance(explained, PeerLostError)
        if is_cause and self._get(_KEY) is None:
            self._put(_KEY, f"{self._topology.rank} {type(explained).__name__}: {explained}")
        if explained is not error:
            explained.__cause__ = error
            kind, trace = type(explained), explained.__traceback__
        self._previous(kind, explained, trace)
        if is_cause and self._serves:
            self._wait_until_read()

    def _wait_until_read(self) -> None:
        """Gives the other ranks time to read the report, because the store ends with this process."""
        deadline = time.monotonic() + _READ_SECONDS
        unread = [rank for rank in range(self._topology.size) if rank != self._topology.rank]
        while time.monotonic() < deadline and (unread := [r for r in unread if not self._get(f"read_{r}")]):
            time.sleep(_POLL_SECONDS)

    def _get(self, key: str) -> str | None:
        return None if self._rendezvous is None else self._rendezvous.get(key)

    def _put(self, key: str, value: str) -> None:
        if self._rendezvous is not None:
            self._rendezvous.put(key, value)


def rank_has_gone(received: str, topology: Topology) -> PeerLostError:
    """Returns the error of a rank that knows only that another rank is gone, and not why."""
    return PeerLostError(
        f"Another rank has gone, so {topology} can't go on.",
        received,
        "Look for the rank that failed first: its error is the cause. `keras-dist run` prints it last, and "
        "`--log-dir DIR` keeps the output of every rank. If a rank has ended without an error, this rank made a "
        "call that all ranks must make: move it out of `if kd.is_chief():`.",
    )
