"""What a rank that fails tells the others before it ends, and what it hears from them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from keras_dist.comm.backend import rank_has_failed
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.errors import PeerLostError
from keras_dist.topology import Topology

_KEY = "failed"
_HEARD_SECONDS = 2.0
_POLL_SECONDS = 0.1


class FailureReports:
    """Tells the others which error ends this process.

    Args:
        topology: The place of this process.
        rendezvous: The store of the ranks' messages, if there is one.
        explain: Returns the error that tells the user more than another one, or that one. A loop of the user's own
            raises those of the collectives as they are.
        serves: True if the store is in this process, and ends with it.
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
        self.are_said = False
        sys.excepthook = self._excepthook

    def of_others(self) -> PeerLostError | None:
        """Returns the error that says which rank has failed first, and how; `None` if none has, as far as is known."""
        text = self._rendezvous.get(_KEY) if self._rendezvous is not None else None
        rank, found, words = (text or "").partition(" ")
        if not found or int(rank) == self._topology.rank:
            return None
        return rank_has_failed(int(rank), words, self._topology)

    def heard(self) -> None:
        """Lets a rank that stays for it end: this one knows what it said."""
        if self._rendezvous is not None:
            self._rendezvous.put(f"heard_{self._topology.rank}", "1")

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.are_said = True
        explained = self._explain(error)
        tells = self._tell(explained)
        if explained is not error:
            explained.__cause__ = error
            kind, trace = type(explained), explained.__traceback__
        self._previous(kind, explained, trace)
        if tells and self._serves:
            self._wait_until_heard()

    def _tell(self, error: BaseException) -> bool:
        """A rank that only lost its peer is not the cause."""
        if self._rendezvous is None or isinstance(error, PeerLostError):
            return False
        if self._rendezvous.get(_KEY) is None:
            self._rendezvous.put(_KEY, f"{self._topology.rank} {type(error).__name__}: {error}")
        return True

    def _wait_until_heard(self) -> None:
        """The store ends with this process, so the others get a moment to look into it."""
        deadline = time.monotonic() + _HEARD_SECONDS
        while time.monotonic() < deadline and not self._all_have_heard():
            time.sleep(_POLL_SECONDS)

    def _all_have_heard(self) -> bool:
        others = (rank for rank in range(self._topology.size) if rank != self._topology.rank)
        return self._rendezvous is None or all(self._rendezvous.get(f"heard_{rank}") for rank in others)
